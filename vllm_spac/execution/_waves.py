"""Rules that executions and the simulator share: how rows are split into waves, and how slots are filled initially."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_LOOK_AHEAD = 1024  # rows examined at once; bounds the work of a split to linear time


def row_waves(ids: np.ndarray, slots: int, experts: int) -> Iterator[tuple[int, int]]:
    """Splits the rows of a forward into waves ``[start, stop)``, each with as many rows as the slots allow.

    Args:
        ids: int [rows, top_k], experts of one layer, each in ``[0, experts)``.
        slots: number of slots, at least ``top_k``.
        experts: number of experts of the layer.
    """
    rows = len(ids)
    if rows == 0:
        return
    if slots >= experts or len(np.unique(ids)) <= slots:
        yield 0, rows
        return
    uses = np.zeros((rows, experts), dtype=bool)
    np.put_along_axis(uses, ids.astype(np.int64), True, axis=1)
    start = 0
    while start < rows:
        stop = _end_of_wave(uses, start, slots)
        assert stop > start, "one row needs more experts than there are slots"
        yield start, stop
        start = stop


def _end_of_wave(uses: np.ndarray, start: int, slots: int) -> int:
    needed, stop = np.zeros(uses.shape[1], dtype=bool), start
    while stop < len(uses):
        ahead = np.logical_or.accumulate(uses[stop : stop + _LOOK_AHEAD], axis=0) | needed
        fit = int(np.searchsorted(ahead.sum(axis=1), slots, side="right"))
        stop += fit
        if fit < len(ahead):
            break
        needed = ahead[-1]
    return stop


def filled_experts(layers: int, experts: int, slots: int) -> list[list[int]]:
    """Returns the keys that are loaded before the first step, per layer: equal shares, the lowest experts first.

    With a slot for each expert, slot and key are the same number.
    """
    shares = [slots // layers + (layer < slots % layers) for layer in range(layers)]
    return [[layer * experts + expert for expert in range(share)] for layer, share in enumerate(shares)]
