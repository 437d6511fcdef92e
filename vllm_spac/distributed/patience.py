"""How long a layer waits for a worker before its rows go elsewhere: a multiple of what such calls took. Pure."""

from __future__ import annotations

from collections import deque

_KEPT, _ENOUGH, _TIMES = 64, 8, 8


class Patience:
    """Deadlines of the calls to one worker, by size: calls with about as many rows take about as long.

    Args:
        least: shortest deadline in seconds.
        first: deadline in seconds while fewer than 8 calls of that size were answered.
    """

    def __init__(self, least: float = 1.0, first: float = 60.0) -> None:
        self._least, self._first = least, first
        self._taken: dict[int, deque[float]] = {}  # by the power of two of the rows

    def observe(self, rows: int, seconds: float) -> None:
        """A call with so many rows was answered after ``seconds``."""
        self._taken.setdefault(rows.bit_length(), deque(maxlen=_KEPT)).append(seconds)

    def of(self, rows: int) -> float:
        """Returns the deadline in seconds of a call: 8 times the longest of the last 64 of that size."""
        taken = self._taken.get(rows.bit_length(), ())
        return self._first if len(taken) < _ENOUGH else max(self._least, _TIMES * max(taken))
