"""Adds the effect of a budget on the rows of a forward to counters on the device: one program, one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .route import MAX_EXPERTS

_PAIRS = 512  # pairs that the program reads at once


@triton.jit(
    do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["votes", "natural", "natural_ids", "weights", "ids"]
)
def _tally_kernel(
    counted, votes, natural, natural_ids, members, weights, ids, n_rows, n_experts,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    slot, bins = tl.arange(0, SLOTS), tl.arange(0, BINS)
    uses = tl.zeros((BINS,), tl.int32)
    dropped = tl.zeros((ROWS,), tl.float64)
    voted = tl.zeros((ROWS,), tl.int32)
    emptied = tl.zeros((ROWS,), tl.int32)
    for start in range(0, n_rows, ROWS):
        row = start + tl.arange(0, ROWS)
        voting = tl.load(votes + row, mask=row < n_rows, other=0) != 0
        here = voting[:, None] & (slot < TOP_K)[None, :]
        pair = row.to(tl.int64)[:, None] * TOP_K + slot[None, :]
        weight = tl.load(natural + pair, mask=here, other=0.0)
        expert = tl.load(natural_ids + pair, mask=here, other=0)
        inside = tl.load(members + expert, mask=here, other=1) != 0
        lost = tl.sum(tl.where(inside, 0.0, weight), 1) / tl.maximum(tl.sum(weight, 1), 1e-30)
        dropped += lost.to(tl.float64)
        voted += voting.to(tl.int32)
        emptied += (voting & (tl.sum((here & inside).to(tl.int32), 1) == 0)).to(tl.int32)
        used = here & (tl.load(weights + pair, mask=here, other=0.0) != 0.0)
        expert = tl.load(ids + pair, mask=used, other=0).to(tl.int32)
        uses += tl.histogram(tl.reshape(tl.where(used, expert, n_experts), [ROWS * SLOTS]), BINS)
    rows = tl.sum(voted, 0)
    distinct = tl.sum(((uses > 0) & (bins < n_experts)).to(tl.int32), 0)
    tl.store(counted, tl.load(counted) + rows.to(tl.float64))
    tl.store(counted + 1, tl.load(counted + 1) + tl.sum(dropped, 0))
    tl.store(counted + 2, tl.load(counted + 2) + (rows > 0).to(tl.float64))
    tl.store(counted + 3, tl.load(counted + 3) + distinct.to(tl.float64))
    tl.store(counted + 4, tl.load(counted + 4) + tl.sum(emptied, 0).to(tl.float64))


def tally(
    counted: Tensor,
    votes: Tensor,
    natural: tuple[Tensor, Tensor],
    members: Tensor,
    chosen: tuple[Tensor, Tensor],
) -> None:
    """Adds the counts of the rows that vote.

    Args:
        counted: [5] float64, is incremented by: the voting rows; the sum of the shares of their weights outside
            the shortlist; 1 if any row votes; the distinct experts that voting rows use with nonzero weight; the
            voting rows none of whose experts is in the shortlist.
        votes: [M] float64; rows with a vote above 0 are counted, each as one.
        natural, chosen: (float32 [M, k], int32 or int64 [M, k]), weights and ids before and after the budget.
        members: [N] bool, the shortlist; N <= 1024.
    """
    rows, k = chosen[1].shape
    assert counted.shape == (5,) and counted.dtype == votes.dtype == torch.float64 and len(members) <= MAX_EXPERTS
    assert all(tensor.shape == (rows, k) and tensor.is_contiguous() for tensor in (*natural, *chosen))
    slots = triton.next_power_of_2(k)
    _tally_kernel[(1,)](
        counted, votes, *natural, members, *chosen, rows, len(members), TOP_K=k, SLOTS=slots,
        ROWS=max(1, _PAIRS // slots), BINS=max(16, triton.next_power_of_2(len(members) + 1)), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
