"""Sums the weighted results of each row's experts in the order of top-k: the same input gives the same bits.

Where the CPU has a share of a layer (``mailbox``), its pairs count among these only if its answer has not arrived, and
the device has computed them. Else what it has computed of a row is added to the sum, in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .route import counted_pairs, routed
from .types import Division, Mail


@triton.jit(do_not_specialize=["n_pairs"], do_not_specialize_on_alignment=["ids", "router_weights"])
def _combine_kernel(
    y: tl.tensor,
    ids: tl.tensor,
    router_weights: tl.tensor,
    live: tl.tensor,
    state: tl.tensor,
    left: tl.tensor,
    results: tl.tensor,
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
    arrived = tl.full((), 0, tl.int32)
    given = arrived
    if left is not None:
        arrived = tl.load(state + 1)
    for slot in range(TOP_K):
        pair = row * TOP_K + slot
        counts = routed(ids, router_weights, pair, n_live, n_experts) < n_experts
        if left is not None:
            there = (arrived != 0) & (tl.load(left + pair) != 0.0)
            given += there.to(tl.int32)
            counts = counts & (there == 0)
        if counts:
            total += tl.load(y + pair * d + column, mask=column < d, other=0.0).to(tl.float32)
    if left is not None:  # noqa: SIM102 - known at compile time
        if given > 0:
            total += tl.load(results + row * d + column, mask=column < d, other=0.0, volatile=True)
    tl.store(out + row * d + column, total.to(out.dtype.element_ty), mask=column < d)


def combine(
    y: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: int,
    out: Tensor,
    live: Tensor | None = None,
    division: Division | None = None,
    mail: Mail | None = None,
) -> None:
    """Sums y [M, k, d], already weighted, into out [M, d]; pairs that ``route.align`` leaves out count as zero.

    ``division`` and ``mail``: of a layer in which the CPU may have a share.
    """
    rows, top_k, d = y.shape
    share: tuple[Tensor | None, ...] = (None,) * 3
    if division is not None and mail is not None:
        assert rows <= len(division.left) and division.left.shape[1] == top_k and mail.results.shape[1] == d
        share = division.state, division.left, mail.results
    block = min(1024, triton.next_power_of_2(d))
    _combine_kernel[(rows, triton.cdiv(d, block))](
        y, topk_ids, topk_weights, live, *share, out, rows * top_k, d, experts, TOP_K=top_k, BLOCK=block,
        enable_fp_fusion=False,
    )  # fmt: skip
