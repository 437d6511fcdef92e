"""Torch twin of ``shortlist``: operations of fixed shape, which a CUDA graph can capture too."""

from __future__ import annotations

import torch
from torch import Tensor


def first_members(order: Tensor, count: Tensor) -> Tensor:
    """Returns bool [N]: whether each expert is among the first ``count`` (int64 []) of ``order`` (int64 [N])."""
    places = torch.arange(len(order), device=order.device)
    return torch.empty_like(order, dtype=torch.bool).scatter_(0, order, places < count)


def sorted_by(scores: Tensor) -> Tensor:
    """Returns int64 [N]: experts by ``scores``, the greatest first, ties by the lowest id.

    Args:
        scores: [N]; or [2, N], of which the second decide where the first are equal.
    """
    order = scores.view(-1, scores.shape[-1])[-1].sort(descending=True, stable=True).indices
    return order if scores.ndim == 1 else order[scores[0][order].sort(descending=True, stable=True).indices]


def selected_first(order: Tensor, selected: Tensor) -> Tensor:
    """Returns ``order`` with the ``selected`` experts (bool [N]) before the others; both keep their order."""
    return order[(~selected[order]).sort(stable=True).indices]


def mass_count(order: Tensor, held: Tensor, share: Tensor, least: int) -> Tensor:
    """Returns int64 []: the smallest count >= ``least`` whose first experts hold ``share`` (float64 []) of the mass.

    For a share of 1.0 or more, it is the number of all experts.
    """
    mass = held[order].to(torch.float64).cumsum(0)
    count = (1 + (mass < share * mass[-1]).sum()).clamp_(min=least)
    return count.masked_fill_(share >= 1, len(order))


def shortlist(
    scores: Tensor,
    selected: Tensor,
    bound: Tensor | None,
    held: Tensor | None = None,
    share: Tensor | None = None,
    least: int = 1,
) -> tuple[Tensor, Tensor]:
    """Twin of ``shortlist.shortlist``."""
    order = selected_first(sorted_by(scores), selected)
    if held is None:
        assert bound is not None, "a number or a share"
    else:
        assert share is not None, "a share of what is held"
        bound = mass_count(order, held, share, least)
    return first_members(order, bound), order[0]
