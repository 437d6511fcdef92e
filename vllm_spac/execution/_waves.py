"""Rules that executions and the simulator share: how rows are split into waves, and how slots are filled initially."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

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


def filled_experts(layers: int, experts: int, slots: int, first: Sequence[int] = ()) -> list[list[int]]:
    """Returns the keys that are loaded before the first step: ``first``, then those of each layer.

    Layers have equal shares of the slots that ``first`` leaves, as far as they have other experts; the lowest experts
    are loaded first. With a slot for each expert, ``first`` has no meaning: slot and key are the same number.
    """
    if slots == layers * experts:
        first = ()
    assert len(first) <= slots
    others = [sorted({*range(layer * experts, (layer + 1) * experts)}.difference(first)) for layer in range(layers)]
    ranked = sorted((rank, layer) for layer, keys in enumerate(others) for rank in range(len(keys)))
    shares = Counter(layer for _, layer in ranked[: slots - len(first)])
    return [*([list(first)] if first else []), *(keys[: shares[layer]] for layer, keys in enumerate(others))]
