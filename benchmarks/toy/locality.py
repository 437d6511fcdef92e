"""Losses that make a router's choices local: the same experts for neighbouring tokens, all experts over the corpus.

Published models of this kind route locally without being asked to; a toy trained on little text does not. The
losses act on router probabilities p of shape [tokens, experts], the tokens of equally long windows in order:

- the entropy of the *mean* of p over 8 and over 64 neighbouring tokens, pulled to a target. It is low only if each
  token's p is peaked and neighbours agree; asking for similar neighbours alone flattens p instead. Where text is of
  several kinds, routing becomes more local by itself in the course of training than published models' is.
- a lower bound of each token's own entropy, so that the last of its top-k experts still mean something.
- balance over many batches (``Balance``): experts are used evenly, while a single window may use few.

Experts that are hardly used in spite of that get half of a busy one's tokens (``share_busy_experts``).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from nets import SparseMLP
from torch import Tensor

NEAR, FAR = 8, 64  # tokens
NEAR_TARGET, FAR_TARGET, TOKEN_BOUND = 3.1, 3.25, 2.6  # nats
NEAR_WEIGHT, FAR_WEIGHT, TOKEN_WEIGHT = 0.4, 0.8, 0.6
_TINY = 1e-9


def entropy(p: Tensor) -> Tensor:
    """p [..., experts] -> entropy in nats [...]."""
    return -(p * p.clamp_min(_TINY).log()).sum(-1)


def mean_entropy(p: Tensor, windows: int, near: int) -> Tensor:
    """Entropy of the mean of p [tokens, experts] over each run of ``near`` tokens of its ``windows`` equal windows."""
    sums = F.pad(p.view(windows, -1, p.shape[-1]).cumsum(1), (0, 0, 1, 0))
    return entropy((sums[:, near:] - sums[:, :-near]) / near)


def shape_loss(p: Tensor, windows: int) -> Tensor:
    """The three entropy terms of one layer, in nats: p [tokens, experts], the tokens of ``windows`` equal windows."""
    near = (mean_entropy(p, windows, NEAR).mean() - NEAR_TARGET).abs()
    far = (mean_entropy(p, windows, FAR).mean() - FAR_TARGET).abs()
    token = F.relu(TOKEN_BOUND - entropy(p)).mean()
    return NEAR_WEIGHT * near + FAR_WEIGHT * far + TOKEN_WEIGHT * token


class Balance:
    """Pushes each layer's probabilities away from the experts that were used most over the last batches.

    The push is stronger the less the least used expert of all layers is used: with a constant one, experts die.

    Args:
        decay: of the running means per batch. Much slower ones still show a load for experts that died.
        weight: of the loss while the least used expert takes part in 1 % of the tokens.
    """

    def __init__(self, decay: float = 0.93, weight: float = 0.1) -> None:
        self.decay, self.weight = decay, weight
        self.use: Tensor | None = None  # [layers, experts], share of the selections
        self.mean: Tensor | None = None  # [layers, experts], mean of p

    def loss(self, p: list[Tensor], chosen: list[Tensor]) -> Tensor:
        """p [tokens, experts] and chosen [tokens, top_k] of each layer -> the loss, and learns from this batch."""
        experts, top_k = p[0].shape[-1], chosen[0].shape[-1]
        use = torch.stack([torch.bincount(ids.flatten(), minlength=experts) / ids.numel() for ids in chosen])
        mean = torch.stack([each.mean(0) for each in p])
        if self.use is None or self.mean is None:
            self.use, self.mean = use, mean.detach()
        self.use = self.use * self.decay + use * (1 - self.decay)
        self.mean = self.mean * self.decay + mean.detach() * (1 - self.decay)
        busy = 0.5 * (self.use.clamp_min(1e-5).log() + self.mean.clamp_min(1e-5).log()) + math.log(experts)
        least = float(self.use.min()) * top_k  # share of the tokens that select it
        urgency = min(max(math.sqrt(0.01 / max(least, 1e-6)), 0.5), 4.0)
        return self.weight * urgency * (mean * busy).sum()


@torch.no_grad()
def share_busy_experts(layers: list[SparseMLP], use: Tensor, least: float = 5e-4, apart: float = 0.3) -> int:
    """Replaces each expert that is hardly used by a copy of its layer's most used one; returns how many.

    The routers' rows of the two are moved apart in a random direction, by ``apart`` of their length, so that each gets
    the tokens on its side and they become different in further training.

    Args:
        use: [layers, experts], share of the selections, as in ``Balance.use``; changed for those that share.
        least: share below which an expert is replaced.
    """
    replaced = 0
    for mlp, shares in zip(layers, use, strict=True):
        for expert in (shares < least).nonzero().flatten().tolist():
            busy = int(shares.argmax())
            row = mlp.gate.weight[busy].clone()
            offset = F.normalize(torch.randn_like(row), dim=0) * row.norm() * apart
            mlp.gate.weight[expert], mlp.gate.weight[busy] = row + offset, row - offset
            mlp.w13[expert], mlp.w2[expert] = mlp.w13[busy], mlp.w2[busy]
            shares[expert] = shares[busy] = shares[busy] / 2
            replaced += 1
    return replaced
