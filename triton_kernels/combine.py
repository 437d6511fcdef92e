"""Sums the weighted results of each row's experts in the order of top-k: the same input gives the same bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .route import counted_pairs, routed


@triton.jit(do_not_specialize=["n_pairs"], do_not_specialize_on_alignment=["ids", "router_weights"])
def _combine_kernel(
    y: tl.tensor,
    ids: tl.tensor,
    router_weights: tl.tensor,
    live: tl.tensor,
    out: tl.tensor,
    n_pairs: tl.tensor,
    d: tl.tensor,
    n_experts: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y [M, k, d] -> out [M, d], summed from slot 0 on. Pairs that are left out were never written and are not read."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n_live = counted_pairs(live, n_pairs)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        if routed(ids, router_weights, pair, n_live, n_experts) < n_experts:
            total += tl.load(y + pair * d + column, mask=column < d, other=0.0).to(tl.float32)
    tl.store(out + row * d + column, total.to(out.dtype.element_ty), mask=column < d)


def combine(
    y: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: int, out: Tensor, live: Tensor | None = None
) -> None:
    """Sums y [M, k, d], already weighted, into out [M, d]; pairs that ``route.align`` leaves out count as zero."""
    rows, top_k, d = y.shape
    block = min(1024, triton.next_power_of_2(d))
    _combine_kernel[(rows, triton.cdiv(d, block))](
        y, topk_ids, topk_weights, live, out, rows * top_k, d, experts, TOP_K=top_k, BLOCK=block, enable_fp_fusion=False
    )
