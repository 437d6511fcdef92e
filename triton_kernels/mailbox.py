"""The CPU's share of a layer without a round trip: requests to a thread of the host, and a bounded wait for answers.

``admit`` has decided which missing experts get slots. Of the others of a layer, m_0 < m_1 < ... by (rows, worth of a
slot, number), the CPU takes the first ``shares[m]``, m being those that have no slot or just got one. Then::

    post     kept, left = weights of the device's pairs, of the CPU's;  mail <- layer, x, left;  asked <- n = number + 1
    ...      the device computes ``kept``, the thread ``left``
    await    arrived = (answered == n) before ``patience`` has passed;  again = left where not arrived, else 0
    ...      the device computes ``again``: nothing as a rule, since pairs of weight 0 are skipped
    add      out = out + (results if arrived else again's)

So each pair is computed once whatever the thread does: a dead, slow or wrong one costs ``patience``, and after one late
answer no layer of the step asks any more. ``post`` erases ``answered``, so that no number written before it counts.
While an answer is late the thread may read a request that is being replaced: its number is then not that of any later
request, and the device ignores its results.

Requests, answers and numbers are in pinned memory that both sides address. Each thread of the one program of ``post``
fences its stores for the whole system, and all have done so before the number is stored. A launch that waits may be
part of a CUDA graph. In Triton's interpreter, which has no clock, a poll counts as ``POLL`` nanoseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .route import MAX_EXPERTS, chunk_for, count, counted_pairs, routed
from .types import ADMITTED, COMPUTED, LATE, STREAMED, UNUSED, Division, Mail, lanes

POLL = 10_000  # nanoseconds
_COLUMNS = 1024


@triton.jit
def _fence(COMPILED: tl.constexpr):
    """Stores before it are visible to the whole system before those behind it; loads behind it are not moved before."""
    if COMPILED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(
    do_not_specialize=["n_pairs", "layer"],
    do_not_specialize_on_alignment=["ids", "weights", "x"],
)
def _post_kernel(
    ids: tl.tensor, weights: tl.tensor, live: tl.tensor, x: tl.tensor, used: tl.tensor, counts: tl.tensor,
    sources: tl.tensor, number: tl.tensor, pairs: tl.tensor, state: tl.tensor, shares: tl.tensor, kept: tl.tensor,
    left: tl.tensor, asked: tl.tensor, answered: tl.tensor, head: tl.tensor, to_ids: tl.tensor, to_weights: tl.tensor,
    to_x: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor, layer: tl.tensor, d: tl.tensor,
    TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    UNUSED: tl.constexpr, STREAMED: tl.constexpr, ADMITTED: tl.constexpr, COMPUTED: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BINS)
    mine = lane < n_experts
    first = layer * n_experts
    uses = count(ids, weights, counted_pairs(live, n_pairs), n_experts, BINS, CHUNK)
    tl.store(counts + first + lane, uses, mask=mine)

    source = tl.load(sources + first + lane, mask=mine, other=UNUSED)
    worth = tl.load(used + first + lane, mask=mine, other=0.0)
    open_pairs = tl.minimum(tl.load(pairs), n_pairs)
    streamed = (mine & (source == STREAMED) & (open_pairs > 0)).to(tl.int32)
    missing = tl.sum(streamed, 0) + tl.sum((mine & (source == ADMITTED)).to(tl.int32), 0)
    taken = tl.minimum(tl.load(shares + missing), tl.sum(streamed, 0))
    for _ in range(taken):
        fewest = tl.min(tl.where(streamed == 1, uses, 2147483647), 0)
        best = (streamed == 1) & (uses == fewest)
        least = tl.min(tl.where(best, worth, float("inf")), 0)
        pick = tl.min(tl.where(best & (worth == least), lane, BINS), 0)
        streamed = tl.where(lane == pick, 2, streamed)
    tl.store(sources + first + lane, tl.where(streamed == 2, COMPUTED, source), mask=mine)
    tl.debug_barrier()  # pairs read what became of their experts

    for start in range(0, n_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < n_pairs
        expert = routed(ids, weights, at, open_pairs, n_experts)
        here = expert < n_experts
        cpu = here & (tl.load(sources + first + expert, mask=here, other=UNUSED) == COMPUTED)
        weight = tl.load(weights + at, mask=inside, other=0.0)
        tl.store(kept + at, tl.where(cpu, 0.0, weight), mask=inside)
        tl.store(left + at, tl.where(cpu, weight, 0.0), mask=inside)
        if taken > 0:
            tl.store(to_ids + at, tl.where(cpu, expert, -1), mask=inside)
            tl.store(to_weights + at, tl.where(cpu, weight, 0.0), mask=inside)
    tl.store(state, (taken > 0).to(tl.int32))
    if taken == 0:
        return

    rows = open_pairs // TOP_K
    for row in range(rows):
        for start in range(0, d, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            value = tl.load(x + row * d + column, mask=column < d, other=0.0)
            tl.store(to_x + row * d + column, value, mask=column < d)
    tl.store(head, layer)
    tl.store(head + 1, rows)
    tl.store(answered, tl.full((), 0, tl.int64))
    request = tl.load(number) + 1
    tl.debug_barrier()
    tl.store(number, request)
    _fence(COMPILED)
    tl.debug_barrier()
    tl.store(asked, request)


@triton.jit(do_not_specialize=["n_pairs", "layer", "patience"])
def _await_kernel(
    number: tl.tensor, pairs: tl.tensor, state: tl.tensor, left: tl.tensor, again: tl.tensor, answered: tl.tensor,
    sources: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor, layer: tl.tensor, patience: tl.tensor,
    BINS: tl.constexpr, CHUNK: tl.constexpr, UNUSED: tl.constexpr, COMPUTED: tl.constexpr, LATE: tl.constexpr,
    POLL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    asks = tl.load(state)
    arrived = tl.full((), 0, tl.int32)
    if asks != 0:
        wanted = tl.load(number)
        seen = tl.load(answered, volatile=True)
        spent = tl.full((), 0, tl.int64)
        start = spent
        if COMPILED:
            start = globaltimer()
        while (seen != wanted) & (spent < patience):
            seen = tl.load(answered, volatile=True)
            if COMPILED:
                spent = globaltimer() - start
            else:
                spent += POLL
        arrived = (seen == wanted).to(tl.int32)
        _fence(COMPILED)
        if arrived == 0:
            lane = tl.arange(0, BINS)
            at = sources + layer * n_experts + lane
            source = tl.load(at, mask=lane < n_experts, other=UNUSED)
            tl.store(at, tl.where(source == COMPUTED, LATE, source), mask=lane < n_experts)
            tl.store(pairs, 0)
    tl.store(state + 1, arrived)
    for start in range(0, n_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        weight = tl.load(left + at, mask=at < n_pairs, other=0.0)
        tl.store(again + at, tl.where(arrived != 0, 0.0, weight), mask=at < n_pairs)


@triton.jit
def _add_kernel(
    out: tl.tensor, late: tl.tensor, results: tl.tensor, state: tl.tensor, left: tl.tensor, d: tl.tensor,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.arange(0, SLOTS)
    given = tl.load(left + row * TOP_K + slot, mask=slot < TOP_K, other=0.0) != 0.0
    if tl.sum(given.to(tl.int32), 0) == 0:
        return
    at = row * d + column
    value = tl.load(out + at, mask=column < d, other=0.0).to(tl.float32)
    if tl.load(state + 1) != 0:
        value += tl.load(results + at, mask=column < d, other=0.0, volatile=True)
    else:
        value += tl.load(late + at, mask=column < d, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=column < d)


_COMPILED = isinstance(_post_kernel, triton.JITFunction)  # not TRITON_INTERPRET=1, when this was imported


def post(
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: int,
    x: Tensor,
    used: Tensor,
    counts: Tensor,
    sources: Tensor,
    division: Division,
    mail: Mail,
    live: Tensor | None = None,
) -> None:
    """Divides a layer's pairs and asks the CPU for its own. No host synchronisation: may be captured in a CUDA graph.

    Args:
        topk_ids, topk_weights: as of ``admit``, which has run for the layer; at most as many rows as ``mail`` has.
        layer: number of the layer, whose experts' keys are layer * N ... layer * N + N - 1.
        x: [M, d], contiguous, of ``mail``'s dtype.
        used: [keys] float32, what a slot is worth to each expert if the step uses it.
        counts: [keys] int32, those of this layer are overwritten with the pairs of each expert.
        sources: [keys] int32 from ``admit``; of this layer, what the CPU takes becomes ``COMPUTED``.
        division: ``pairs`` and ``shares`` are read; the others are written.
        mail: is written, but for ``results``.
        live: as of ``admit``.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    _check(topk_ids, topk_weights, x, used, counts, sources, division, mail)
    (rows, top_k), d, n_experts = topk_ids.shape, x.shape[1], len(division.shares) - 1
    bins, chunk = lanes(n_experts), chunk_for(topk_ids.numel())
    _post_kernel[(1,)](
        topk_ids, topk_weights, live, x, used, counts, sources, *division[:6], *mail[:6],
        rows * top_k, n_experts, layer, d, TOP_K=top_k, BINS=bins, CHUNK=chunk, COLUMNS=_COLUMNS,
        UNUSED=UNUSED, STREAMED=STREAMED, ADMITTED=ADMITTED, COMPUTED=COMPUTED, COMPILED=_COMPILED,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def wait_for_answer(
    topk_ids: Tensor, layer: int, sources: Tensor, division: Division, mail: Mail, patience: int
) -> None:
    """Waits for the answer to the layer's request, if it made one; at most ``patience`` nanoseconds, below 2**31.

    Arguments as of ``post``, of whose rows ``again`` is written.
    """
    n_experts = len(division.shares) - 1
    assert 0 <= patience < 2**31 and topk_ids.numel() <= division.left.numel()
    _await_kernel[(1,)](
        division.number, division.pairs, division.state, division.left, division.again, mail.answered, sources,
        topk_ids.numel(), n_experts, layer, patience, BINS=lanes(n_experts), CHUNK=chunk_for(topk_ids.numel()),
        UNUSED=UNUSED, COMPUTED=COMPUTED, LATE=LATE, POLL=POLL, COMPILED=_COMPILED, num_warps=1,
    )  # fmt: skip


def add(out: Tensor, late: Tensor, division: Division, mail: Mail) -> None:
    """Adds what the CPU computed to out [M, d], or ``late`` [M, d], what the device computed in its place.

    Rows without a pair of the CPU's stay as they are. The sum is float32, rounded once to out's dtype.
    """
    (rows, d), top_k = out.shape, division.left.shape[1]
    assert late.shape == out.shape and late.dtype == out.dtype and late.is_contiguous() and out.is_contiguous()
    columns = min(_COLUMNS, triton.next_power_of_2(d))
    _add_kernel[(rows, triton.cdiv(d, columns))](
        out, late, mail.results, division.state, division.left, d,
        TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), COLUMNS=columns, enable_fp_fusion=False,
    )  # fmt: skip


def _check(
    topk_ids: Tensor,
    topk_weights: Tensor,
    x: Tensor,
    used: Tensor,
    counts: Tensor,
    sources: Tensor,
    division: Division,
    mail: Mail,
) -> None:
    most, top_k = division.left.shape
    assert topk_ids.shape == topk_weights.shape == (len(x), top_k) and len(x) <= most, "more rows than the mailbox has"
    assert topk_ids.is_contiguous() and topk_weights.is_contiguous() and topk_weights.dtype == torch.float32
    assert topk_ids.dtype in (torch.int32, torch.int64), "ids must be int32 or int64"
    assert x.is_contiguous() and x.dtype == mail.x.dtype and mail.x.shape == mail.results.shape == (most, x.shape[1])
    assert mail.ids.shape == mail.weights.shape == division.kept.shape == division.again.shape == (most, top_k)
    assert 1 <= len(division.shares) - 1 <= MAX_EXPERTS
    assert used.dtype == torch.float32 and used.shape == counts.shape == sources.shape
    for tensor in (counts, sources, division.pairs, division.state, division.shares, mail.head, mail.ids):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (division.number, mail.asked, mail.answered):
        assert tensor.dtype == torch.int64 and tensor.shape == (1,)
    for tensor in (*division[4:], mail.weights, mail.results):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
