"""Torch twin of ``shortlist``: operations of fixed shape, which a CUDA graph can capture too."""

from __future__ import annotations

import torch
from torch import Tensor


def first_members(order: Tensor, count: Tensor) -> Tensor:
    """Returns bool [N]: whether each expert is among the first ``count`` (int64 []) of ``order`` (int64 [N])."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order, dtype=torch.bool).scatter_(0, order, places < count)


def behind_empty(order: Tensor, held: Tensor) -> Tensor:
    """Returns ``order`` with experts without mass moved after those with mass; both keep their order."""
    return order[(held[order] == 0).sort(stable=True).indices]


def mass_count(order: Tensor, held: Tensor, share: Tensor, least: int) -> Tensor:
    """Returns int64 []: the smallest count >= ``least`` whose first experts hold ``share`` (float64 []) of the mass.

    For a share of 1.0 or more, it is the number of all experts.
    """
    mass = held[order].to(torch.float64).cumsum(0)
    count = (1 + (mass < share * mass[-1]).sum()).clamp_(min=least)
    return count.masked_fill_(share >= 1, len(order))


def shortlist(
    scores: Tensor,
    bound: Tensor | None,
    held: Tensor | None = None,
    share: Tensor | None = None,
    least: int = 1,
    empty_last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Twin of ``shortlist.shortlist``."""
    order = scores.sort(descending=True, stable=True).indices
    if held is None:
        assert bound is not None, "a number or a share"
    else:
        assert share is not None, "a share of what is held"
        order = behind_empty(order, held) if empty_last else order
        bound = mass_count(order, held, share, least)
    return first_members(order, bound), order[0]
