"""What becomes of a row whose experts are outside the shortlist S: MoE-Spec's two coverages.

``truncate``: slots whose expert is in S stay as they are; the others get weight 0. No weight is computed anew.

``substitute``: the k best of p + bias *within S* (``route.choose``, ties to the lowest id); the weights are their p,
divided by their sum exactly where the checkpoint renormalises, times its scaling factor.

Rows that are not budgeted (prefill, padding) keep their choice. A slot with weight 0 never carries -1, which kernels
of the CPU take for an address, but the row's own first remaining expert, or S's lowest id if none remains: neither
asks for an expert that nobody else needs. Both report, for each row, the share of its natural mixing weight that was
outside S: sum of dropped / sum of all, 0 where nothing was dropped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .route import MAX_EXPERTS, choose


@triton.jit
def _lowest(members, n_experts, BINS: tl.constexpr):
    lane = tl.arange(0, BINS)
    member = tl.load(members + lane, mask=lane < n_experts, other=0) != 0
    return tl.min(tl.where(member, lane, n_experts - 1), 0)


@triton.jit
def _truncate_kernel(
    weights, ids, members, budgeted, out_weights, out_ids, dropped, n_experts,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    at = row * TOP_K + slot
    expert = tl.load(ids + at, mask=slot < TOP_K, other=-1).to(tl.int32)
    real = (expert >= 0) & (expert < n_experts)
    weight = tl.where(real, tl.load(weights + at, mask=slot < TOP_K, other=0.0), 0.0)
    member = tl.load(members + expert, mask=real, other=0) != 0
    keep = real & (member | (tl.load(budgeted + row) == 0))
    first = tl.min(tl.where(keep, slot, SLOTS), 0)
    kept = tl.sum(tl.where(slot == first, expert, 0), 0)
    fallback = tl.where(first < SLOTS, kept, _lowest(members, n_experts, BINS))
    total = tl.sum(weight, 0)
    lost = tl.sum(tl.where(keep, 0.0, weight), 0)
    tl.store(out_weights + at, tl.where(keep, weight, 0.0), mask=slot < TOP_K)
    tl.store(out_ids + at, tl.where(keep, expert, fallback), mask=slot < TOP_K)
    tl.store(dropped + row, lost / tl.where(total > 0.0, total, 1.0))


@triton.jit
def _substitute_kernel(
    p, bias, ids, members, budgeted, out_weights, out_ids, dropped, n_experts, scale,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr, RENORMALIZE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane, slot = tl.arange(0, BINS), tl.arange(0, SLOTS)
    live = lane < n_experts
    free = tl.load(budgeted + row) == 0
    allowed = live & ((tl.load(members + lane, mask=live, other=0) != 0) | free)
    here = tl.load(p + row * n_experts + lane, mask=live, other=0.0)
    choice = here
    if BIAS:
        choice = here + tl.load(bias + lane, mask=live, other=0.0)
    choice = tl.where(allowed, choice, float("-inf"))
    choose(here, choice, out_weights, out_ids, row * TOP_K, scale, TOP_K, SLOTS, BINS, RENORMALIZE)
    natural = tl.load(ids + row * TOP_K + slot, mask=slot < TOP_K, other=-1).to(tl.int32)
    real = (natural >= 0) & (natural < n_experts)
    weight = tl.load(p + row * n_experts + natural, mask=real, other=0.0)
    inside = (tl.load(members + natural, mask=real, other=0) != 0) | free
    total = tl.sum(weight, 0)
    lost = tl.sum(tl.where(inside, 0.0, weight), 0)
    tl.store(dropped + row, lost / tl.where(total > 0.0, total, 1.0))


def truncate(
    topk_weights: Tensor, topk_ids: Tensor, members: Tensor, budgeted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Leave out what the shortlist lacks.

    Args:
        topk_weights: [M, k] float32, as the router gave them; not negative.
        topk_ids: [M, k] int32 or int64; ids outside 0 ... N - 1 are padding and get weight 0.
        members: [N] bool, the shortlist; not empty.
        budgeted: [M] bool; other rows keep their choice.

    Returns:
        Weights [M, k] float32, ids [M, k] int32, the dropped share [M] float32.
    """
    rows, k = topk_ids.shape
    _check(topk_ids, members, budgeted)
    assert topk_weights.shape == topk_ids.shape and topk_weights.dtype == torch.float32
    assert topk_weights.is_contiguous(), "weights must be contiguous"
    made = _outputs(topk_ids)
    if rows:
        _truncate_kernel[(rows,)](
            topk_weights, topk_ids, members, budgeted, *made, len(members), TOP_K=k,
            SLOTS=triton.next_power_of_2(k), BINS=triton.next_power_of_2(len(members)), enable_fp_fusion=False,
        )  # fmt: skip
    return made


def substitute(
    p: Tensor,
    topk_ids: Tensor,
    members: Tensor,
    budgeted: Tensor,
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose again, within the shortlist.

    Args:
        p: [M, N] float32 router probabilities, contiguous.
        topk_ids: [M, k] int32 or int64, the natural choice: gives k and the dropped share, and nothing else.
        members: [N] bool, the shortlist. With less than k members, the slots left over repeat the row's first id with
            weight 0; empty is not allowed.
        budgeted: [M] bool; other rows choose among all experts.
        renormalize, bias, scale: as in ``route.topk``.

    Returns:
        Weights [M, k] float32, ids [M, k] int32, the dropped share [M] float32.
    """
    rows, k = topk_ids.shape
    _check(topk_ids, members, budgeted)
    experts = len(members)
    assert p.shape == (rows, experts) and p.dtype == torch.float32 and p.is_contiguous()
    assert k <= experts, f"k = {k} of {experts} experts"
    assert bias is None or (bias.shape == (experts,) and bias.dtype == torch.float32 and bias.is_contiguous())
    made = _outputs(topk_ids)
    if rows:
        _substitute_kernel[(rows,)](
            p, bias, topk_ids, members, budgeted, *made, experts, scale, TOP_K=k, SLOTS=triton.next_power_of_2(k),
            BINS=triton.next_power_of_2(experts), RENORMALIZE=renormalize, BIAS=bias is not None,
            enable_fp_fusion=False,
        )  # fmt: skip
    return made


def _check(topk_ids: Tensor, members: Tensor, budgeted: Tensor) -> None:
    assert topk_ids.dtype in (torch.int32, torch.int64) and topk_ids.is_contiguous()
    assert members.dtype == torch.bool and members.ndim == 1 and members.is_contiguous()
    assert 1 <= len(members) <= MAX_EXPERTS, f"{len(members)} experts; at most {MAX_EXPERTS}"
    assert budgeted.shape == topk_ids.shape[:1] and budgeted.dtype == torch.bool and budgeted.is_contiguous()


def _outputs(topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=topk_ids.device)
    return weights, torch.empty_like(topk_ids, dtype=torch.int32), weights.new_empty(len(topk_ids))
