"""Restricts rows to a shortlist S of experts: MoE-Spec's two coverages, in one launch.

``truncation``: pairs whose expert is in S stay as they are. The others get weight 0, and as expert the best one that
their row keeps (ties: the lowest id), or the best of S in a row that keeps none.

``substitution``: the k best of p + bias within S, ties by the lowest id; weights are their p, divided by their sum
where the checkpoint renormalises, times its scale. With groups, only experts in the row's best groups are chosen, as
without a budget, unless those groups hold fewer than k of S; a group's score is its best p, or with a bias the sum of
its two best p + bias.

A row that does not vote, and one whose experts are all in S, is copied bit for bit. One program per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .route import MAX_EXPERTS


@triton.jit
def _best_groups(
    probs, bias, size,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, SIZE_BINS: tl.constexpr,
):  # fmt: skip
    """Returns [GROUP_BINS] bool: whether each group is among the best of the row at ``probs``, ties by the lowest."""
    group, place = tl.arange(0, GROUP_BINS), tl.arange(0, SIZE_BINS)
    expert = group[:, None] * size + place[None, :]
    there = (group < GROUPS)[:, None] & (place < size)[None, :]
    score = tl.load(probs + expert, mask=there, other=float("-inf"))
    if bias is not None:
        score += tl.load(bias + expert, mask=there, other=0.0)
    worth = tl.max(score, 1)
    if bias is not None:
        first = tl.min(tl.where(score == worth[:, None], place[None, :], SIZE_BINS), 1)
        worth += tl.max(tl.where(place[None, :] == first[:, None], float("-inf"), score), 1)
    worth = tl.where(group < GROUPS, worth, float("-inf"))
    theirs, mine = worth[None, :], worth[:, None]
    ahead = (theirs > mine) | ((theirs == mine) & (group[None, :] < group[:, None]))
    return (group < GROUPS) & (tl.sum(ahead.to(tl.int32), 1) < TOP_GROUPS)


@triton.jit
def _choices(
    probs, bias, members, n_experts,
    NEEDED: tl.constexpr, BINS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, SIZE_BINS: tl.constexpr,
):  # fmt: skip
    """Returns [BINS] float32 of the row at ``probs``: p, and what experts are chosen by, -inf for those not allowed.

    The limit to the best groups is lifted where these hold fewer than ``NEEDED`` members.
    """
    lane = tl.arange(0, BINS)
    live = lane < n_experts
    p = tl.load(probs + lane, mask=live, other=0.0)
    choice = p
    if bias is not None:
        choice += tl.load(bias + lane, mask=live, other=0.0)
    allowed = live & (tl.load(members + lane, mask=live, other=0) != 0)
    if GROUPS > 0:
        size = n_experts // GROUPS
        best_groups = _best_groups(probs, bias, size, GROUPS, TOP_GROUPS, GROUP_BINS, SIZE_BINS)
        here = (lane // size)[:, None] == tl.arange(0, GROUP_BINS)[None, :]
        near = allowed & (tl.sum((here & best_groups[None, :]).to(tl.int32), 1) > 0)
        allowed = near | (allowed & (tl.sum(near.to(tl.int32), 0) < NEEDED))
    return p, tl.where(allowed, choice, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["probs", "bias", "weights", "ids", "votes", "out_weights", "out_ids"])
def _cover_kernel(
    probs, bias, weights, ids, votes, members, best, out_weights, out_ids, n_experts, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr, SUBSTITUTE: tl.constexpr, RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, SIZE_BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    pair = row * TOP_K + slot
    weight = tl.load(weights + pair, mask=slot < TOP_K, other=0.0)
    expert = tl.load(ids + pair, mask=slot < TOP_K, other=0)
    voting = tl.load(votes + row + slot * 0, mask=slot < TOP_K, other=0) != 0
    inside = tl.load(members + expert, mask=voting, other=1) != 0
    if tl.sum((~inside).to(tl.int32), 0) > 0:
        here = probs + row * n_experts
        if SUBSTITUTE:
            lane = tl.arange(0, BINS)
            p, choice = _choices(here, bias, members, n_experts, TOP_K, BINS, GROUPS, TOP_GROUPS, GROUP_BINS, SIZE_BINS)
            total = 0.0
            for place in range(TOP_K):
                chosen = tl.min(tl.where(choice == tl.max(choice, 0), lane, BINS - 1), 0)
                taken = tl.sum(tl.where(lane == chosen, p, 0.0), 0)
                total += taken
                weight = tl.where(slot == place, taken, weight)
                expert = tl.where(slot == place, chosen.to(expert.dtype), expert)
                choice = tl.where(lane == chosen, float("-inf"), choice)
            if RENORMALIZE:
                weight = weight / tl.where(total == 0.0, 1.0, total)
            weight = weight * scale
        else:
            score = tl.load(here + expert, mask=voting & inside, other=float("-inf"))
            leading = voting & inside & (score == tl.max(score, 0))
            stand_in = tl.min(tl.where(leading, expert, n_experts), 0)
            stand_in = tl.where(stand_in < n_experts, stand_in, tl.load(best).to(expert.dtype))
            weight = tl.where(inside, weight, 0.0)
            expert = tl.where(inside, expert, stand_in)
    tl.store(out_weights + pair, weight, mask=slot < TOP_K)
    tl.store(out_ids + pair, expert, mask=slot < TOP_K)


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
    """Returns the weights and experts that the rows of a forward run within a shortlist; one launch.

    Args:
        probs: [M, N] float32, router scores of all N <= 1024 experts.
        weights, ids: [M, k] float32 and int32 or int64, the router's choice. The values of rows that do not vote are
            copied and not interpreted.
        votes: [M] float64, the rows' votes: the shortlist applies to rows with a vote above 0.
        members: [N] bool, the shortlist; at least k members to substitute.
        best: [] int64, the first expert of the shortlist.
        substitute: choose again within the shortlist; else drop the experts outside.
        renormalize, bias, scale: how the checkpoint weighs the new choice; the bias is float32 [N].
        groups, top_groups: choose within the ``top_groups`` best of ``groups`` equal groups of experts; with a bias,
            groups have at least two experts.

    Returns:
        (weights, ids) in the shapes and dtypes of the arguments.
    """
    (rows, experts), k = probs.shape, ids.shape[1]
    assert probs.dtype == weights.dtype == torch.float32 and ids.dtype in (torch.int32, torch.int64)
    assert weights.shape == ids.shape == (rows, k) and votes.shape == (rows,) and members.shape == (experts,)
    assert votes.dtype == torch.float64 and members.dtype == torch.bool and k <= experts <= MAX_EXPERTS
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
    assert (groups is None) == (top_groups is None) and experts % (groups or 1) == 0
    assert all(tensor.is_contiguous() for tensor in (probs, weights, ids, votes, members)), "must be contiguous"
    made = torch.empty_like(weights), torch.empty_like(ids)
    if rows:
        _cover_kernel[(rows,)](
            probs, bias, weights, ids, votes, members, best, *made, experts, scale, TOP_K=k,
            SLOTS=triton.next_power_of_2(k), BINS=max(16, triton.next_power_of_2(experts)), SUBSTITUTE=substitute,
            RENORMALIZE=renormalize, GROUPS=groups or 0, TOP_GROUPS=top_groups or 0,
            GROUP_BINS=triton.next_power_of_2(groups or 1), SIZE_BINS=triton.next_power_of_2(experts // (groups or 1)),
            num_warps=1 if experts <= 256 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return made
