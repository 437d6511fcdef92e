"""In-layer admission: decides on the device which missed experts of a layer get a slot before it computes.

Keys number the experts of all layers; those of this layer are first ... first + N - 1. Between steps the host offers
slots, lowest worth first, each with its owner. A layer continues where the previous layers stopped; a layer without
misses reads no offer. Else, with c_e the pairs of expert e::

    open        o_0 < o_1 < ...   of the next ``lanes(N)`` offers those whose slot is still its owner's, and whose
                                  owner is used neither in this layer nor in one before it in this step
    wants       m_0 < m_1 < ...   e with c_e > 0 and no slot, to which one is worth at least what o_0 is to its owner
    admitted    m_i takes o_i     if there is an o_i, and it is worth at most as much to its owner as to m_i
                if the CPU computes ``shares[misses]`` experts of a layer, as many want none: the first by (rows,
                worth, number), which the same launch asks of it (``mailbox``)
    next offer                    after the last o_i that some m_i considered; after all that were seen if they ran out

From now on, a slot's old owner is read from host memory and the new one from the slot. The new owner's bytes are not in
it yet: its grouped GEMM copies them (``Fills``). All launches of layers run on one
stream, so none reads a slot or a pointer while it changes. An expert that is not admitted is streamed from host memory,
which moves no more bytes over the bus.

One program, whose lanes are experts and offers: it takes some microseconds, and few in a layer without misses. The same
input gives the same decisions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mailbox import COMPILED, check_request, keep, post
from .route import MAX_EXPERTS, chunk_for, count, counted_pairs
from .types import ADMITTED, COMPUTED, HIT, STREAMED, UNUSED, Experts, Offers, Request, lanes

_COLUMNS = 4096  # numbers of x that a request copies at once
_WARP = 256  # lanes that fit the registers of one warp, which needs neither shared memory nor barriers to sum them


@triton.jit(
    do_not_specialize=["n_pairs", "first", "layer"],
    do_not_specialize_on_alignment=["ids", "weights", "x"],
)
def _admit_kernel(
    ids: tl.tensor, weights: tl.tensor, live: tl.tensor, slot_of: tl.tensor, owner: tl.tensor, table: tl.tensor,
    hosts: tl.tensor, places: tl.tensor, state: tl.tensor, slots: tl.tensor, owners: tl.tensor, kept: tl.tensor,
    used: tl.tensor, counts: tl.tensor, sources: tl.tensor, copies: tl.tensor, x: tl.tensor, all_live: tl.tensor,
    all_counts: tl.tensor, requests: tl.tensor, pairs: tl.tensor, division: tl.tensor, shares: tl.tensor,
    to_device: tl.tensor, to_cpu: tl.tensor, asked: tl.tensor, answered: tl.tensor, head: tl.tensor, to_ids: tl.tensor,
    to_weights: tl.tensor, to_x: tl.tensor, place_of: tl.tensor, beside: tl.tensor, turn: tl.tensor,
    n_pairs: tl.tensor, n_experts: tl.tensor, n_keys: tl.tensor, n_slots: tl.tensor, first: tl.tensor,
    layer: tl.tensor, d: tl.tensor,
    NAMES: tl.constexpr, TOP_K: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr,
    UNUSED: tl.constexpr, HIT: tl.constexpr, STREAMED: tl.constexpr, ADMITTED: tl.constexpr, COMPUTED: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """``requests``, ``division``, ``to_device``, ``to_cpu``: of ``Division``, its number, state, kept and left.

    ``place_of``, ``beside``: of ``Kept``, or None.
    """
    if turn is not None:  # reads ahead stop
        tl.store(turn, layer)
    lane = tl.arange(0, BINS)
    mine = lane < n_experts
    key = first + lane
    slot = tl.load(slot_of + key, mask=mine, other=0)
    uses = count(ids, weights, counted_pairs(live, n_pairs), n_experts, BINS, CHUNK)
    tl.store(counts + key, uses, mask=mine)
    if shares is not None:
        found = count(ids, weights, counted_pairs(all_live, n_pairs), n_experts, BINS, CHUNK)
        tl.store(all_counts + key, found, mask=mine)
    needed = mine & (uses > 0)
    missed = needed & (slot < 0)
    misses = tl.sum(missed.to(tl.int32), 0)
    if turn is not None:
        tl.store(turn + 1, misses)
    if misses == 0:
        tl.store(copies, 0)
        tl.store(sources + key, tl.where(needed, HIT, UNUSED), mask=mine)
        if shares is not None:
            keep(weights, to_device, to_cpu, division, n_pairs, CHUNK)
        return
    tl.debug_barrier()  # offers of this layer's experts read the counts

    worth = tl.load(used + key, mask=mine, other=0.0)
    rows = tl.where(missed, uses, 0)
    if shares is not None:
        share = tl.load(shares + misses)
        far = tl.zeros((BINS,), tl.int32)  # rows of the experts that the CPU does not have
        if place_of is not None:
            far = tl.where(tl.load(place_of + key, mask=missed, other=0) < 0, rows, 0)
            away = tl.sum((far > 0).to(tl.int32), 0)
            share = tl.minimum(misses - away, tl.where(away > 0, tl.load(beside + misses), share))
            rows -= far
        share = tl.where(tl.load(pairs) > 0, share, 0)
        for _ in range(share):
            best = rows == tl.min(tl.where(rows > 0, rows, 2147483647), 0)
            least = tl.min(tl.where(best, worth, float("inf")), 0)
            rows = tl.where(lane == tl.min(tl.where(best & (worth == least), lane, BINS), 0), 0, rows)
        rows += far

    begin, end = tl.load(state), tl.load(state + 1)
    offer = begin + lane
    known = offer < end
    old = tl.load(owners + offer, mask=known, other=0)
    limit = tl.load(kept + offer, mask=known, other=float("inf"))
    now = tl.load(owner + tl.load(slots + offer, mask=known, other=0), mask=known, other=-1)
    taking = tl.load(counts + old, mask=known & (old < first + n_experts), other=0)
    opened = known & (now == old) & (taking == 0)
    opens = tl.sum(opened.to(tl.int32), 0)
    number = tl.cumsum(opened.to(tl.int32), 0) - 1
    lowest = tl.min(tl.where(opened, limit, float("inf")), 0)

    wants = (rows > 0) & (worth >= lowest)
    turn = tl.cumsum(wants.to(tl.int32), 0) - 1
    wanted = tl.sum(wants.to(tl.int32), 0)

    # find the i-th open offer through memory: lanes of experts and of offers differ
    tl.store(copies + 1 + number, offer, mask=opened & (number < n_experts))
    tl.debug_barrier()
    served = wants & (turn < opens)
    mine_at = tl.load(copies + 1 + turn, mask=served, other=0)
    tl.debug_barrier()
    taken = tl.load(slots + mine_at, mask=served, other=0)
    victim = tl.load(owners + mine_at, mask=served, other=0)
    admitted = served & (worth >= tl.load(kept + mine_at, mask=served, other=float("inf")))

    last = tl.max(tl.where(opened & (number < wanted), lane, -1), 0)
    seen = tl.minimum(begin + BINS, end)
    tl.store(state, tl.where((wanted > opens) | (opens == 0), seen, begin + last + 1))
    place = tl.cumsum(admitted.to(tl.int32), 0) - 1
    tl.store(copies, tl.sum(admitted.to(tl.int32), 0))
    tl.store(copies + 1 + place, key, mask=admitted)
    tl.store(copies + 1 + n_experts + place, taken, mask=admitted)
    source = tl.where(missed, tl.where(admitted, ADMITTED, STREAMED), tl.where(needed, HIT, UNUSED))
    if shares is not None:
        source = tl.where(missed & (rows == 0), COMPUTED, source)
    tl.store(sources + key, source, mask=mine)

    tl.store(owner + taken, key, mask=admitted)
    tl.store(slot_of + victim, tl.full((BINS,), -1, tl.int32), mask=admitted)
    tl.store(slot_of + key, taken, mask=admitted)
    for name in tl.static_range(NAMES):
        here = tl.load(places + name * n_slots + taken, mask=admitted, other=0)
        there = tl.load(hosts + name * n_keys + victim, mask=admitted, other=0)
        tl.store(table + name * n_keys + key, here, mask=admitted)
        tl.store(table + name * n_keys + victim, there, mask=admitted)

    if shares is not None:
        if share == 0:
            keep(weights, to_device, to_cpu, division, n_pairs, CHUNK)
            return
        tl.debug_barrier()  # pairs read what became of their experts
        post(
            ids, weights, x, sources, requests, pairs, division, to_device, to_cpu, asked, answered, head, to_ids,
            to_weights, to_x, place_of, n_pairs, n_experts, layer, d, TOP_K, CHUNK, COLUMNS, COMPUTED, COMPILED,
        )  # fmt: skip


def admit(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    offers: Offers,
    counts: Tensor,
    sources: Tensor,
    copies: Tensor,
    live: Tensor | None = None,
    request: Request | None = None,
    turn: Tensor | None = None,
) -> None:
    """Decides admission for one layer. No host synchronisation: may be captured in a CUDA graph.

    Args:
        topk_ids: [M, k] int32 or int64, contiguous; ids outside 0 ... N - 1 mark padding and are left out.
        topk_weights: [M, k] float32; pairs with weight 0 are left out.
        first: key of the layer's expert 0.
        experts: where all experts are, updated in place.
        offers: the slots that may be taken; ``state`` is updated in place.
        counts: [keys] int32, those of this layer are overwritten with the pairs of each expert. The counts of
            earlier layers must be from this step.
        sources: [keys] int32, those of this layer are overwritten: ``UNUSED``, ``HIT``, ``STREAMED`` (missed, to be
            read from host memory), ``ADMITTED`` (missed, has a slot now) or ``COMPUTED`` (missed, left to the CPU).
        copies: [1 + 2 N] int32, is overwritten: the number n of admitted experts; in [1 : 1 + n] their keys,
            ascending; in [1 + N : 1 + N + n] their slots. The rest is undefined.
        live: [1] int32, pairs from this one on are padding and left out; default: none.
        request: the CPU may compute some of the missed experts, and is asked to; ``first`` is a multiple of N.
        turn: [2] int32, is overwritten: the number of the layer, which has begun, and how many experts have no slot.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    n_experts, (names, keys) = len(copies) // 2, experts.table.shape
    _check(topk_ids, topk_weights, first, n_experts, experts, offers, counts, sources, copies, live)
    assert turn is None or (turn.shape == (2,) and turn.dtype == torch.int32)
    bins, chunk = lanes(n_experts), chunk_for(topk_ids.numel())
    asks: tuple[Tensor | None, ...] = (None,) * 17
    warps, columns = 1 if max(bins, chunk) <= _WARP else 4, 1
    if request is not None:
        x, all_live, all_counts, division, mail, has = request
        check_request(topk_ids, request)
        assert first % n_experts == 0 and division.shares.shape == (n_experts + 1,) and all_counts.shape == (keys,)
        asks = (x, all_live, all_counts, *division[:6], *mail[:6], *(has or (None, None)))
        columns = x.shape[1]
        warps = 4 if bins < 1024 else 8
    _admit_kernel[(1,)](
        topk_ids, topk_weights, live, *experts, *offers, counts, sources, copies, *asks, turn,
        topk_ids.numel(), n_experts, keys, len(experts.owner), first, first // n_experts, columns,
        NAMES=names, TOP_K=topk_ids.shape[1], BINS=bins, CHUNK=chunk, COLUMNS=_COLUMNS, UNUSED=UNUSED, HIT=HIT,
        STREAMED=STREAMED, ADMITTED=ADMITTED, COMPUTED=COMPUTED, COMPILED=COMPILED, num_warps=warps,
        enable_fp_fusion=False,
    )  # fmt: skip


def _check(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    n_experts: int,
    experts: Experts,
    offers: Offers,
    counts: Tensor,
    sources: Tensor,
    copies: Tensor,
    live: Tensor | None,
) -> None:
    (names, keys), slots = experts.table.shape, len(experts.owner)
    assert topk_ids.shape == topk_weights.shape and topk_weights.dtype == torch.float32
    assert topk_ids.dtype in (torch.int32, torch.int64), "ids must be int32 or int64"
    assert topk_ids.is_contiguous() and topk_weights.is_contiguous(), "ids and weights must be contiguous"
    assert live is None or (live.shape == (1,) and live.dtype == torch.int32)
    assert len(copies) == 1 + 2 * n_experts and 1 <= n_experts <= MAX_EXPERTS, f"1 ... {MAX_EXPERTS} experts per layer"
    assert 0 <= first <= keys - n_experts, f"a layer of {n_experts} from {first} on, of {keys} experts"
    assert experts.slot_of.shape == offers.used.shape == counts.shape == sources.shape == (keys,)
    assert experts.hosts.shape == (names, keys) and experts.places.shape == (names, slots)
    assert offers.state.shape == (2,) and offers.slots.shape == offers.owners.shape == offers.kept.shape
    for tensor in (experts.slot_of, experts.owner, *offers[:3], counts, sources, copies):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    for tensor in (experts.table, experts.hosts, experts.places):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous()
    for tensor in offers[3:]:
        assert tensor.dtype == torch.float32 and tensor.is_contiguous()
