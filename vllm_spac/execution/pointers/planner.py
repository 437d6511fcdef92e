"""Decides between steps which experts move into slots, for ``admission=step``. No tensors, no threads, no I/O."""

from __future__ import annotations

import numpy as np

from vllm_spac.execution.pointers.protocol import Move, Pointers
from vllm_spac.metrics import Counters

STEP_BYTES = 128 << 20  # maximum in flight into slots, but at least one expert: 5 ms of PCIe 4


class Planner:
    """Chooses moves after each step and counts their outcome. Pure; called between steps, by one thread.

    Args:
        pointers: state of the table; shared with the ``Mover`` that writes the table.
        most: maximum number of experts in flight; 0: none ever moves.
        counters: ``hits``, ``misses``, ``prefetches``, ``prefetch_hits`` and ``prefetch_wasted`` are counted here.
    """

    def __init__(self, pointers: Pointers, most: int, counters: Counters) -> None:
        self.most = most
        self._pointers, self._counters = pointers, counters
        self._last: np.ndarray | None = None  # counts of the last step without prompts, until ``choose`` has used them
        self._unused: set[int] = set()  # moved in and not used yet

    def moved_in(self, key: int) -> None:
        """Records that an expert's bytes are in its slot and its pointer is at the slot."""
        self._unused.add(key)
        self._counters.prefetches += 1

    def learn(self, counts: np.ndarray, resident: np.ndarray, *, prompts: bool) -> int:
        """Counts hits and misses of a finished step; returns how many experts it missed.

        Prefill rows predict little about the next step and are counted together with the others, so a step with such
        rows causes no moves.

        Args:
            counts: int [keys], rows that selected each expert.
            resident: bool [keys], experts whose pointer was at a slot while the step ran.
            prompts: whether the step had prefill rows.
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
        """Returns the moves that pay after the last step without prompts (their step 1); empty when called again."""
        if self._last is None:
            return []
        moves = self._pointers.choose(self._last, self.most)
        self._last = None
        wasted = self._unused.intersection(move.victim for move in moves)
        self._unused -= wasted
        self._counters.prefetch_wasted += len(wasted)
        return moves


def most_moves(step_bytes: int, expert_bytes: int) -> int:
    """Returns the maximum number of experts in flight: as many as fit ``step_bytes``, at least one; 0 for 0 bytes."""
    assert step_bytes >= 0
    return max(1, step_bytes // expert_bytes) if step_bytes else 0
