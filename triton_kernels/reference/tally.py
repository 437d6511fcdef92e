"""Torch twin of ``tally``: operations of fixed shape, which a CUDA graph can capture too."""

from __future__ import annotations

import torch
from torch import Tensor


def tally(
    counted: Tensor,
    votes: Tensor,
    natural: tuple[Tensor, Tensor],
    members: Tensor,
    chosen: tuple[Tensor, Tensor],
) -> None:
    """Twin of ``tally.tally``."""
    voting = votes != 0
    silent = ~voting[:, None]
    weights, ids = (tensor.masked_fill(silent, 0) for tensor in natural)
    inside = members.index_select(0, ids.flatten()).view(ids.shape)
    lost = weights.masked_fill(inside, 0).sum(1) / weights.sum(1).clamp_min(1e-30)
    weights, ids = (tensor.masked_fill(silent, 0) for tensor in chosen)
    uses = torch.zeros(len(members), dtype=torch.int32, device=ids.device)
    uses.index_add_(0, ids.flatten(), (weights != 0).flatten().int())
    emptied = voting & ~inside.any(1)
    found = voting.sum(), lost.sum(dtype=torch.float64), voting.any(), (uses > 0).sum(), emptied.sum()
    counted.add_(torch.stack([count.double() for count in found]))
