"""Torch twin of ``cover``: operations of fixed shape, which a CUDA graph can capture too."""

from __future__ import annotations

import torch
from torch import Tensor

Chosen = tuple[Tensor, Tensor]  # weights and ids, [rows, k]


def truncated(probs: Tensor, weights: Tensor, ids: Tensor, inside: Tensor, best: Tensor) -> Chosen:
    """Returns the natural choice without the experts outside the shortlist.

    Args:
        probs: float [rows, N].
        inside: bool [rows, k], which of ``ids`` are in the shortlist.
        best: int64 [], the first expert of the shortlist.

    Returns:
        Weights and ids in the shapes and dtypes of the arguments. A pair outside the shortlist has weight 0 and the
        best id that its row keeps (ties: the lowest), or ``best`` in a row that keeps none.
    """
    wide, outside, experts = ids.long(), ~inside, probs.shape[1]
    scores = probs.gather(1, wide).masked_fill_(outside, -torch.inf)
    leading = inside & (scores == scores.amax(1, keepdim=True))
    stand_in = wide.masked_fill(~leading, experts).amin(1, keepdim=True)
    stand_in = torch.where(stand_in < experts, stand_in, best)
    return weights.masked_fill(outside, 0), torch.where(inside, wide, stand_in).to(ids.dtype)


def substituted(
    probs: Tensor, chosen_by: Tensor, open_to: Tensor, top_k: int, renormalize: bool, scale: float
) -> Chosen:
    """Chooses the ``top_k`` best of ``chosen_by`` (float [rows, N]) among ``open_to`` (bool [N] or [rows, N]).

    Returns:
        float32 and int64 [rows, top_k]: weights by ``probs``, and ids; the best first, ties by the lowest id.
    """
    scores = chosen_by.masked_fill(~open_to, -torch.inf)
    ids = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = probs.gather(1, ids).to(torch.float32)
    if renormalize:
        total = weights.sum(1, keepdim=True)
        weights /= total.masked_fill_(total == 0, 1)
    if scale != 1.0:
        weights *= scale
    return weights, ids


def within_groups(inside: Tensor, scores: Tensor, top_k: int, groups: int, top_groups: int, summed: int) -> Tensor:
    """Returns bool [rows, N]: the members ``inside`` (bool [N]) that are in the best groups of each row.

    A row with fewer than ``top_k`` of these gets all members. A group's score is the sum of its ``summed`` best
    ``scores`` (float [rows, N]).
    """
    best = inside & _in_top_groups(scores, groups, top_groups, summed)
    return best | (inside & (best.sum(1, keepdim=True) < top_k))


def _in_top_groups(scores: Tensor, groups: int, top_groups: int, summed: int) -> Tensor:
    """Returns bool [rows, N]: whether an expert's group is among the best of its row."""
    rows, experts = scores.shape
    worth = scores.view(rows, groups, -1).topk(summed, dim=2).values.sum(2)
    best = worth.sort(dim=1, descending=True, stable=True).indices[:, :top_groups]
    chosen = torch.zeros_like(worth, dtype=torch.bool).scatter(1, best, True)
    return chosen.repeat_interleave(experts // groups, dim=1)


def where(rows: Tensor, first: Chosen, second: Chosen) -> Chosen:
    """Returns ``first`` where ``rows`` (bool [rows]), else ``second``; ids have the dtype of ``first``'s."""
    here = rows[:, None]
    return torch.where(here, first[0], second[0]), torch.where(here, first[1], second[1].to(first[1].dtype))


def cover(
    probs: Tensor,
    weights: Tensor,
    ids: Tensor,
    votes: Tensor,
    members: Tensor,
    best: Tensor,
    substitute: bool,
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
    groups: int | None = None,
    top_groups: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Twin of ``cover.cover``."""
    silent = votes == 0
    experts = ids.masked_fill(silent[:, None], 0)
    inside = members.index_select(0, experts.flatten()).view(ids.shape)
    chosen_by, open_to = probs if bias is None else probs + bias, members
    if substitute and groups is not None and top_groups is not None:
        open_to = within_groups(members, chosen_by, ids.shape[1], groups, top_groups, 1 if bias is None else 2)
    if substitute:
        covered = substituted(probs, chosen_by, open_to, ids.shape[1], renormalize, scale)
    else:
        covered = truncated(probs, weights, experts, inside, best)
    return where(silent | inside.all(1), (weights, ids), covered)
