"""Torch twin of ``combine``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Division, Mail
from .route import routed


def combine(
    y: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: int,
    out: Tensor,
    live: Tensor | None = None,
    division: Division | None = None,
    mail: Mail | None = None,
) -> None:
    """Twin of ``combine.combine``."""
    rows, k, d = y.shape
    counts, results = routed(topk_ids, topk_weights, experts, live).view(rows, k) >= 0, None
    if division is not None and mail is not None and division.state[1]:
        theirs = division.left[:rows] != 0
        counts &= ~theirs
        results = torch.where(theirs.any(1, keepdim=True), mail.results[:rows], 0)
    values, total = torch.where(counts[..., None], y.float(), 0), torch.zeros(rows, d)
    for slot in range(k):
        total += values[:, slot]
    out.copy_(total if results is None else total + results)
