"""CPU twin of ``fetch``."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
from torch import Tensor

from ..types import EARLY_ROWS, READERS, Early


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
    """Twin of ``fetch.read_early``, which looks at ``turn`` before each part."""
    if after != (int(turn[1]) > 0):
        return
    for entry, key in enumerate(early.keys.tolist()):
        if key < 0:
            continue
        for host, memory, done, matrix in ((host13, early.w13, early.done13, 0), (host2, early.w2, early.done2, 1)):
            for part in range(done.shape[1]):
                if int(turn[0]) != layer - 1:
                    return
                for start, size in parts_of(part, matrix, sizes, interleaved):
                    ctypes.memmove(int(memory[entry]) + start, int(host[key]) + start, size)
                done[entry, part] += READERS


def parts_of(part: int, matrix: int, sizes: tuple[int, int, int, int], interleaved: bool) -> Iterator[tuple[int, int]]:
    """Yields where a part of W13 (``matrix`` 0) or W2 begins, and its size, in bytes."""
    ff, d, row13, row2 = sizes
    begin = part * EARLY_ROWS
    if matrix:
        ranges = [(begin, min(begin + EARLY_ROWS, d))]
    elif interleaved:
        ranges = [(2 * begin, min(2 * (begin + EARLY_ROWS), 2 * ff))]
    else:
        ranges = [(half * ff + begin, half * ff + min(begin + EARLY_ROWS, ff)) for half in range(2)]
    row = row2 if matrix else row13
    for first, last in ranges:
        yield first * row, max(0, last - first) * row


def with_early(
    key: int, early: Early, table: Tensor, expert: int, matrix: int, sizes: tuple[int, int, int, int], interleaved: bool
) -> Tensor:
    """Returns uint8 [bytes], W of an expert as at ``table[expert]``, but what was read early is from there."""
    rows = sizes[1] if matrix else 2 * sizes[0]
    made = torch.empty(rows * sizes[2 + matrix], dtype=torch.uint8)
    ctypes.memmove(made.data_ptr(), int(table[expert]), made.nbytes)
    memory, done = (early.w2, early.done2) if matrix else (early.w13, early.done13)
    for entry in (early.keys == key).nonzero().flatten().tolist():
        for part in (done[entry] == READERS).nonzero().flatten().tolist():
            for start, size in parts_of(part, matrix, sizes, interleaved):
                ctypes.memmove(made.data_ptr() + start, int(memory[entry]) + start, size)
    return made
