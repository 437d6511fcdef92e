"""The CPU's share of a layer without a round trip: requests to a thread of the host, and a bounded wait for answers.

Of the m experts that a layer misses, the CPU takes the first ``shares[m]`` by (rows, worth of a slot, number). They get
no slot, and ``admit``, which decides that, makes the request (``post``)::

    admit    kept, left = weights of the device's pairs, of the CPU's;  mail <- layer, x, left;  asked <- n = number + 1
    ...      the device computes ``kept``, the thread ``left``
    await    arrived = (answered == n) before ``patience`` has passed;  late = 0 if arrived, else all pairs
    ...      the device computes ``left`` among the first ``late`` pairs: as a rule none, and its programs end at once
    combine  out = the sum of what the device has computed, and of the results if they have arrived

So each pair is computed once whatever the thread does: a dead, slow or wrong one costs ``patience``, and after one late
answer no layer of the step asks any more. ``post`` erases ``answered``, so that no number written before it counts.
While an answer is late the thread may read a request that is being replaced: its number is then not that of any later
request, and the device ignores its results.

Requests, answers and numbers are in pinned memory that both sides address. Each thread of the one program of ``admit``
fences its stores for the whole system, and all have done so before the number is stored. A launch that waits may be
part of a CUDA graph. In Triton's interpreter, which has no clock, a poll counts as ``POLL`` nanoseconds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .route import routed
from .types import COMPUTED, LATE, UNUSED, Division, Mail, lanes

POLL = 10_000  # nanoseconds


@triton.jit
def _fence(COMPILED: tl.constexpr):
    """Stores before it are visible to the whole system before those behind it; loads behind it are not moved before."""
    if COMPILED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def keep(
    weights: tl.tensor, kept: tl.tensor, left: tl.tensor, state: tl.tensor, n_pairs: tl.tensor, CHUNK: tl.constexpr
):
    """All pairs of a layer are the device's."""
    for start in range(0, n_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(kept + at, tl.load(weights + at, mask=at < n_pairs, other=0.0), mask=at < n_pairs)
        tl.store(left + at, tl.zeros((CHUNK,), tl.float32), mask=at < n_pairs)
    tl.store(state, 0)


@triton.jit
def post(
    ids: tl.tensor, weights: tl.tensor, x: tl.tensor, sources: tl.tensor, number: tl.tensor, pairs: tl.tensor,
    state: tl.tensor, kept: tl.tensor, left: tl.tensor, asked: tl.tensor, answered: tl.tensor, head: tl.tensor,
    to_ids: tl.tensor, to_weights: tl.tensor, to_x: tl.tensor, n_pairs: tl.tensor, n_experts: tl.tensor,
    layer: tl.tensor, d: tl.tensor,
    TOP_K: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr, COMPUTED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Divides the pairs of a layer, whose ``sources`` say which experts are ``COMPUTED``; asks the CPU for its own."""
    open_pairs = tl.minimum(tl.load(pairs), n_pairs)
    for start in range(0, n_pairs, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < n_pairs
        expert = routed(ids, weights, at, open_pairs, n_experts)
        here = expert < n_experts
        cpu = here & (tl.load(sources + layer * n_experts + expert, mask=here, other=-1) == COMPUTED)
        weight = tl.load(weights + at, mask=inside, other=0.0)
        tl.store(kept + at, tl.where(cpu, 0.0, weight), mask=inside)
        tl.store(left + at, tl.where(cpu, weight, 0.0), mask=inside)
        tl.store(to_ids + at, tl.where(cpu, expert, -1), mask=inside)
        tl.store(to_weights + at, tl.where(cpu, weight, 0.0), mask=inside)
    rows = open_pairs // TOP_K
    for start in range(0, rows * d, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        tl.store(to_x + at, tl.load(x + at, mask=at < rows * d, other=0.0), mask=at < rows * d)
    tl.store(state, 1)
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
    number: tl.tensor, pairs: tl.tensor, state: tl.tensor, late: tl.tensor, answered: tl.tensor, sources: tl.tensor,
    n_pairs: tl.tensor, n_experts: tl.tensor, layer: tl.tensor, patience: tl.tensor,
    BINS: tl.constexpr, UNUSED: tl.constexpr, COMPUTED: tl.constexpr, LATE: tl.constexpr, POLL: tl.constexpr,
    COMPILED: tl.constexpr,
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
    tl.store(late, tl.where((asks != 0) & (arrived == 0), n_pairs, 0))


COMPILED = isinstance(_await_kernel, triton.JITFunction)  # not TRITON_INTERPRET=1, when this was imported


def wait_for_answer(
    topk_ids: Tensor, layer: int, sources: Tensor, division: Division, mail: Mail, patience: int
) -> None:
    """Waits for the answer to the layer's request, if it made one; at most ``patience`` nanoseconds, below 2**31.

    Args:
        topk_ids: [M, k], as of ``admit``.
        layer: number of the layer, whose experts' keys are layer * N ... layer * N + N - 1.
        sources: [keys] int32; of this layer, ``COMPUTED`` becomes ``LATE`` if no answer arrives.
        division: ``late``, ``pairs`` and the second of ``state`` are written.
    """
    n_experts = len(division.shares) - 1
    assert 0 <= patience < 2**31 and topk_ids.numel() <= division.left.numel()
    assert division.late.shape == (1,) and division.late.dtype == torch.int32
    _await_kernel[(1,)](
        division.number, division.pairs, division.state, division.late, mail.answered, sources, topk_ids.numel(),
        n_experts, layer, patience, BINS=lanes(n_experts), UNUSED=UNUSED, COMPUTED=COMPUTED, LATE=LATE, POLL=POLL,
        COMPILED=COMPILED, num_warps=1,
    )  # fmt: skip


def check_request(topk_ids: Tensor, x: Tensor, counts: Tensor, division: Division, mail: Mail) -> None:
    """Raises ``AssertionError`` for a shape, dtype or layout that is not as ``Request`` has it."""
    most, top_k = division.left.shape
    assert topk_ids.shape == (len(x), top_k) and len(x) <= most, "more rows than the mailbox has"
    assert x.is_contiguous() and x.dtype == mail.x.dtype and mail.x.shape == mail.results.shape == (most, x.shape[1])
    assert mail.ids.shape == mail.weights.shape == division.kept.shape == (most, top_k)
    for tensor in (counts, division.pairs, division.state, division.shares, mail.head, mail.ids):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (division.number, mail.asked, mail.answered):
        assert tensor.dtype == torch.int64 and tensor.shape == (1,)
    for tensor in (division.kept, division.left, mail.weights, mail.results):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
