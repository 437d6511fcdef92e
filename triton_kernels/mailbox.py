"""The CPU's share of a layer without a round trip: requests to a thread of the host, and a bounded wait for answers.

Of the m experts that a layer misses, the CPU takes the first ``shares[m]`` by (rows, worth of a slot, number). With a
disk it takes only those that have a row of host memory (``Kept``), while the others are read. They get no slot, and
``admit``, which decides that, makes the request (``post``)::

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

**Experts that the device cannot address** are on a disk, or in memory that the driver has not pinned. Between ``admit``
and the GEMM one program orders those that the layer needs and that have no place in pinned memory, and waits::

    order    keys, their number;  asked <- n = number + 1
    ...      threads of the host read each expert to a place;  places;  answered <- n
    go on    once answered == n: the addresses of the i-th expert are those of places[i], for this layer

A place is the layer's until the next order, which the same stream makes after the GEMM. One that the host keeps for the
expert (not negative) is the expert's from then on; of others (-1 - place) nothing is remembered, so that the next layer
that needs the expert orders it again. The wait has no limit: nothing else has the expert. What cannot be read any more,
after a failed read or while the engine ends, ``ended`` says. The kernels then go on with what is in the first place, so
with no address but pinned ones. The host has raised its flag before, and gives no token of that step to anyone. Each
number is asked once, and the host answers the last one, so no answer can be of another order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from .route import chunk_for, count, counted_pairs, routed
from .types import ADMITTED, COMPUTED, LATE, UNUSED, Division, Experts, Mail, Orders, Reach, Request, lanes

POLL = 10_000  # nanoseconds


@triton.jit
def fence(COMPILED: tl.constexpr):
    """Stores before it are visible to the whole system before those behind it; loads behind it are not moved before."""
    if COMPILED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def ask(number: tl.tensor, asked: tl.tensor, COMPILED: tl.constexpr):
    """Asks the host for what all threads have stored; returns the number of this request, one more than the last."""
    request = tl.load(number) + 1
    tl.debug_barrier()
    tl.store(number, request)
    fence(COMPILED)
    tl.debug_barrier()
    tl.store(asked, request)
    return request


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
    to_ids: tl.tensor, to_weights: tl.tensor, to_x: tl.tensor, place_of: tl.tensor, n_pairs: tl.tensor,
    n_experts: tl.tensor, layer: tl.tensor, d: tl.tensor,
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
        asks_for = expert
        if place_of is not None:
            asks_for = tl.load(place_of + layer * n_experts + expert, mask=cpu, other=0) - n_experts
        tl.store(to_ids + at, tl.where(cpu, asks_for, -1), mask=inside)
        tl.store(to_weights + at, tl.where(cpu, weight, 0.0), mask=inside)
    rows = open_pairs // TOP_K
    for start in range(0, rows * d, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        tl.store(to_x + at, tl.load(x + at, mask=at < rows * d, other=0.0), mask=at < rows * d)
    tl.store(state, 1)
    if place_of is None:
        tl.store(head, layer)
    else:
        tl.store(head, 0)
    tl.store(head + 1, rows)
    tl.store(answered, tl.full((), 0, tl.int64))
    ask(number, asked, COMPILED)


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
        fence(COMPILED)
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


def check_request(topk_ids: Tensor, request: Request) -> None:
    """Raises ``AssertionError`` for a shape, dtype or layout that is not as ``Request`` has it."""
    x, _, counts, division, mail, kept = request
    most, top_k = division.left.shape
    assert topk_ids.shape == (len(x), top_k) and len(x) <= most, "more rows than the mailbox has"
    assert x.is_contiguous() and x.dtype == mail.x.dtype and mail.x.shape == mail.results.shape == (most, x.shape[1])
    assert mail.ids.shape == mail.weights.shape == division.kept.shape == (most, top_k)
    assert kept is None or (kept.place_of.shape == counts.shape and kept.shares.shape == division.shares.shape)
    for tensor in (counts, division.pairs, division.state, division.shares, mail.head, mail.ids, *(kept or ())):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (division.number, mail.asked, mail.answered):
        assert tensor.dtype == torch.int64 and tensor.shape == (1,)
    for tensor in (division.kept, division.left, mail.weights, mail.results):
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()


@triton.jit(
    do_not_specialize=["n_pairs", "first"],
    do_not_specialize_on_alignment=["ids", "weights"],
)
def _order_kernel(
    ids: tl.tensor, weights: tl.tensor, live: tl.tensor, sources: tl.tensor, slot_of: tl.tensor, table: tl.tensor,
    hosts: tl.tensor, place_of: tl.tensor, at: tl.tensor, number: tl.tensor, asked: tl.tensor, answered: tl.tensor,
    ended: tl.tensor, ordered: tl.tensor, keys: tl.tensor, places: tl.tensor,
    n_pairs: tl.tensor, n_experts: tl.tensor, n_keys: tl.tensor, n_places: tl.tensor, first: tl.tensor,
    NAMES: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, ADMITTED: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BINS)
    mine = lane < n_experts
    key = first + lane
    uses = count(ids, weights, counted_pairs(live, n_pairs), n_experts, BINS, CHUNK)
    admitted = mine & (tl.load(sources + key, mask=mine, other=0) == ADMITTED)
    outside = mine & (uses > 0) & (tl.load(slot_of + key, mask=mine, other=0) < 0)
    wanted = (outside | (admitted & (uses > 0))) & (tl.load(place_of + key, mask=mine, other=0) < 0)
    total = tl.sum(wanted.to(tl.int32), 0)
    if total == 0:
        return
    turn = tl.cumsum(wanted.to(tl.int32), 0) - 1
    tl.store(keys + turn, key, mask=wanted)
    tl.store(ordered, total)
    order = ask(number, asked, COMPILED)
    fence(COMPILED)

    seen = tl.load(answered, volatile=True)
    over = tl.load(ended, volatile=True)
    while (seen != order) & (over == 0):
        seen = tl.load(answered, volatile=True)
        over = tl.load(ended, volatile=True)
    fence(COMPILED)
    tl.debug_barrier()
    given = tl.load(places + turn, mask=wanted, other=0, volatile=True)
    given = tl.where(seen == order, given, -1)
    place = tl.where(given < 0, -1 - given, given)
    tl.store(place_of + key, tl.where(given < 0, -1, given), mask=wanted)
    for name in tl.static_range(NAMES):
        address = tl.load(at + name * n_places + place, mask=wanted, other=0)
        tl.store(hosts + name * n_keys + key, address, mask=wanted)
        tl.store(table + name * n_keys + key, address, mask=wanted & outside)


def wait_for_experts(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    sources: Tensor,
    orders: Orders,
    reach: Reach,
    live: Tensor | None = None,
) -> None:
    """Orders the experts of a layer that the device cannot address, and waits for them. May be captured.

    Args:
        topk_ids: [M, k] int32 or int64, contiguous, as of ``admit``: what the launch behind this one computes.
        topk_weights: [M, k] float32; pairs with weight 0 are left out.
        first: key of the layer's expert 0.
        experts: ``table`` and ``hosts`` of what is delivered are written.
        sources: [keys] int32, as ``admit`` wrote it: what is ``ADMITTED`` is copied from its host copy, too.
        orders: is written, but for ``answered``, ``ended`` and ``places``.
        reach: ``number`` and ``place_of`` are written.
        live: [1] int32, pairs from this one on are padding; default: none.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    (names, keys), n_experts = experts.table.shape, len(orders.keys)
    check_orders(topk_ids, topk_weights, first, experts, sources, orders, reach)
    _order_kernel[(1,)](
        topk_ids, topk_weights, live, sources, experts.slot_of, experts.table, experts.hosts, reach.place_of,
        reach.at, reach.number, *orders, topk_ids.numel(), n_experts, keys, reach.at.shape[1], first,
        NAMES=names, BINS=lanes(n_experts), CHUNK=chunk_for(topk_ids.numel()), ADMITTED=ADMITTED, COMPILED=COMPILED,
        num_warps=4,
    )  # fmt: skip


def check_orders(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    sources: Tensor,
    orders: Orders,
    reach: Reach,
) -> None:
    """Raises ``AssertionError`` for what is not as ``wait_for_experts`` has it."""
    (names, keys), n_experts = experts.table.shape, len(orders.keys)
    assert topk_ids.shape == topk_weights.shape and topk_weights.dtype == torch.float32
    assert topk_ids.is_contiguous() and topk_weights.is_contiguous(), "ids and weights must be contiguous"
    assert 0 <= first <= keys - n_experts and len(reach.at) == names
    assert reach.at.shape[1] >= n_experts, "a layer may order all of its experts"
    assert sources.shape == reach.place_of.shape == experts.slot_of.shape == (keys,)
    assert orders.places.shape == (n_experts,)
    for tensor in (sources, reach.place_of, orders.ended, orders.ordered, orders.keys, orders.places):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (reach.number, orders.asked, orders.answered):
        assert tensor.dtype == torch.int64 and tensor.shape == (1,)
    assert reach.at.dtype == torch.int64 and reach.at.is_contiguous()
