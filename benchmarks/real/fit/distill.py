"""Trains corrections and routers of a carved model end to end: its next-token distribution is to be the dense one's.

``carve.corrected`` fits each layer to the dense FFN of its own input, so errors of the layers before add up. Here the
KL divergence of the last distribution is what counts. Sets stay as they are. A selection is taken as it is; its
gradient is that of a sigmoid around the least logit that is selected, as in ``carve``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.real.artefact import Experts
from benchmarks.real.fit.carve import always_of, holders_of, weights_of
from benchmarks.real.fit.llama import COMPUTE, Layer, Llama

ROUTERS = 0.01  # the rate of routers, as a part of that of corrections; at 0.2 the divergence trebled in 40 steps
EVERY = 2  # the divergence is taken at one position in so many
Report = Callable[[int, float, float], None]
"""Told the step, its KL divergence, and a running mean."""


def selected(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights as ``carve.weights_of`` gives them, with gradients for experts near the selection too; and the load.

    Args:
        logits: float32 [tokens, experts].
        top_k: experts that a token selects.

    Returns:
        float32 [tokens, experts]; and a number that is 1 where all experts are selected equally often.
    """
    weights = weights_of(logits, top_k)
    top = logits.topk(top_k + 1, -1).values
    middle = (top[:, -1:] + top[:, -2:-1]).detach() / 2
    soft = torch.sigmoid((logits - middle) * (2 / logits.detach().std(-1, keepdim=True)))
    hard = (weights.detach() > 0).float()
    share = soft / soft.sum(-1, keepdim=True)
    load = logits.shape[1] * (hard.mean(0) / top_k * share.mean(0)).sum()
    # Where an expert is not selected its weight is 0; were it selected, it would be about 1.
    return weights + (soft - soft.detach()), load


def added(
    layer: Layer, h: torch.Tensor, neurons: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> torch.Tensor:
    """What the FFN of a dense layer adds to the stream, with a correction ``left @ right`` to its down projection.

    Args:
        h: its input [batch, tokens, hidden].
        neurons: the weight of each, float32 [batch * tokens, neurons].
    """
    mask = neurons.view(*h.shape[:-1], -1).to(COMPUTE)
    active = F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up) * mask
    return F.linear(active, layer.down) + F.linear(F.linear(active, right.to(COMPUTE)), left.to(COMPUTE))


class Student:
    """The carved model; its corrections and routers learn. Columns have unit size: steps are relative to them."""

    def __init__(self, model: Llama, layers: list[Experts], top_k: int) -> None:
        self.model, self.top_k, self.layers = model, top_k, layers
        self.routers: list[torch.Tensor] = []
        self._lengths = []
        self.load = torch.zeros(())  # of the last forward, summed over layers: how uneven experts are selected
        self._scales = []
        self.parameters: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._masks = []
        for experts in layers:
            pair = experts.left, experts.right
            scales = tuple(part.pow(2).mean(0, keepdim=True).sqrt() + 1e-12 for part in pair)
            self._scales.append(scales)
            left, right = ((part / scale).requires_grad_(True) for part, scale in zip(pair, scales, strict=True))
            self.parameters.append((left, right))
            self._masks.append((holders_of(experts.sets, experts.neurons), always_of(experts)))
            length = experts.router.pow(2).mean().sqrt()
            self._lengths.append(length)
            self.routers.append((experts.router / length).requires_grad_(True))

    def correction(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """left [hidden, rank] and right [rank, neurons] of a layer, float32."""
        left, right = (part * scale for part, scale in zip(self.parameters[number], self._scales[number], strict=True))
        return left, right

    def router(self, number: int) -> torch.Tensor:
        """The router of a layer, float32 [experts, hidden]."""
        return self.routers[number] * self._lengths[number]

    def ffn(self, number: int, h: torch.Tensor) -> torch.Tensor:
        layer = self.model.layers[number]
        if number == 0:
            self.load = torch.zeros(())
        holders, always = self._masks[number]
        # A router learns of its own choice; what it would have the layers before do is noise that adds up over layers.
        logits = F.linear(h.detach(), self.router(number).to(COMPUTE)).float().flatten(0, 1)
        weights, load = selected(logits, self.top_k)
        self.load = self.load + load
        return added(layer, h, always + weights @ holders, *self.correction(number))

    def result(self) -> list[Experts]:
        """The layers as they have been learned."""
        pairs = ([part.detach() for part in self.correction(number)] for number in range(len(self.layers)))
        return [
            Experts(experts.shared, experts.sets, self.router(number).detach(), left, right)
            for number, (experts, (left, right)) in enumerate(zip(self.layers, pairs, strict=True))
        ]


def distilled(
    student: Student, ids: torch.Tensor, seconds: float, rate: float, batch: int, balance: float, report: Report
) -> None:
    """Learns for a time, on windows int64 [count, length]; ``balance``: how much an even load counts."""
    model = student.model
    parameters = [part for pair in student.parameters for part in pair]
    groups = [{"params": parameters, "share": 1.0}, {"params": student.routers, "share": ROUTERS}]
    optimiser = torch.optim.Adam(groups, lr=rate, betas=(0.9, 0.95))
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
        (loss + balance * student.load / len(student.layers)).backward()
        for group in optimiser.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = group["share"] * rate * min(1, (step + 1) / 10) * (0.5 + 0.5 * math.cos(math.pi * done))
        optimiser.step()
        mean = loss.item() if not step else 0.95 * mean + 0.05 * loss.item()
        report(step, loss.item(), mean)
