"""Votes: how much each row of a step counts when the experts of a layer are ranked (ours).

MoE-Spec's Eq. 5 gives every row of a verify step the same vote, so a draft token that is reached once in a thousand
steps counts as much as the row that is certain. Weighted,

    s_i = sum_t w_t g_i(h_t),    w_t = P(t is reached) ** alpha,

where P is the product of the draft's probabilities along the path to t. alpha = 0 is Eq. 5, alpha = 1 the expected
mass.

Votes are multiples of 2**-12, from 2**-12 to 1. So the product of a vote and a float32 score is exact in float64, and
so are sums of such products whose terms are within a factor of 2**17 / rows: their order does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.core import RequestRows, RowKind, Step, weights_of

STEPS = 1 << 12  # votes are multiples of 1 / STEPS


def vote(probability: float, alpha: float) -> float:
    """Returns ``probability ** alpha`` as a multiple of 1 / ``STEPS``; at least one, since 0 is no vote."""
    return min(max(1, round(probability**alpha * STEPS)), STEPS) / STEPS


def voted(step: Step, alpha: float | None) -> Step:
    """Returns ``step`` with the rows' votes as their weights, which were the probabilities that they are reached.

    A request whose votes are all 1 has no weights, and with ``alpha`` None (uniform votes) none has.
    """
    if all(request.weights is None for request in step.requests):
        return step
    requests = []
    for request in step.requests:
        votes = () if alpha is None else tuple(vote(weight, alpha) for weight in request.weights or ())
        requests.append(replace(request, weights=votes if any(each != 1 for each in votes) else None))
    return replace(step, requests=tuple(requests))


class Group(NamedTuple):
    """Rows that are ranked together.

    Attributes:
        rows: a slice, or int64 row numbers.
        votes: float64 [rows]; None: all are 1.
    """

    rows: slice | Tensor
    votes: Tensor | None


def groups(step: Step, kinds: Sequence[RowKind], window: int | None, device: torch.device | str) -> list[Group]:
    """Returns the rows of ``step`` that are ranked together, with its weights as votes.

    Args:
        kinds: of the rows that vote.
        window: number of consecutive rows of a request that are ranked at a time; None: all rows of the step.
        device: of the votes.
    """
    asked = [request for request in step.requests if request.kind in kinds]
    parts = [asked] if window is None else [[part] for request in asked for part in request.windows(window)]
    return [_group(part, device) for part in parts if part]


def _group(requests: Sequence[RequestRows], device: torch.device | str) -> Group:
    weights, first, last = weights_of(requests), requests[0].start, requests[-1].stop
    rows: slice | Tensor = slice(first, last)
    if last - first != sum(request.stop - request.start for request in requests):
        rows = torch.cat([torch.arange(request.start, request.stop) for request in requests])
    return Group(rows, None if weights is None else torch.tensor(weights, dtype=torch.float64, device=device))


def unknown(step: Step) -> int:
    """Returns the number of requests that verify drafts whose probabilities are not known."""
    return sum(request.kind == RowKind.VERIFY and request.weights is None for request in step.requests)
