"""Twin of ``cover``: operations of fixed shape, which a CUDA graph may hold too."""

from __future__ import annotations

import torch
from torch import Tensor

Chosen = tuple[Tensor, Tensor]  # weights and ids, [rows, k]


def truncated(probs: Tensor, weights: Tensor, ids: Tensor, inside: Tensor, best: Tensor) -> Chosen:
    """The natural choice without what is outside.

    Args:
        probs: float [rows, N].
        inside: bool [rows, k], which of ``ids`` the shortlist has.
        best: int64 [], the first of the shortlist.

    Returns:
        Weights and ids as they came. What is outside has weight 0 and the best id that its row keeps, equals the
        lowest; in a row that keeps nothing, ``best``.
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
    """The ``top_k`` best of ``chosen_by`` (float [rows, N]) among ``open_to`` (bool [N] or [rows, N]).

    Returns:
        float32 and int64 [rows, top_k]: weights by ``probs``, and ids; the best first, equals by the lowest id.
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


def where(rows: Tensor, first: Chosen, second: Chosen) -> Chosen:
    """``first`` where ``rows`` (bool [rows]), else ``second``; ids have the dtype of ``first``'s."""
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
) -> tuple[Tensor, Tensor]:
    """Twin of ``cover.cover``."""
    experts = ids.masked_fill(~votes[:, None], 0)
    inside = members.index_select(0, experts.flatten()).view(ids.shape)
    if substitute:
        chosen_by = probs if bias is None else probs + bias
        covered = substituted(probs, chosen_by, members, ids.shape[1], renormalize, scale)
    else:
        covered = truncated(probs, weights, experts, inside, best)
    return where(~votes | inside.all(1), (weights, ids), covered)
