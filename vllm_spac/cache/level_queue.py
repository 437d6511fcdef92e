"""MoE-SpAc's multi-level queue, which orders the experts to fetch. Pure: no slots, no threads, no I/O."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class LevelQueue:
    """One FIFO per score; the highest score is served first. A key is queued at most once. Scores are at least 1."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {}  # no level is empty
        self._score: dict[int, int] = {}

    def put(self, key: int, score: int) -> None:
        """Enqueues ``key``, or moves it to the end of its new level; with an unchanged score it keeps its place."""
        assert score >= 1, f"score {score} of expert {key}: nothing below 1 is worth fetching"
        if self._score.get(key) == score:
            return
        self.discard(key)
        self._score[key] = score
        self._levels.setdefault(score, OrderedDict())[key] = None

    def pop(self, threshold: int = 1) -> int | None:
        """Removes and returns the oldest key of the highest level; None when no key scores ``threshold`` or more."""
        top = max(self._levels, default=0)
        if top < max(1, threshold):
            return None
        key = next(iter(self._levels[top]))
        self.discard(key)
        return key

    def discard(self, key: int) -> bool:
        """Removes ``key`` from its level; returns whether it was queued."""
        score = self._score.pop(key, None)
        if score is None:
            return False
        level = self._levels[score]
        del level[key]
        if not level:
            del self._levels[score]
        return True

    def clear(self) -> None:
        """Removes all keys."""
        self._levels.clear()
        self._score.clear()

    def __iter__(self) -> Iterator[int]:
        """Yields the keys in the order of service."""
        for score in sorted(self._levels, reverse=True):
            yield from self._levels[score]

    def __len__(self) -> int:
        return len(self._score)

    def __contains__(self, key: int) -> bool:
        return key in self._score
