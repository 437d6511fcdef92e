"""The shortlist of a layer in one verify step: MoE-Spec's router ranking, with a budget B or a mass target.

    s_i = sum over voting rows t of p[t, i]
    i comes before j  <=>  s_i > s_j, or s_i = s_j and i < j
    B(eps)            =    the least B with  sum of the B first s  >=  (1 - eps) * sum of all s
    shortlist         =    the max(least, min(budget, B(eps))) first experts

Sums are float64: rows add up to 2**-29 of the smallest probability without rounding, so that neither the order of the
sum nor the processor decides a tie. Expert i needs no sorting: it is in iff the number of experts before it is below
the budget and their mass below the target.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Shortlist
from .route import MAX_EXPERTS


@triton.jit
def _sum_kernel(p, votes, scores, n_rows, n_experts, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A program sums COLUMNS experts over all rows."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for start in range(0, n_rows, ROWS):
        inside = start + row < n_rows
        votes_here = tl.load(votes + start + row, mask=inside, other=0) != 0
        at = (start + row).to(tl.int64)[:, None] * n_experts + column[None, :]
        mask = (inside & votes_here)[:, None] & (column < n_experts)[None, :]
        total += tl.load(p + at, mask=mask, other=0.0).to(tl.float64)
    tl.store(scores + column, tl.sum(total, 0), mask=column < n_experts)


@triton.jit
def _select_kernel(
    scores, ranks, members, size, n_experts, least, budget, EPSILON: tl.constexpr, BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program; expert i in lane i, compared with CHUNK others at a time."""
    i = tl.arange(0, BINS)
    mine = tl.load(scores + i, mask=i < n_experts, other=0.0)
    rank = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.float64)
    for start in range(0, n_experts, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(scores + j, mask=j < n_experts, other=0.0)  # padding: no mass and a late id, ahead of nobody
        ahead = (other[None, :] > mine[:, None]) | ((other[None, :] == mine[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum(ahead.to(tl.int32), 1)
        before += tl.sum(tl.where(ahead, other[None, :], 0.0), 1)
    target = tl.sum(mine, 0) * (1.0 - tl.full((), EPSILON, tl.float64))
    member = (i < n_experts) & (((rank < budget) & (before < target)) | (rank < least))
    tl.store(ranks + i, rank, mask=i < n_experts)
    tl.store(members + i, member, mask=i < n_experts)
    tl.store(size, tl.sum(member.to(tl.int32), 0))


def rank(p: Tensor, votes: Tensor, least: int, budget: int | None = None, epsilon: float | None = None) -> Shortlist:
    """Rank the experts of one layer and cut the list.

    Args:
        p: [M, N] float32 router probabilities over all N <= 1024 experts, finite and not negative, contiguous.
        votes: [M] bool; False for rows in prefill and for padding. Without a vote all scores are 0, and the ``least``
            lowest ids (with a budget alone: the ``budget`` lowest) are returned: budget no row then.
        least: experts in any case; k, because substitution cannot do with less.
        budget: B, at least ``least``; None: as many as the mass asks for.
        epsilon: the share of the mass that may be lost, 0 <= epsilon < 1; None: whatever the budget cuts off.

    Returns:
        Tensors of fixed size, so that nothing on the host depends on the cut.
    """
    rows, experts = p.shape
    assert p.dtype == torch.float32 and p.is_contiguous() and experts <= MAX_EXPERTS
    assert votes.shape == (rows,) and votes.dtype == torch.bool and votes.is_contiguous()
    assert budget is not None or epsilon is not None, "give a budget, a mass target, or both"
    budget = experts if budget is None else budget
    assert 1 <= least <= budget <= experts, f"needs 1 <= least = {least} <= budget = {budget} <= {experts} experts"
    assert epsilon is None or 0 <= epsilon < 1, f"epsilon = {epsilon} must be in [0, 1)"
    device = p.device
    made = Shortlist(
        torch.empty(experts, dtype=torch.float64, device=device),
        torch.empty(experts, dtype=torch.int32, device=device),
        torch.empty(experts, dtype=torch.bool, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    _sum_kernel[(triton.cdiv(experts, 32),)](
        p, votes, made.scores, rows, experts, ROWS=32, COLUMNS=32, enable_fp_fusion=False
    )
    if epsilon is None:
        least = budget
    bins = max(16, triton.next_power_of_2(experts))
    _select_kernel[(1,)](
        *made, experts, least, budget, EPSILON=float(epsilon or 0.0), BINS=bins, CHUNK=min(16, 4096 // bins),
        num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return made
