"""From router logits to a grouped GEMM's work list: which experts a row takes, and which rows an expert has.

``topk``: p = softmax(logits) or sigmoid(logits) over all N experts, in float32; the k experts with the greatest
p + bias, ties to the lowest id, in descending order; their weights are p, divided by their sum (taken in that order)
if the checkpoint renormalises, times its scaling factor. ``bias`` is the correction bias of DeepSeek-V3: it chooses
and never weighs. Grouped top-k is left to vLLM's router.

``align``: pair p = row * k + slot. Pairs are sorted by expert, stable, each expert padded to whole blocks of block_m
rows. A program an expert: it counts all pairs of all experts, hence knows where its own begin, and places them in
ascending order. Integers only, no atomics outside a program: the same input gives the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import Blocks, block_bound

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 1024  # a row of scores lies in the registers of one program


@triton.jit
def probabilities(logits, live, SCORING: tl.constexpr):
    """[BINS] float32 -> p; 0 where not ``live``."""
    if SCORING == "softmax":
        shifted = tl.exp(logits - tl.max(tl.where(live, logits, float("-inf")), 0))
        shifted = tl.where(live, shifted, 0.0)
        p = shifted / tl.sum(shifted, 0)
    else:
        p = tl.where(live, 1.0 / (1.0 + tl.exp(-logits)), 0.0)
    return p


@triton.jit
def choose(
    p, choice, weights, ids, at, scale, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):  # fmt: skip
    """Store the TOP_K greatest of ``choice`` at ``weights + at`` and ``ids + at``, weighed by p.

    Where less than TOP_K are above -inf (NaN counts as -inf), the rest repeat the first id with weight 0.
    """
    lane = tl.arange(0, BINS)
    slot_lane = tl.arange(0, SLOTS)
    choice = tl.where(choice == choice, choice, float("-inf"))
    picked, picked_id = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.int32)
    total, first = 0.0, 0
    for slot in range(TOP_K):
        best = tl.max(choice, 0)
        some = best > float("-inf")
        chosen = tl.min(tl.where(choice == best, lane, BINS - 1), 0)
        chosen = tl.where(some, chosen, first)
        first = tl.where(slot == 0, chosen, first)
        weight = tl.where(some, tl.sum(tl.where(lane == chosen, p, 0.0), 0), 0.0)
        total += weight
        picked = tl.where(slot_lane == slot, weight, picked)
        picked_id = tl.where(slot_lane == slot, chosen, picked_id)
        choice = tl.where(lane == chosen, float("-inf"), choice)
    if RENORMALIZE:
        picked = picked / tl.where(total > 0.0, total, 1.0)
    tl.store(weights + at + slot_lane, picked * scale, mask=slot_lane < TOP_K)
    tl.store(ids + at + slot_lane, picked_id, mask=slot_lane < TOP_K)


@triton.jit
def _topk_kernel(
    logits, bias, weights, ids, n_experts, scale, TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
    SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BINS)
    live = lane < n_experts
    p = probabilities(tl.load(logits + row * n_experts + lane, mask=live, other=0.0).to(tl.float32), live, SCORING)
    choice = p
    if BIAS:
        choice = p + tl.load(bias + lane, mask=live, other=0.0)
    choice = tl.where(live, choice, float("-inf"))
    choose(p, choice, weights, ids, row * TOP_K, scale, TOP_K, SLOTS, BINS, RENORMALIZE)


def topk(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The experts of each row; the rule is the module's.

    Args:
        logits: [M, N] of a floating dtype, contiguous, N <= 1024. NaN is never chosen while there is something else.
        k: experts a row, 1 ... N.
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: whether weights of a row sum to ``scale``.
        bias: [N] float32, added for the choice only.
        scale: the checkpoint's ``routed_scaling_factor``.

    Returns:
        Weights [M, k] float32 and ids [M, k] int32.
    """
    rows, experts = logits.shape
    assert 1 <= k <= experts <= MAX_EXPERTS, f"k = {k} of {experts} experts; at most {MAX_EXPERTS}"
    assert scoring in SCORINGS, f"scoring {scoring!r} is none of {', '.join(SCORINGS)}"
    assert logits.is_contiguous() and logits.is_floating_point(), "logits must be contiguous and floating"
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
    weights = torch.empty(rows, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, k, dtype=torch.int32, device=logits.device)
    if rows:
        _topk_kernel[(rows,)](
            logits, bias, weights, ids, experts, scale, TOP_K=k, SLOTS=triton.next_power_of_2(k),
            BINS=triton.next_power_of_2(experts), SCORING=scoring, RENORMALIZE=renormalize, BIAS=bias is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
    return weights, ids


@triton.jit
def routed(ids, weights, at, n_pairs, n_experts):
    """[CHUNK] ids; ``n_experts`` where the pair is none, padding, or has weight 0."""
    inside = at < n_pairs
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    return tl.where((expert >= 0) & (expert < n_experts) & (weight != 0.0), expert, n_experts)


@triton.jit
def _align_kernel(
    ids, weights, pairs, experts, counts, n_pairs, n_experts, n_blocks,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program e places the pairs of expert e; program ``n_experts`` fills what is left over."""
    me = tl.program_id(0)
    lane, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for start in range(0, n_pairs, CHUNK):
        count += tl.histogram(routed(ids, weights, start + lane, n_pairs, n_experts), BINS)
    needed = tl.where(bins < n_experts, (count + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < me, needed, 0), 0)
    if me == n_experts:
        for start in range(first, n_blocks, CHUNK):
            tl.store(experts + start + lane, -1, mask=start + lane < n_blocks)
        for start in range(first * BLOCK_M, n_blocks * BLOCK_M, CHUNK):
            tl.store(pairs + start + lane, n_pairs, mask=start + lane < n_blocks * BLOCK_M)
        return
    mine = tl.sum(tl.where(bins == me, count, 0), 0)
    mine_blocks = (mine + BLOCK_M - 1) // BLOCK_M
    tl.store(counts + me, mine)
    for start in range(0, mine_blocks, CHUNK):
        tl.store(experts + first + start + lane, me, mask=start + lane < mine_blocks)
    done = first * BLOCK_M
    for start in range(0, n_pairs, CHUNK):
        match = routed(ids, weights, start + lane, n_pairs, n_experts) == me
        place = done + tl.cumsum(match.to(tl.int32), 0) - 1
        tl.store(pairs + place, start + lane, mask=match)
        done += tl.sum(match.to(tl.int32), 0)
    end = (first + mine_blocks) * BLOCK_M
    for start in range(done, end, CHUNK):
        tl.store(pairs + start + lane, n_pairs, mask=start + lane < end)


def align(topk_ids: Tensor, topk_weights: Tensor, experts: int, block_m: int, counts: Tensor | None = None) -> Blocks:
    """Sort the pairs by expert.

    Args:
        topk_ids: [M, k] int32 or int64, contiguous; ids outside 0 ... experts - 1 mark padding and are left out.
        topk_weights: [M, k] float32; pairs with weight 0 are left out, so that their experts are not read.
        experts: N <= 1024.
        block_m: rows of a block.
        counts: [experts] int32, is overwritten with those of the work list; default: a new tensor.

    Returns:
        A work list of ``block_bound(M * k, experts, block_m)`` blocks, whatever the routing: no synchronisation.
    """
    assert topk_ids.shape == topk_weights.shape and topk_weights.dtype == torch.float32
    assert topk_ids.dtype in (torch.int32, torch.int64), "ids must be int32 or int64"
    assert topk_ids.is_contiguous() and topk_weights.is_contiguous(), "ids and weights must be contiguous"
    assert 1 <= experts <= MAX_EXPERTS and block_m >= 1
    assert topk_ids.numel() < 2**31 - 1024, "pairs are numbered in 32 bit"
    n_blocks = block_bound(topk_ids.numel(), experts, block_m)
    made = [torch.empty(size, dtype=torch.int32, device=topk_ids.device) for size in (n_blocks * block_m, n_blocks)]
    counts = made[0].new_empty(experts) if counts is None else counts
    assert counts.shape == (experts,) and counts.dtype == torch.int32 and counts.is_contiguous()
    chunk = min(1024, max(32, triton.next_power_of_2(topk_ids.numel())))
    _align_kernel[(experts + 1,)](
        topk_ids, topk_weights, *made, counts, topk_ids.numel(), experts, n_blocks,
        BLOCK_M=block_m, BINS=triton.next_power_of_2(experts + 1), CHUNK=chunk, enable_fp_fusion=False,
    )  # fmt: skip
    return Blocks(*made, counts)
