"""Whether steps with reads ahead are shorter than steps without: both in turns, then the shorter ones. Pure, no clock.

Reads ahead save waiting and take time themselves (guesses, choosing slots, threads on the same cores). Which of the two
is more depends on the machine and is not calculated but measured, on the steps that are served.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

BLOCK = 8  # consecutive steps with reads ahead, or without; the first one still has the slots of the other kind
LEAST, MOST = 4, 64  # pairs of blocks by which they are compared
CERTAIN = 2.5  # standard errors by which a mean of fewer than MOST pairs must differ from 0
DISTURBED = math.log(2)  # a pair whose blocks differ more counts as if they differed by this
KEEP = 512  # steps with reads ahead, until both are compared again; twice as many each time, up to LONGEST
PAUSE = 2048  # the same without
LONGEST = 16384


class Verdict(NamedTuple):
    """Reads ahead go on for ``steps`` steps, or ``stop`` for as many.

    Attributes:
        ratio: seconds per row of the steps with reads ahead over those without.
        error: one standard error of it.
        pairs: blocks of each kind that were compared.
    """

    stop: bool
    steps: int
    ratio: float
    error: float
    pairs: int


class Payback:
    """Reads ahead of ``prefetch=auto``: lets them happen in every other block of steps, compares, and decides.

    A step counts per row, so that batches may change; which block has which rows is by chance.

    Attributes:
        verdict: the last one; None: both were never compared to the end.
    """

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        self._left = 0  # steps until both are compared again
        self._pause, self._keep = PAUSE, KEEP
        self._block = 0  # 0 … 3: the second and the third are without reads ahead
        self._step = self._rows = 0  # steps of this block; rows of those that count
        self._seconds = 0.0
        self._blocks: list[float] = []  # of the pair that is not whole yet: log of seconds per row
        self._differences: list[float] = []  # of whole pairs: with reads ahead less without

    @property
    def stopped(self) -> bool:
        """Whether nothing is to be read ahead in the next step, nor guessed."""
        if self._left:
            return self.verdict is not None and self.verdict.stop
        return self._block in (1, 2)  # with, without, without, with: a machine that drifts favours neither

    def end_step(self, rows: int, seconds: float) -> Verdict | None:
        """A step without prompts has ended. Returns what is decided by it, if anything.

        Args:
            rows: rows of the step, at least 1.
            seconds: from its start until its last layer had its output.
        """
        if self._left:
            self._left -= 1
            if not self._left:
                self._restart()
            return None
        self._step += 1
        if self._step > 1:
            self._rows, self._seconds = self._rows + rows, self._seconds + seconds
        return self._end_block() if self._step == BLOCK else None

    def _end_block(self) -> Verdict | None:
        self._blocks.append(math.log(max(self._seconds, 1e-9) / self._rows))
        self._step, self._rows, self._seconds = 0, 0, 0.0
        self._block = (self._block + 1) % 4
        if len(self._blocks) < 2:
            return None
        first, second = self._blocks
        self._blocks.clear()
        difference = first - second if self._block == 2 else second - first
        self._differences.append(max(-DISTURBED, min(DISTURBED, difference)))
        return self._decide()

    def _decide(self) -> Verdict | None:
        count = len(self._differences)
        if count < LEAST:
            return None
        mean = statistics.fmean(self._differences)
        error = statistics.stdev(self._differences, mean) / math.sqrt(count)
        if abs(mean) <= CERTAIN * error and count < MOST:
            return None
        stop = mean >= 0
        if stop:
            self._left, self._pause, self._keep = self._pause, min(2 * self._pause, LONGEST), KEEP
        else:
            self._left, self._keep, self._pause = self._keep, min(2 * self._keep, LONGEST), PAUSE
        ratio = math.exp(mean)
        self.verdict = Verdict(stop, self._left, ratio, ratio * error, count)
        return self.verdict

    def _restart(self) -> None:
        """Compares from the beginning."""
        self._block = self._step = self._rows = 0
        self._seconds = 0.0
        self._blocks.clear()
        self._differences.clear()
