"""Chooses the shortlist of a layer: its best experts by score, a given number or enough to hold a share of a mass.

    i comes before j   <=>   i is selected and j is not, or else s_i > s_j, or s_i = s_j and i < j
    count              =     B,  or  max(least, 1 + #{i : mass of i and of all before it < share * mass of all})
    shortlist          =     the first ``count`` experts

So a selected expert is cut only where more are selected than ``count``. One program, whose lanes are experts, without
sorting: expert i is a member if fewer than ``count`` experts come before it. Sums are float64. Scores may be pairs, of
which the second decide where the first are equal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .route import MAX_EXPERTS

_COMPARED = 4096  # pairs of experts that a program compares at once


@triton.jit(do_not_specialize_on_alignment=["scores", "selected", "bound"])
def _shortlist_kernel(
    scores, selected, bound, held, share, members, best, n_experts, least,
    PAIRS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BINS)
    live = i < n_experts
    mine = tl.load(scores + i, mask=live, other=0).to(tl.float64)
    wanted = tl.load(selected + i, mask=live, other=0) != 0
    if PAIRS:
        second = tl.load(scores + n_experts + i, mask=live, other=0).to(tl.float64)
    before = tl.zeros((BINS,), tl.int32)
    mass_before = tl.zeros((BINS,), tl.float64)
    if held is not None:
        mass = tl.load(held + i, mask=live, other=0.0)
    for start in range(0, n_experts, CHUNK):
        j = start + tl.arange(0, CHUNK)
        other = tl.load(scores + j, mask=j < n_experts, other=0).to(tl.float64)
        level, ahead = other[None, :] == mine[:, None], j[None, :] < i[:, None]
        if PAIRS:
            next_to = tl.load(scores + n_experts + j, mask=j < n_experts, other=0).to(tl.float64)
            ahead = (next_to[None, :] > second[:, None]) | ((next_to[None, :] == second[:, None]) & ahead)
        ahead = (other[None, :] > mine[:, None]) | (level & ahead)
        theirs_wanted = tl.load(selected + j, mask=j < n_experts, other=0) != 0
        alike = theirs_wanted[None, :] == wanted[:, None]
        ahead = (alike & ahead) | (theirs_wanted[None, :] & ~wanted[:, None])
        if held is not None:
            theirs = tl.load(held + j, mask=j < n_experts, other=0.0)
            mass_before += tl.sum(tl.where(ahead & (j < n_experts)[None, :], theirs[None, :], 0.0), 1)
        before += tl.sum((ahead & (j < n_experts)[None, :]).to(tl.int32), 1)
    if held is not None:
        asked = tl.load(share)
        short = live & (mass_before + mass < asked * tl.sum(mass, 0))
        count = tl.maximum(1 + tl.sum(short.to(tl.int32), 0), least)
        count = tl.where(asked < 1.0, count, n_experts)
    else:
        count = tl.load(bound).to(tl.int32)
    tl.store(members + i, before < count, mask=live)
    tl.store(best, tl.sum(tl.where(live & (before == 0), i, 0), 0))


def shortlist(
    scores: Tensor,
    selected: Tensor,
    bound: Tensor | None,
    held: Tensor | None = None,
    share: Tensor | None = None,
    least: int = 1,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of a layer; one launch.

    Args:
        scores: [N] float64, the scores that experts are ranked by; N <= 1024. Or [2, N], of which
            the second decide where the first are equal.
        selected: [N] bool, the experts that voting rows selected, which come before all others.
        bound: [] int64, number of experts to choose; None with ``held``.
        held: [N] float64, the mass of each expert, to choose as many as hold ``share``; default: choose ``bound``.
        share: [] float64, share of the mass, above 0; from 1.0 on all experts are chosen.
        least: minimum number of experts with ``held``.

    Returns:
        bool [N], the members, and int64 [], the best member.
    """
    experts, pairs = len(selected), scores.ndim == 2
    assert scores.shape == ((2, experts) if pairs else (experts,)) and scores.is_contiguous()
    assert scores.dtype == torch.float64 and selected.dtype == torch.bool and selected.is_contiguous()
    assert 1 <= experts <= MAX_EXPERTS and (bound is None) == (held is not None) == (share is not None)
    assert held is None or (held.shape == (experts,) and held.dtype == torch.float64 and held.is_contiguous())
    members = torch.empty(experts, dtype=torch.bool, device=scores.device)
    best = torch.empty((), dtype=torch.int64, device=scores.device)
    bins = max(16, triton.next_power_of_2(experts))
    _shortlist_kernel[(1,)](
        scores, selected, bound, held, share, members, best, experts, least, PAIRS=pairs, BINS=bins,
        CHUNK=min(16, _COMPARED // bins), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return members, best
