"""The carved FFNs: routed experts that are overlapping sets of a dense FFN's neurons, beside a shared expert.

A shared expert holds the neurons that are always active. For a token with normed input h the carved FFN computes

    y = down' [ silu(gate h) * (up h) * (1 on shared neurons + w(h) S) ],    w = k softmax(top-k of router h),

where S [experts, neurons] is 1 where an expert holds a neuron, and down' is down + left right of a low rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from artefact import Experts
from llama import BF16, Layer


def weights_of(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """k times the softmax of the top-k logits, 0 elsewhere: float32 [tokens, experts]."""
    values, ids = logits.topk(top_k, -1)
    return torch.zeros_like(logits).scatter(-1, ids, values.softmax(-1) * top_k)


Choice = Callable[[torch.Tensor, int], torch.Tensor]
"""From the router's logits and k to the weights of experts, as ``weights_of`` does."""


def holders_of(sets: torch.Tensor, neurons: int) -> torch.Tensor:
    """S: float32 [experts, neurons], 1 where an expert holds a neuron; sets int64 [experts, size]."""
    return torch.zeros(len(sets), neurons).scatter(1, sets, 1.0)


class CarvedLayer:
    """A carved FFN as a function of its normed input."""

    def __init__(self, layer: Layer, experts: Experts, top_k: int) -> None:
        self.experts, self.top_k, self._layer = experts, top_k, layer
        self._holders = holders_of(experts.sets, experts.neurons)
        self._always = torch.zeros(experts.neurons)
        self._always[experts.shared] = 1
        self._router = experts.router.to(BF16)
        self._down = experts.corrected(layer.down).to(BF16)

    def neurons(self, h: torch.Tensor, choice: Choice | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``down'`` multiplies, float32 [tokens, neurons], and the router's logits [tokens, experts]."""
        logits = F.linear(h, self._router).float()
        weights = (choice or weights_of)(logits, self.top_k)
        active = F.silu(F.linear(h, self._layer.gate)) * F.linear(h, self._layer.up)
        return active.float() * (self._always + weights @ self._holders), logits

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        return self.output(self.neurons(h)[0])

    def output(self, neurons: torch.Tensor) -> torch.Tensor:
        return F.linear(neurons.to(BF16), self._down)
