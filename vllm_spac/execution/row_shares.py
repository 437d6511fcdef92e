"""Divides one layer's (row, expert) pairs between processors or ranks and combines their results. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """The pairs of one processor, as a separate forward.

    A kernel needs ``top_k`` experts per row: the place of a pair that belongs to the other processor repeats the row's
    first own expert, with weight 0. So no row runs an expert that its router did not choose, whose output could be
    infinite (0 * inf is NaN), and none reads a slot that is not ready.
    """

    rows: Tensor  # int64 [m], the rows that have a pair in this share, ascending
    ids: Tensor  # [m, top_k], experts
    own: Tensor  # bool [m, top_k], the pairs of this processor; at least one per row

    @classmethod
    def of(cls, ids: Tensor, own: Tensor) -> Share:
        """Returns the share of the pairs ``own`` (bool) of ``ids``, both [rows, top_k] on the CPU."""
        rows = own.any(dim=1).nonzero().flatten()
        ids, own = ids[rows], own[rows]
        first = ids.gather(1, own.int().argmax(dim=1, keepdim=True))
        return cls(rows, torch.where(own, ids, first), own)

    def pick(self, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the share's rows of ``x``, [m, hidden], and its weights, [m, top_k]: 0 for pairs of the other share.

        Both stay on their device.
        """
        rows = self.rows.to(x.device)
        return x[rows], weights[rows].masked_fill(~self.own.to(x.device), 0)


def combine(like: Tensor, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the layer's output, with the shape, dtype and device of ``like``: the sum of the shares' results.

    Added in float32 and rounded once, so the result of a row that is in one share only is unchanged bitwise.

    Args:
        like: [rows, hidden].
        parts: of each share its rows, int64 [m], and their results, [m, hidden].
    """
    total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for rows, part in parts:
        total.index_add_(0, rows.to(like.device), part.to(like.device, torch.float32))
    return total.to(like.dtype)


def runnable(ids: Tensor, real: int) -> Tensor:
    """Replaces ids that cannot be run; returns [rows, top_k] on the CPU.

    The ids of a padded row are -1, which corrupts the heap in a CPU kernel, or left over from earlier routing. They are
    replaced by those of the first row, so that padding needs no further experts; its output is not used. So is a -1 in
    a real row, to be run with weight 0; expert 0 if the first row has none there.

    Args:
        ids: [rows, top_k] on the CPU, experts.
        real: number of leading rows that belong to requests.
    """
    if real < len(ids):
        ids = torch.cat([ids[:real], ids[:1].expand(len(ids) - real, -1)])
    return ids.where(ids >= 0, ids[:1]).clamp(min=0)


def predictor_rows(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns x, ids and weights for a predictor, which must not name experts for rows that run none.

    Such a row repeats the first one with weight 0. All stays on its device.
    """
    runs = ids >= 0
    some = runs.any(1, keepdim=True)
    return x.where(some, x[:1]), ids.where(runs, ids[:1]).clamp(min=0), weights.masked_fill(~runs, 0)


def numbered(ids: Tensor, local_of: Tensor, real: int) -> Tensor:
    """Numbers experts as the process that holds some of them does; returns [rows, top_k] like ``ids``, on the CPU.

    Args:
        ids: int [rows, top_k] on the CPU, experts of the model; -1 for none.
        local_of: int64 [experts of the model], -1 for experts of another process.
        real: number of leading rows that belong to requests; all others get -1, whatever they contain.
    """
    local = torch.full_like(ids, -1)
    chosen = ids[:real]
    local[:real] = local_of[chosen.clamp(min=0).long()].masked_fill(chosen < 0, -1).to(ids.dtype)
    return local


def local_numbers(local_of: Tensor, device: torch.device) -> Tensor:
    """Returns what ``localised_on_device`` looks experts up in: int32 [experts of the model + 1], the last one is -1.

    Args:
        local_of: as in ``numbered``.
    """
    return torch.cat([local_of, local_of.new_full((1,), -1)]).int().to(device)


def localised_on_device(ids: Tensor, numbers: Tensor) -> Tensor:
    """As ``numbered``, of rows that may be padding, where they are: two launches, which a CUDA graph can hold.

    Args:
        ids: int [rows, top_k], experts of the model; whatever else they contain is none.
        numbers: as of ``local_numbers``, on the device of ``ids``.

    Returns:
        int32 [rows, top_k], -1 for experts of another process and for none.
    """
    return numbers[ids.clamp(-1, len(numbers) - 1)]  # both ends are the last number


def typed_like(slots: np.ndarray, ids: Tensor) -> Tensor:
    """Returns ``slots`` with the dtype of ``ids``."""
    found = torch.from_numpy(slots)
    return found if found.dtype == ids.dtype else found.to(ids.dtype)
