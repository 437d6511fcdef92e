"""Copies experts from host memory, by the device itself: what a layer admits, as it computes, and ahead of need.

The host copy is pinned and in the device's address space. No copy engine and no host call is involved, so the launch
may be part of a CUDA graph.

What a layer admits, its grouped GEMM copies into slots: a program there copies the rows of the matrix that it is about
to multiply, with their scales and biases (``fill_rows``), and reads them from the slot.

``read_early`` reads what the next layer is expected to miss while no layer reads, part by part (``Early``), until that
layer begins: ``admit`` says so in ``turn``, which each program reads with each of its pieces. The grouped GEMM of that
layer takes the parts that are there from this memory, and the others from the host. Weights never change, so both have
the same bytes. An entry is for one layer and is overwritten after the next one, when no launch reads it any more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .mailbox import fence
from .types import EARLY_ROWS, READERS, Early, Fills

_WORDS = 1024  # of 8 bytes, a piece of a part
_EARLY_ROWS, _READERS = tl.constexpr(EARLY_ROWS), tl.constexpr(READERS)
_AT_ONCE = tl.constexpr(_WORDS)  # by a program of a GEMM: the 24 of an expert of 768 columns keep PCIe 5 busy


@triton.jit
def _copy_rows(
    source: tl.tensor, target: tl.tensor, begin: tl.tensor, end: tl.tensor, length: tl.tensor,
    T: tl.constexpr, WIDE: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Copies rows ``begin`` to ``end`` of a matrix whose rows have ``length`` elements of T, from address to address.

    WIDE: a row is a multiple of 16 bytes, and 16 bytes are copied at once; else an element.
    """
    if WIDE:
        row = tl.multiple_of(length * T.primitive_bitwidth // 64, 2)
        here, there = _words(source), _words(target)
    else:
        row = length
        here = source.to(tl.pointer_type(T), bitcast=True)
        there = target.to(tl.pointer_type(T), bitcast=True)
    last = end * row
    for start in range(begin * row, last, WORDS):
        at = start + tl.arange(0, WORDS)
        tl.store(there + at, tl.load(here + at, mask=at < last, other=0), mask=at < last)


@triton.jit
def _copy_scales(
    source: tl.tensor, target: tl.tensor, begin: tl.tensor, end: tl.tensor, rows: tl.tensor, columns: tl.tensor,
    CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, ZEROS: tl.constexpr, LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies the scales of rows ``begin`` to ``end`` of W [rows, columns]; with the last row, also what pads it.

    COLUMNS: as many as ``end - begin`` and 4 more, at least.
    """
    stride = tl.cdiv(tl.cdiv(rows, ROWS), 4) * 4
    groups = tl.cdiv(columns, GROUP) if GROUP else 1
    words = groups
    if CODES == "e2m1":
        words = tl.cdiv(groups, 4) + (1 if GROUP == 16 else 0)
    elif CODES == "int4" and not ZEROS:
        words = tl.cdiv(groups, 2)
    here = source.to(tl.pointer_type(tl.int32), bitcast=True)
    there = target.to(tl.pointer_type(tl.int32), bitcast=True)
    across = begin // ROWS + tl.arange(0, COLUMNS)
    inside = across < tl.where(end < rows, tl.cdiv(end, ROWS), stride)
    for start in range(0, words, LINES):
        line = start + tl.arange(0, LINES)
        at = line[:, None] * stride + across[None, :]
        mask = (line < words)[:, None] & inside[None, :]
        tl.store(there + at, tl.load(here + at, mask=mask, other=0), mask=mask)


@triton.jit
def _copy_bias(
    source: tl.tensor, target: tl.tensor, begin: tl.tensor, end: tl.tensor, T: tl.constexpr, COLUMNS: tl.constexpr
):
    """Copies elements ``begin`` to ``end`` of a vector of T, at most COLUMNS."""
    at = begin + tl.arange(0, COLUMNS)
    here, there = source.to(tl.pointer_type(T), bitcast=True), target.to(tl.pointer_type(T), bitcast=True)
    tl.store(there + at, tl.load(here + at, mask=at < end, other=0.0), mask=at < end)


@triton.jit
def expert_at(table: tl.tensor, hosts: tl.tensor, expert: tl.tensor, at_host: tl.tensor, T: tl.constexpr):
    """Returns the pointer to an expert's tensor; if ``hosts`` are given and ``at_host``, to its host copy.

    Without the 16-byte hint the compiler would load single elements.
    """
    address = tl.load(table + expert)
    if hosts is not None:
        address = tl.where(at_host, tl.load(hosts + expert), address)
    return tl.multiple_of(address.to(tl.pointer_type(T), bitcast=True), 16)


@triton.jit
def fill_rows(
    expert: tl.tensor, begin: tl.tensor, end: tl.tensor, rows: tl.tensor, columns: tl.tensor, w: tl.tensor,
    b: tl.tensor, s: tl.tensor, from_w: tl.tensor, from_b: tl.tensor, from_s: tl.tensor, early: tl.tensor,
    early_w: tl.tensor,
    T: tl.constexpr, BIAS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    ZEROS: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Copies rows ``begin`` to ``end``, at most MOST, of an expert's W [rows, columns], with scales and biases.

    ``early``: as of ``early_at``.
    """
    here, there = tl.load(from_w + expert), tl.load(w + expert)
    if early is not None:
        here = tl.load(early_w + early, mask=early >= 0, other=here)
    if CODES == "":
        _copy_rows(here, there, begin, end, columns, T, WIDE, _AT_ONCE)
    else:
        PACKED: tl.constexpr = 2 if CODES == "e2m1" or CODES == "int4" else 1
        _copy_rows(here, there, begin, end, columns // PACKED, tl.uint8, WIDE, _AT_ONCE)
        here, there = tl.load(from_s + expert), tl.load(s + expert)
        _copy_scales(here, there, begin, end, rows, columns, CODES, GROUP, ROWS, ZEROS, 512 // MOST, 2 * MOST)
    if BIAS:
        _copy_bias(tl.load(from_b + expert), tl.load(b + expert), begin, end, T, MOST)


@triton.jit
def early_at(
    key: tl.tensor, strip: tl.tensor, keys: tl.tensor, done: tl.tensor, parts: tl.tensor,
    ENTRIES: tl.constexpr, BLOCK_N: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """Returns the entry of an expert that was read early, -1 unless all parts of a strip of BLOCK_N are there."""
    PARTS: tl.constexpr = BLOCK_N // _EARLY_ROWS
    entry = tl.arange(0, ENTRIES)
    found = tl.max(tl.where(tl.load(keys + entry) == key, entry, -1), 0)
    if found >= 0:
        part = strip * PARTS + tl.arange(0, PARTS)
        there = tl.load(done + found * parts + part, mask=part < parts, other=_READERS, volatile=True)
        found = tl.where(tl.min(there, 0) == _READERS, found, -1)
        fence(COMPILED)
    return found


@triton.jit
def early_or(weights: tl.tensor, early: tl.tensor, early_w: tl.tensor):
    """Returns ``weights``, or where an entry is that was read early."""
    address = tl.load(early_w + early, mask=early >= 0, other=0)
    return tl.multiple_of(tl.where(early >= 0, address.to(weights.dtype, bitcast=True), weights), 16)


@triton.jit
def _read_parts(
    go: tl.tensor, turn: tl.tensor, before: tl.tensor, source: tl.tensor, target: tl.tensor, done: tl.tensor,
    parts: tl.tensor, row_bytes: tl.tensor, bound: tl.tensor, step: tl.tensor, jump: tl.tensor, grows: tl.tensor,
    HALVES: tl.constexpr, READERS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Reads this program's share of the parts of a matrix; returns whether it may go on.

    Part p is ROWS rows from p * step + half * jump on, of each half, that are below bound + half * grows.
    """
    me, per_half = tl.program_id(0), tl.cdiv(ROWS * row_bytes, 8 * WORDS)
    chunks = HALVES * per_half
    part = me * 0
    here, there = _words(source), _words(target)
    while (part < parts) & go:
        chunk = (me + (READERS - 1) * ((part * chunks) % READERS)) % READERS
        while (chunk < chunks) & go:
            seen = tl.load(turn, volatile=True)  # while the piece is on its way
            half, inside = chunk // per_half, chunk % per_half
            begin = part * step + half * jump
            rows = tl.maximum(tl.minimum(ROWS, bound + half * grows - begin), 0)
            first = tl.multiple_of((begin * row_bytes).to(tl.int64) // 8, 2)
            size = tl.multiple_of(tl.cdiv(rows * row_bytes, 16) * 2, 2)
            at = inside * WORDS + tl.arange(0, WORDS)
            tl.store(there + first + at, tl.load(here + first + at, mask=at < size, other=0), mask=at < size)
            chunk += READERS
            go = seen == before
        if chunk >= chunks:
            tl.debug_barrier()
            tl.atomic_add(done + part, 1, sem="release", scope="gpu")
        part += 1
    return go


@triton.jit(
    do_not_specialize=["layer", "after"], do_not_specialize_on_alignment=["keys", "done13", "done2", "w13", "w2"]
)
def _read_early_kernel(
    turn: tl.tensor, keys: tl.tensor, done13: tl.tensor, done2: tl.tensor, w13: tl.tensor, w2: tl.tensor,
    from13: tl.tensor, from2: tl.tensor, layer: tl.tensor, entries: tl.tensor, parts13: tl.tensor, parts2: tl.tensor,
    row13: tl.tensor, row2: tl.tensor, ff: tl.tensor, d: tl.tensor, after: tl.tensor,
    INTERLEAVED: tl.constexpr, READERS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    before = layer - 1
    go = (tl.load(turn, volatile=True) == before) & ((tl.load(turn + 1, volatile=True) > 0) == (after > 0))
    entry = layer * 0
    while (entry < entries) & go:
        key = tl.load(keys + entry)
        if key >= 0:
            go = _read_parts(
                go, turn, before, tl.load(from13 + key), tl.load(w13 + entry), done13 + entry * parts13, parts13,
                row13, 2 * ff if INTERLEAVED else ff, 2 * ROWS if INTERLEAVED else ROWS, ROWS if INTERLEAVED else ff,
                0 if INTERLEAVED else ff, 2, READERS, ROWS, WORDS,
            )  # fmt: skip
            go = _read_parts(
                go, turn, before, tl.load(from2 + key), tl.load(w2 + entry), done2 + entry * parts2, parts2, row2, d,
                ROWS, 0, 0, 1, READERS, ROWS, WORDS,
            )  # fmt: skip
        entry += 1


_COMPILED = isinstance(_read_early_kernel, triton.JITFunction)


def read_early(
    turn: Tensor,
    layer: int,
    early: Early,
    host13: Tensor,
    host2: Tensor,
    sizes: tuple[int, int, int, int],
    *,
    after: bool,
    interleaved: bool = False,
) -> None:
    """Reads weights of experts of ``layer`` while the layer before is the last one that began.

    No host synchronisation: a CUDA graph may have it. There are two launches, of which one reads: while the kernel of
    the layer before runs if that layer misses nothing, else after it. It ends when all is read, or a piece after
    ``layer`` has begun. ``done13`` and ``done2`` are 0 before, and nothing else writes ``early`` meanwhile.

    Args:
        turn: [2] int32, the layer that began last, and how many experts it misses (``admit``).
        early: ``keys`` that are not -1 are read.
        host13, host2: [keys] int64, the addresses of the host copies.
        sizes: ff, d, and the bytes of a row of W13 and of W2.
        after: it is the launch after the kernel of the layer before.
        interleaved: as rows of W13 are with ``swigluoai``.
    """
    ff, d, row13, row2 = sizes
    check_early(early)
    assert turn.shape == (2,) and turn.dtype == torch.int32 and host13.dtype == host2.dtype == torch.int64
    assert interleaved or ff * row13 % 16 == 0, "up must begin on a multiple of 16 bytes"
    assert early.done13.shape[1] * EARLY_ROWS >= ff and early.done2.shape[1] * EARLY_ROWS >= d
    _read_early_kernel[(READERS,)](
        turn, *early, host13, host2, layer, len(early.keys), early.done13.shape[1], early.done2.shape[1], row13, row2,
        ff, d, int(after), INTERLEAVED=interleaved, READERS=READERS, ROWS=EARLY_ROWS, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip


def check_early(early: Early | None) -> None:
    """Raises ``AssertionError`` for what is not as ``Early`` has it; the number of entries is a power of 2."""
    if early is None:
        return
    keys, done13, done2, w13, w2 = early
    entries = len(keys)
    assert (
        entries & (entries - 1) == 0 < entries and done13.shape[0] == done2.shape[0] == len(w13) == len(w2) == entries
    )
    assert keys.dtype == done13.dtype == done2.dtype == torch.int32 and w13.dtype == w2.dtype == torch.int64
    assert all(tensor.is_contiguous() for tensor in early)


@triton.jit
def _words(address: tl.tensor):
    """Returns a pointer to words of 8 bytes; the address is a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64), bitcast=True), 16)


Arguments = tuple[object, ...]


def check_fills(
    fills: Fills | None, w13: Tensor, bias: bool, quantised: bool, early: tuple[int, Early] | None = None
) -> tuple[Arguments, Arguments]:
    """Returns what the two kernels of a GEMM get of ``fills`` and ``early``; ``w13``: its table.

    Raises:
        AssertionError: they are not as ``Fills`` and ``Early`` have it.
    """
    if fills is None:
        assert early is None, "what was read early is of experts that are no hits"
        return (None,) * 8 + (0,), (None,) * 8 + (0,)
    sources, *tables = fills
    assert sources.dtype == torch.int32 and sources.shape == w13.shape and sources.is_contiguous()
    given = [table is not None for table in tables]
    assert given == [True, True, bias, bias, quantised, quantised], "a host copy of each tensor of an expert"
    for table in tables:
        assert table is None or (table.dtype == torch.int64 and table.shape == w13.shape and table.is_contiguous())
    first, parts = (0, None) if early is None else early
    check_early(parts)
    of_w13: Arguments = sources, fills.w13, fills.b13, fills.s13
    of_w2: Arguments = sources, fills.w2, fills.b2, fills.s2
    if parts is None:
        return (*of_w13, *(None,) * 4, 0), (*of_w2, *(None,) * 4, 0)
    of_w13 = *of_w13, parts.keys, parts.done13, parts.w13, parts.done13.shape[1], first
    return of_w13, (*of_w2, parts.keys, parts.done2, parts.w2, parts.done2.shape[1], first)
