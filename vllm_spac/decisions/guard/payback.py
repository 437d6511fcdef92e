"""Whether steps with a technique are shorter than steps without: both in turns, then the shorter ones. Pure, no clock.

Reading ahead saves waiting and takes time itself (guesses, choosing slots, threads on the same cores); so does
computing experts on the CPU. Which of the two is more depends on the machine and is measured on the served steps.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

BLOCK = 8  # consecutive steps with the technique, or without; the first one still has the slots of the other kind
LEAST, MOST = 4, 64  # pairs of blocks by which they are compared
CERTAIN = 2.5  # standard errors by which a mean of fewer than ``most`` pairs must differ from 0
DISTURBED = math.log(2)  # a pair whose blocks differ more counts as if they differed by this
KEEP = 512  # steps with the technique, until both are compared again; twice as many each time, up to LONGEST
PAUSE = 2048  # the same without
LONGEST = 16384


class Verdict(NamedTuple):
    """Steps have the technique for ``steps`` steps, or ``stop`` having it for as many."""

    stop: bool
    steps: int
    ratio: float  # seconds per row of the steps with the technique over those without
    error: float  # one standard error of it
    pairs: int  # blocks of each kind that were compared
    changes: bool  # whether it is the first one, or another one than the last

    @property
    def of_drafts(self) -> str:
        """What is decided where the technique is drafts, for a log."""
        return f"drafts are {'left out' if self.stop else 'made'}: {self}"

    def __str__(self) -> str:
        return (
            f"steps with it took {self.ratio:.3f} (+- {self.error:.3f}) times as long as steps without, {self.pairs} "
            f"blocks of each compared; again in {self.steps} steps"
        )


class Payback:
    """Lets a technique happen in every other block of steps, compares, and decides.

    A step counts per row, so that batches may change; which block has which rows is by chance.

    Args:
        block: consecutive steps of one kind.
        settle: the first ones of a block, which do not count: slots are still those of the other kind.
        most: pairs of blocks after which the nearer decision is made.
        clear: ratio of seconds beyond which two pairs are enough, if it is so in both and in favour of the same kind.

    Attributes:
        verdict: the last one; None: both were never compared to the end.
    """

    def __init__(self, block: int = BLOCK, settle: int = 1, most: int = MOST, clear: float = math.inf) -> None:
        assert 0 <= settle < block and most >= LEAST
        self._length, self._settle, self._most, self._clear = block, settle, most, math.log(clear)
        self.verdict: Verdict | None = None
        self._left = 0  # steps until both are compared again
        self._pause, self._keep = PAUSE, KEEP
        self._block = 0  # 0 … 3: the second and the third are without
        self._step = self._rows = 0  # steps of this block; rows of those that count
        self._seconds = 0.0
        self._blocks: list[float] = []  # of the pair that is not whole yet: log of seconds per row
        self._differences: list[float] = []  # of whole pairs: with the technique less without

    @property
    def stopped(self) -> bool:
        """Whether the next step is to be one without the technique."""
        if self._left:
            return self.verdict is not None and self.verdict.stop
        return self._block in (1, 2)  # with, without, without, with: a machine that drifts favours neither

    @property
    def compares(self) -> bool:
        """Whether both kinds of steps take turns now."""
        return not self._left

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
        if self._step > self._settle:
            self._rows, self._seconds = self._rows + rows, self._seconds + seconds
        return self._end_block() if self._step == self._length else None

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
        if count < LEAST and not self._is_clear():
            return None
        mean = statistics.fmean(self._differences)
        error = statistics.stdev(self._differences, mean) / math.sqrt(count)
        if count >= LEAST and abs(mean) <= CERTAIN * error and count < self._most:
            return None
        stop = mean >= 0
        if stop:
            self._left, self._pause, self._keep = self._pause, min(2 * self._pause, LONGEST), KEEP
        else:
            self._left, self._keep, self._pause = self._keep, min(2 * self._keep, LONGEST), PAUSE
        ratio = math.exp(mean)
        changes = self.verdict is None or self.verdict.stop != stop
        self.verdict = Verdict(stop, self._left, ratio, ratio * error, count, changes)
        return self.verdict

    def _is_clear(self) -> bool:
        one_side = len({difference > 0 for difference in self._differences}) == 1
        return len(self._differences) > 1 and one_side and min(map(abs, self._differences)) > self._clear

    def _restart(self) -> None:
        """Compares from the beginning."""
        self._block = self._step = self._rows = 0
        self._seconds = 0.0
        self._blocks.clear()
        self._differences.clear()
