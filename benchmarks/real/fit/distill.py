"""Trains the corrections of a carved model end to end: its next-token distribution is to be the dense model's.

``carve.corrected`` fits each layer to the dense FFN of its own input, so errors of the layers before add up. Here the
KL divergence of the last distribution is what counts. Sets and routers stay as they are, and with them the routing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from artefact import Experts
from carve import holders_of, weights_of
from llama import COMPUTE, Llama

EVERY = 2  # the divergence is taken at one position in so many
Report = Callable[[int, float, float], None]
"""Told the step, its KL divergence, and a running mean."""


class Student:
    """The carved model; its corrections learn. Columns are kept at unit size: a step is relative to what is there."""

    def __init__(self, model: Llama, layers: list[Experts], top_k: int) -> None:
        self.model, self.top_k, self.layers = model, top_k, layers
        self._scales = []
        self.parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masks = []
        for experts in layers:
            pair = experts.left, experts.right
            scales = tuple(part.pow(2).mean(0, keepdim=True).sqrt() + 1e-12 for part in pair)
            self._scales.append(scales)
            left, right = ((part / scale).requires_grad_(True) for part, scale in zip(pair, scales, strict=True))
            self.parameters.append((left, right))
            always = torch.zeros(experts.neurons)
            always[experts.shared] = 1
            self._masks.append((experts.router.to(COMPUTE), holders_of(experts.sets, experts.neurons), always))

    def correction(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """left [hidden, rank] and right [rank, neurons] of a layer, float32."""
        left, right = (part * scale for part, scale in zip(self.parameters[number], self._scales[number], strict=True))
        return left, right

    def ffn(self, number: int, h: torch.Tensor) -> torch.Tensor:
        layer = self.model.layers[number]
        router, holders, always = self._masks[number]
        with torch.no_grad():
            logits = F.linear(h, router).float()
            mask = (always + weights_of(logits.flatten(0, 1), self.top_k) @ holders).view(*h.shape[:2], -1).to(COMPUTE)
        neurons = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up) * mask
        left, right = (part.to(COMPUTE) for part in self.correction(number))
        return F.linear(neurons, layer.down) + F.linear(F.linear(neurons, right), left)

    def result(self) -> list[Experts]:
        """The layers as they have been learned."""
        pairs = ([part.detach() for part in self.correction(number)] for number in range(len(self.layers)))
        return [
            Experts(experts.shared, experts.sets, experts.router, left, right)
            for experts, (left, right) in zip(self.layers, pairs, strict=True)
        ]


def distilled(student: Student, ids: torch.Tensor, seconds: float, rate: float, batch: int, report: Report) -> None:
    """Learns for a time, on windows int64 [count, length]."""
    model = student.model
    parameters = [part for pair in student.parameters for part in pair]
    optimiser = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.95))
    begun, mean = time.monotonic(), 0.0
    generator = torch.Generator().manual_seed(1)
    for step, rows in enumerate(ids.split(batch)):
        done = (time.monotonic() - begun) / seconds
        if done >= 1:
            break
        offset = int(torch.randint(0, EVERY, (1,), generator=generator))
        with torch.no_grad():
            goal = model.logits(model.hidden(rows)[:, offset::EVERY]).log_softmax(-1)
        got = model.logits(model.hidden(rows, student.ffn)[:, offset::EVERY]).log_softmax(-1)
        loss = F.kl_div(got, goal, log_target=True, reduction="none").sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * done))
        optimiser.step()
        mean = loss.item() if not step else 0.95 * mean + 0.05 * loss.item()
        report(step, loss.item(), mean)
