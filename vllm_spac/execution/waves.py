"""Which rows of a layer run together where its slots are fewer than its experts, and what slots hold at first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

_FAR = 3  # a wave rather takes two experts that the last one had than one that it had not


def row_waves(ids: np.ndarray, slots: int, experts: int) -> Iterator[slice | np.ndarray]:
    """Splits the rows of a forward into waves that need no more experts than there are slots each.

    If all rows together do, there is one wave. Else a wave begins with the row that needs the fewest experts which the
    last wave did not have, and takes the row that adds the fewest until none fits: the experts of all waves together
    are several times fewer than those of rows in their order, the more so the more rows there are. A greedy choice,
    since the best one is a hard problem.

    Args:
        ids: int [rows, top_k], experts of one layer, each in ``[0, experts)``.
        slots: number of slots, at least ``top_k``.
        experts: number of experts of the layer.

    Yields:
        The rows of each wave: a slice with all of them, or int64 [wave], ascending. Every row is in one wave.
    """
    rows = len(ids)
    if rows == 0:
        return
    if slots >= experts or len(np.unique(ids)) <= slots:
        yield slice(0, rows)
        return
    uses = np.zeros((experts, rows), dtype=bool)
    uses[ids.T.astype(np.int64), np.arange(rows)] = True
    left, last = np.arange(rows), np.zeros(experts, dtype=bool)
    while len(left):
        inside, last = _next_wave(uses[:, left], last, slots)
        assert inside.any(), "one row needs more experts than there are slots"
        yield left[inside]
        left = left[~inside]


def _next_wave(uses: np.ndarray, last: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses a wave of the rows that are left.

    Args:
        uses: bool [experts, rows].
        last: bool [experts], the experts of the last wave.
        slots: most experts of a wave.

    Returns:
        The rows of the wave, bool [rows], and its experts, bool [experts].
    """
    wave, room = np.zeros(len(uses), dtype=bool), slots
    added = uses.sum(axis=0)  # experts of each row that the wave does not have
    costs = added + (_FAR - 1) * uses[~last].sum(axis=0)
    never = _FAR * len(uses) + 1
    while True:
        ranks = np.where((added > 0) & (added <= room), costs, never)
        row = int(ranks.argmin())
        if ranks[row] == never:
            return added == 0, wave
        new = np.flatnonzero(uses[:, row] & ~wave)
        wave[new] = True
        room -= len(new)
        added -= uses[new].sum(axis=0)
        costs -= np.where(last[new], 1, _FAR) @ uses[new]


def filled_experts(layers: int, experts: int, slots: int, settled: Iterable[int] = ()) -> list[list[int]]:
    """Returns the keys of each layer that are loaded before the first step: equal shares, the lowest experts first.

    Args:
        settled: experts that have slots already, which count.
    """
    held = set(settled)
    keys = [layer * experts + expert for expert in range(experts) for layer in range(layers)]
    chosen = [key for key in keys if key not in held][: slots - len(held)]
    return [sorted(key for key in chosen if key // experts == layer) for layer in range(layers)]
