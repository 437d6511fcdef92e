"""Copies admitted experts from host memory into their slots, by the device itself: ahead of need, or as it computes.

``fetch`` copies what was admitted ahead of need. For i = 0 ... n - 1 and each tensor t::

    slot copies[1 + N + i] of t   <-   host copy of expert copies[1 + i] of t

The host copy is pinned and in the device's address space. No copy engine and no host call is involved, so the launch
may be part of a CUDA graph. Only the device knows how much is copied: the grid is always the same, and with nothing to
copy each program reads one number. The programs share the experts' chunks evenly; a few dozen of them keep enough bytes
in flight to cover the latency of the bus.

What a layer admits itself, its grouped GEMM copies: a program there copies the rows of the matrix that it is about to
multiply, with their scales and biases (``fill_rows``), and reads them from the slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import Experts, Fills

_PROGRAMS = 64  # per tensor, each with _WORDS * 8 bytes in flight: 512 KB; PCIe 5 needs about 100 KB. Not measured.
_WORDS = 1024
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
    b: tl.tensor, s: tl.tensor, from_w: tl.tensor, from_b: tl.tensor, from_s: tl.tensor,
    T: tl.constexpr, BIAS: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    ZEROS: tl.constexpr, WIDE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Copies rows ``begin`` to ``end``, at most MOST, of an expert's W [rows, columns], with scales and biases."""
    here, there = tl.load(from_w + expert), tl.load(w + expert)
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
def _words(address: tl.tensor):
    """Returns a pointer to words of 8 bytes; the address is a multiple of 16."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64), bitcast=True), 16)


@triton.jit
def _fetch_kernel(
    copies: tl.tensor,
    hosts: tl.tensor,
    places: tl.tensor,
    words: tl.tensor,
    n_experts: tl.tensor,
    n_keys: tl.tensor,
    n_slots: tl.tensor,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program (p, t) copies chunks p, p + PROGRAMS, ... of tensor t, counted over all experts."""
    n = tl.load(copies)
    name = tl.program_id(1)
    size = tl.multiple_of(tl.load(words + name), 2)  # else the mask would apply to single words
    chunks = tl.cdiv(size, WORDS)
    for chunk in range(tl.program_id(0), n * chunks, PROGRAMS):
        number = chunk // chunks
        key = tl.load(copies + 1 + number)
        slot = tl.load(copies + 1 + n_experts + number)
        source = _words(tl.load(hosts + name * n_keys + key))
        target = _words(tl.load(places + name * n_slots + slot))
        at = (chunk - number * chunks) * WORDS + tl.arange(0, WORDS)
        tl.store(target + at, tl.load(source + at, mask=at < size, other=0), mask=at < size)


def fetch(copies: Tensor, experts: Experts, words: Tensor) -> None:
    """Copies the experts that ``admit`` has admitted ahead of need. No host synchronisation: a CUDA graph may have it.

    Args:
        copies: [1 + 2 N] int32, as ``admit`` wrote it.
        experts: ``hosts`` and ``places`` are read: addresses, multiples of 16 and valid as long as the launch runs.
        words: [names] int32, the size of each of an expert's tensors in words of 8 bytes, multiples of 2.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    names, keys = experts.hosts.shape
    assert copies.dtype == words.dtype == torch.int32 and copies.is_contiguous() and words.shape == (names,)
    assert experts.hosts.dtype == experts.places.dtype == torch.int64 and len(experts.places) == names
    assert experts.hosts.is_contiguous() and experts.places.is_contiguous()
    _fetch_kernel[(_PROGRAMS, names)](
        copies, experts.hosts, experts.places, words, len(copies) // 2, keys, experts.places.shape[1],
        PROGRAMS=_PROGRAMS, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip


def check_fills(fills: Fills | None, w13: Tensor, bias: bool, quantised: bool) -> None:
    """Raises ``AssertionError`` for what is not as ``Fills`` has it; ``w13``: the table of a GEMM."""
    if fills is None:
        return
    sources, *tables = fills
    assert sources.dtype == torch.int32 and sources.shape == w13.shape and sources.is_contiguous()
    given = [table is not None for table in tables]
    assert given == [True, True, bias, bias, quantised, quantised], "a host copy of each tensor of an expert"
    for table in tables:
        assert table is None or (table.dtype == torch.int64 and table.shape == w13.shape and table.is_contiguous())
