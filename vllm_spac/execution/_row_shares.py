"""One layer's (row, expert) pairs, divided between two processors, and their results put together again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The pairs of one processor, as a forward of their own.

    A kernel wants ``top_k`` experts for each row: the place of a pair that is another's repeats the row's first expert
    that is its own, with weight 0. So no row meets an expert that its router did not choose, whose output could
    be infinite, and 0 * inf is NaN; nor a slot that is not ready.

    Attributes:
        rows: int64 [m], the rows that have a pair here, ascending.
        ids: [m, top_k], experts.
        own: bool [m, top_k], the pairs of this processor; each row has one at least.
    """

    rows: Tensor
    ids: Tensor
    own: Tensor

    @classmethod
    def of(cls, ids: Tensor, own: Tensor) -> Share:
        """The pairs ``own`` (bool) of ``ids``, both [rows, top_k] on the CPU."""
        rows = own.any(dim=1).nonzero().flatten()
        ids, own = ids[rows], own[rows]
        first = ids.gather(1, own.int().argmax(dim=1, keepdim=True))
        return cls(rows, torch.where(own, ids, first), own)

    def pick(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Its rows [m, hidden] of ``x``, and its weights [m, top_k]: 0 for what another computes. On their device."""
        rows = self.rows.to(x.device)
        return x[rows], weights[rows].masked_fill(~self.own.to(x.device), 0)


def combine(like: Tensor, parts: Iterable[tuple[Share, Tensor]]) -> Tensor:
    """The layer's output, of the shape, dtype and device of ``like``: the sum of each share's [m, hidden].

    Added in float32 and rounded once, so a row that lies in one share keeps its bits.
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for share, part in parts:
        total.index_add_(0, share.rows.to(like.device), part.to(like.device, torch.float32))
    return total.to(like.dtype)
