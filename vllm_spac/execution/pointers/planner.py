"""Decides between steps which experts move into slots with ``admission=step``. No tensors, no threads, no I/O."""

from __future__ import annotations

import numpy as np

from vllm_spac.execution.pointers.protocol import Move, Pointers
from vllm_spac.metrics import Counters

STEP_BYTES = 128 << 20  # on their way into slots at once at most, at least one expert: 5 ms of PCIe 4


class Planner:
    """What to move, from step to step, and what became of it. Pure; called between steps, by one thread.

    Args:
        pointers: what the table says; shared with whoever writes the table.
        most: experts that are on their way at once, at most; 0: none ever moves.
        counters: ``hits``, ``misses`` and ``prefetches`` with what became of them are counted here.
    """

    def __init__(self, pointers: Pointers, most: int, counters: Counters) -> None:
        self.most = most
        self._pointers, self._counters = pointers, counters
        self._last: np.ndarray | None = None  # counts of the last step that says something about the next
        self._unused: set[int] = set()  # moved in and not needed yet

    def moved_in(self, key: int) -> None:
        """The bytes of an expert have come, and its pointer is at its slot."""
        self._unused.add(key)
        self._counters.prefetches += 1

    def learn(self, counts: np.ndarray, resident: np.ndarray, *, prompts: bool) -> int:
        """A step is over and its counts are known; returns how many experts it missed.

        Rows of prompts say little about the next step and are counted with the others: a step that has some decides
        nothing.

        Args:
            counts: int [keys], rows that selected each expert.
            resident: bool [keys], whose pointer was at a slot while the step ran.
            prompts: some of the step's rows were those of prompts.
        """
        used = counts > 0
        hits = np.flatnonzero(used & resident)
        misses = int(used.sum()) - len(hits)
        self._counters.hits += len(hits)
        self._counters.misses += misses
        first = self._unused.intersection(hits.tolist())
        self._unused -= first
        self._counters.prefetch_hits += len(first)
        if not prompts:
            self._pointers.observe(counts)
            self._last = counts
        return misses

    def choose(self) -> list[Move]:
        """Steps 1 of the moves that pay after the last step that said something; none if it was asked already."""
        if self._last is None:
            return []
        moves = self._pointers.choose(self._last, self.most)
        self._last = None
        wasted = self._unused.intersection(move.victim for move in moves)
        self._unused -= wasted
        self._counters.prefetch_wasted += len(wasted)
        return moves


def most_moves(step_bytes: int, expert_bytes: int) -> int:
    """Experts that may be on their way at once: as many as ``step_bytes`` hold, but one at least; of 0 bytes none."""
    assert step_bytes >= 0
    return max(1, step_bytes // expert_bytes) if step_bytes else 0
