"""The carved FFNs: what the artefact makes of the dense model's.

A layer's neurons are a shared expert of those that are always active and routed experts that are overlapping sets of
the others. For a token with normed input h the carved FFN computes

    y = down' [ silu(gate h) * (up h) * (1 on shared neurons + w(h) S) ],    w = k softmax(top-k of router h),

where S [experts, neurons] is 1 where an expert holds a neuron, and down' = down + left right.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.real import artefact
from benchmarks.real.artefact import Experts
from benchmarks.real.fit.llama import COMPUTE, Layer, Llama


def weights_of(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """k times the softmax of the top-k logits, 0 elsewhere: float32 [tokens, experts]."""
    values, ids = logits.topk(top_k, -1)
    return torch.zeros_like(logits).scatter(-1, ids, values.softmax(-1) * top_k)


def always_of(experts: Experts) -> torch.Tensor:
    """1 for each neuron of the shared expert, float32 [neurons]."""
    return torch.zeros(experts.neurons).index_fill(0, experts.shared, 1.0)


def holders_of(sets: torch.Tensor, neurons: int) -> torch.Tensor:
    """S: float32 [experts, neurons], 1 where an expert holds a neuron; sets int64 [experts, size]."""
    return torch.zeros(len(sets), neurons).scatter(1, sets, 1.0)


class CarvedLayer:
    """A carved FFN as a function of its normed input."""

    def __init__(self, layer: Layer, experts: Experts, top_k: int) -> None:
        self.experts, self.top_k, self._layer = experts, top_k, layer
        self._holders, self._always = holders_of(experts.sets, experts.neurons), always_of(experts)
        self._router = experts.router.to(COMPUTE)
        self._down = self.experts.corrected(self._layer.down).to(COMPUTE)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """The router's logits, float32 [..., experts]."""
        return F.linear(h, self._router).float()

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        weights = weights_of(self.logits(h), self.top_k)
        active = F.silu(F.linear(h, self._layer.gate)) * F.linear(h, self._layer.up)
        neurons = active.float() * (self._always + weights @ self._holders)
        return F.linear(neurons.to(COMPUTE), self._down)


def carved_layers(model: Llama, path: Path) -> list[CarvedLayer]:
    """The FFNs of the target that an artefact makes of the dense model."""
    target = artefact.load(path)[artefact.TARGET]
    top_k = target.numbers["top_k"]
    return [CarvedLayer(layer, experts, top_k) for layer, experts in zip(model.layers, target.layers, strict=True)]
