"""Chooses what is measured next within a limited time, by successive halving. Pure.

Each round measures every arm that is left, once, with twice as many prompts as the round before; then the slower half
is dropped (Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1, with times in place of equal pulls). Speeds are
compared with that of the first arm in the same round, because machines drift. Arms that are kept are in every round.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FIRST = 0.6  # share of the time that the first round may take: an arm that was never measured cannot be chosen


@dataclass(frozen=True)
class Run:
    """What is to be measured: an arm, in a round."""

    arm: str
    round: int


class Halving:
    """Successive halving over arms, of which the first is the reference.

    Args:
        arms: names, the likeliest to be fast first.
        kept: arms that are never dropped; the first of ``arms`` always is.
        seconds: that may be spent. A run begins only while there is time for one as long as the longest so far, so the
            time is exceeded by less than one run.
        seed: of the order within rounds after the first.
    """

    def __init__(self, arms: Sequence[str], kept: Sequence[str], seconds: float, seed: int = 0) -> None:
        if len(set(arms)) != len(arms) or not arms:
            raise ValueError("arms must be named, each once")
        self._reference, self._seconds, self._seed = arms[0], seconds, seed
        self._kept = {arms[0], *kept}
        self._left = list(arms)
        self._speeds: list[dict[str, float]] = [{}]  # by round
        self._queue = [*(arm for arm in arms if arm in self._kept), *(arm for arm in arms if arm not in self._kept)]
        self._spent = self._longest = 0.0

    @property
    def round(self) -> int:
        return len(self._speeds) - 1

    @property
    def spent(self) -> float:
        """Seconds of all runs that count."""
        return self._spent

    def next(self) -> Run | None:
        """Returns the next run, or None if the time is spent or nothing is left to compare."""
        if not self._queue and not self._begin_round():
            return None
        arm = self._queue[0]
        if self._spent >= self._seconds or (self._longest and self._spent + self._longest > self._seconds):
            return None
        beyond = self._spent >= FIRST * self._seconds and arm not in self._kept
        if self.round == 0 and beyond:
            self._left = [other for other in self._left if other in self._speeds[0] or other in self._kept]
            self._queue = []
            return self.next()
        return Run(arm, self.round)

    def observe(self, run: Run, rates: Sequence[float], seconds: float) -> None:
        """Records the tokens per second of each prompt of ``run``, and the seconds that it took.

        No rates: the arm failed, and is dropped.
        """
        if not self._queue or run != Run(self._queue[0], self.round):
            raise ValueError(f"{run} is not what was to be measured next")
        self._queue.pop(0)
        self._spent += seconds
        self._longest = max(self._longest, seconds)
        if rates:
            self._speeds[-1][run.arm] = statistics.median(rates)
        else:
            self._left.remove(run.arm)

    def free(self, seconds: float) -> None:
        """Takes back ``seconds`` that do not count: of the first engine, which may have to pack the experts."""
        self._spent -= seconds
        self._longest = 0.0

    def join(self, arm: str) -> None:
        """Adds an arm to this round and those after it."""
        if arm in self._left:
            raise ValueError(f"{arm} takes part already")
        self._left.append(arm)
        self._queue.append(arm)

    def speed(self, arm: str) -> float | None:
        """Returns the speed relative to the reference in the last round that measured both; None: in none."""
        for speeds in reversed(self._speeds):
            if arm in speeds and self._reference in speeds:
                return speeds[arm] / speeds[self._reference]
        return None

    def ranked(self) -> list[str]:
        """Returns the arms that are left and were measured, the fastest first."""
        found = {arm: speed for arm in self._left if (speed := self.speed(arm)) is not None}
        return sorted(found, key=lambda arm: -found[arm])

    def _begin_round(self) -> bool:
        """Drops the slower half and begins a round; False if there is nothing left to compare."""
        contenders = [arm for arm in self.ranked() if arm not in self._kept]
        if self._reference not in self._left or len(self.ranked()) < 2 or (self.round and len(contenders) <= 1):
            return False
        chosen = contenders[: (len(contenders) + 1) // 2]
        self._left = [arm for arm in self._left if arm in self._kept or arm in chosen]
        others = [arm for arm in self._left if arm != self._reference]
        random.Random(f"{self._seed} {self.round}").shuffle(others)
        self._queue = [self._reference, *others]
        self._speeds.append({})
        return True
