"""Whether reads ahead pay: layers use more of them than are wasted or do harm. Pure.

Counts stand for bytes: all experts of one loader have the same size. They decay, so that they are those of about the
last ``WINDOW`` steps.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW = 64  # steps
LEAST = 32  # wasted or harmful reads of a window by which they are judged
PAUSE = 1024  # steps until reads ahead are tried again; twice as many each time that they fail


class Stop(NamedTuple):
    """Reads ahead stop for ``steps`` steps, because of a window's ``used`` and ``lost`` ones."""

    used: int
    lost: int
    steps: int


class Payback:
    """Stops the reads ahead of ``prefetch=auto`` while they do not pay, and tries them again more and more seldom."""

    def __init__(self) -> None:
        self._used = self._lost = 0.0
        self._left = 0
        self._pause = PAUSE

    @property
    def stopped(self) -> bool:
        """Whether nothing is to be read ahead, nor guessed."""
        return self._left > 0

    def used(self, count: int) -> None:
        """Layers used ``count`` experts that were read ahead, for the first time each."""
        self._used += count

    def lost(self, count: int) -> None:
        """``count`` experts were read ahead and evicted unused, or were loaded because such a read had evicted them."""
        self._lost += count

    def end_step(self) -> Stop | None:
        """A step has ended. Returns why and for how long if reads ahead stop now, else None."""
        keep = 1 - 1 / WINDOW
        self._used, self._lost = self._used * keep, self._lost * keep
        if self._left:
            self._left -= 1
        elif self._lost >= LEAST and self._used < self._lost:
            stop = Stop(round(self._used), round(self._lost), self._pause)
            self._left, self._pause = self._pause, 2 * self._pause
            self._used = self._lost = 0.0
            return stop
        return None
