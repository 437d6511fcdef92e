"""Builds a grouped GEMM's work list from the chosen experts: the rows of each expert.

Pair p = row * k + slot. ``align``: pairs are sorted by expert, stable, each expert padded to whole blocks of block_m
rows. One program per expert: it counts the pairs of all experts, computes where its own begin, and places them in
ascending order. Integers only, no atomics outside a program: the same input gives the same order.

Where pairs are few, a program of the GEMM finds its block itself (``block_of``), and no launch comes before it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import Blocks, block_bound, lanes

MAX_EXPERTS = 1024  # a layer's counts are kept in the registers of one program
FEW = 128  # pairs that one program compares pairwise


def chunk_for(pairs: int) -> int:
    """Returns the pairs that a program reads at once: one of two sizes, because each size is compiled."""
    return FEW if pairs <= FEW else 1024


@triton.jit
def counted_pairs(live: tl.tensor, n_pairs: tl.tensor):
    """Returns how many leading pairs are not padding: ``live`` if given, else ``n_pairs``."""
    if live is not None:
        n_pairs = tl.minimum(tl.load(live), n_pairs)
    return n_pairs


@triton.jit
def routed(ids: tl.tensor, weights: tl.tensor, at: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor):
    """Returns the experts of pairs ``at``; ``n_experts`` for a pair out of range, padding, or with weight 0."""
    inside = at < n_pairs
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    weight = tl.load(weights + at, mask=inside, other=0.0)
    return tl.where((expert >= 0) & (expert < n_experts) & (weight != 0.0), expert, n_experts)


@triton.jit
def count(
    ids: tl.tensor,
    weights: tl.tensor,
    n_pairs: tl.tensor,
    n_experts: tl.tensor,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Returns [BINS] int32: the pairs of each expert; pairs without one are counted in bin ``n_experts``."""
    found = tl.zeros((BINS,), tl.int32)
    for start in range(0, n_pairs, CHUNK):
        found += tl.histogram(routed(ids, weights, start + tl.arange(0, CHUNK), n_pairs, n_experts), BINS)
    return found


@triton.jit
def block_of(
    me: tl.tensor,
    ids: tl.tensor,
    weights: tl.tensor,
    n_live: tl.tensor,
    n_pairs: tl.tensor,
    n_experts: tl.tensor,
    BLOCK_M: tl.constexpr,
    FEW: tl.constexpr,
):
    """Finds the block that begins with pair ``me``, among at most FEW pairs.

    Returns its expert, -1 if no block begins with pair ``me``, [BLOCK_M] pairs as ``align`` has them in the block, and
    whether it is the expert's first block.
    """
    lane = tl.arange(0, FEW)
    mine = routed(ids, weights, me, n_live, n_experts)
    same = (routed(ids, weights, lane, n_live, n_experts) == mine) & (mine < n_experts)
    before = tl.sum((same & (lane < me)).to(tl.int32), 0)
    place = tl.where(same, tl.cumsum(same.to(tl.int32), 0) - 1 - before, -1)
    here = tl.arange(0, BLOCK_M)[:, None] == place[None, :]
    pair = n_pairs + tl.sum(tl.where(here, lane[None, :] - n_pairs, 0), 1)
    return tl.where((mine < n_experts) & (before % BLOCK_M == 0), mine, -1), pair, before == 0


@triton.jit(
    do_not_specialize=["n_pairs", "n_blocks"],
    do_not_specialize_on_alignment=["ids", "weights", "counts"],
)
def _align_kernel(
    ids: tl.tensor, weights: tl.tensor, live: tl.tensor, pairs: tl.tensor, experts: tl.tensor, counts: tl.tensor,
    n_pairs: tl.tensor, n_experts: tl.tensor, n_blocks: tl.tensor,
    BLOCK_M: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Builds the work list: program e places the pairs of expert e, program ``n_experts`` fills the unused rest."""
    me = tl.program_id(0)
    lane, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    n_live = counted_pairs(live, n_pairs)
    found = count(ids, weights, n_live, n_experts, BINS, CHUNK)
    needed = tl.where(bins < n_experts, (found + BLOCK_M - 1) // BLOCK_M, 0)
    first = tl.sum(tl.where(bins < me, needed, 0), 0)
    if me == n_experts:
        for start in range(first, n_blocks, CHUNK):
            tl.store(experts + start + lane, -1, mask=start + lane < n_blocks)
        for start in range(first * BLOCK_M, n_blocks * BLOCK_M, CHUNK):
            tl.store(pairs + start + lane, n_pairs, mask=start + lane < n_blocks * BLOCK_M)
        return
    mine = tl.sum(tl.where(bins == me, found, 0), 0)
    mine_blocks = (mine + BLOCK_M - 1) // BLOCK_M
    tl.store(counts + me, mine)
    for start in range(0, mine_blocks, CHUNK):
        tl.store(experts + first + start + lane, me, mask=start + lane < mine_blocks)
    done = first * BLOCK_M
    for start in range(0, n_live, CHUNK):
        match = routed(ids, weights, start + lane, n_live, n_experts) == me
        place = done + tl.cumsum(match.to(tl.int32), 0) - 1
        tl.store(pairs + place, start + lane, mask=match)
        done += tl.sum(match.to(tl.int32), 0)
    end = (first + mine_blocks) * BLOCK_M
    for start in range(done, end, CHUNK):
        tl.store(pairs + start + lane, n_pairs, mask=start + lane < end)


def align(
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: int,
    block_m: int,
    counts: Tensor | None = None,
    live: Tensor | None = None,
) -> Blocks:
    """Sorts the pairs by expert.

    Args:
        topk_ids: [M, k] int32 or int64, contiguous; ids outside 0 ... experts - 1 mark padding and are left out.
        topk_weights: [M, k] float32; pairs with weight 0 are left out, so that their experts are not read.
        experts: N <= 1024.
        block_m: rows per block.
        counts: [experts] int32, is overwritten with the counts of the work list; default: a new tensor.
        live: [1] int32, pairs from this one on are padding and left out; default: none.

    Returns:
        A work list of ``block_bound(M * k, experts, block_m)`` blocks, whatever the routing: no synchronisation.
    """
    assert topk_ids.shape == topk_weights.shape and topk_weights.dtype == torch.float32
    assert topk_ids.dtype in (torch.int32, torch.int64), "ids must be int32 or int64"
    assert topk_ids.is_contiguous() and topk_weights.is_contiguous(), "ids and weights must be contiguous"
    assert 1 <= experts <= MAX_EXPERTS and block_m >= 1
    assert topk_ids.numel() < 2**31 - 1024, "pairs are numbered in 32 bit"
    assert live is None or (live.shape == (1,) and live.dtype == torch.int32)
    n_blocks = block_bound(topk_ids.numel(), experts, block_m)
    pair_of = torch.empty(n_blocks * block_m, dtype=torch.int32, device=topk_ids.device)
    expert_of = pair_of.new_empty(n_blocks)
    counts = pair_of.new_empty(experts) if counts is None else counts
    assert counts.shape == (experts,) and counts.dtype == torch.int32 and counts.is_contiguous()
    _align_kernel[(experts + 1,)](
        topk_ids, topk_weights, live, pair_of, expert_of, counts, topk_ids.numel(), experts, n_blocks,
        BLOCK_M=block_m, BINS=lanes(experts), CHUNK=chunk_for(topk_ids.numel()), enable_fp_fusion=False,
    )  # fmt: skip
    return Blocks(pair_of, expert_of, counts)
