"""Expected tokens per step for each draft length, estimated from the drafts accepted so far."""

from __future__ import annotations

import math
from collections.abc import Sequence

_STALE_WEIGHT = 4  # weight, in drafts, of a stale estimate when its position is measured again


class Acceptance:
    """Probability per position that a draft token is accepted given that those before it were; a decayed estimate.

    Args:
        positions: draft positions (K).
        memory: verified steps after which an observation counts 1/e.
    """

    def __init__(self, positions: int, memory: int) -> None:
        self._keep, self._memory, self._step = math.exp(-1 / memory), memory, 0
        self._trials, self._accepted, self._seen = ([0.0] * positions for _ in range(3))

    def update(self, drafts: int, emitted: Sequence[int]) -> None:
        """Adds one step; arguments as for ``Guard.observe``."""
        self._step += 1
        for position in range(drafts):
            trials = sum(tokens > position for tokens in emitted)
            if trials == 0:
                return
            keep = self._keep
            if self._step - self._seen[position] > self._memory // 2:
                keep = min(keep, _STALE_WEIGHT / max(1.0, self._trials[position]))
            accepted = sum(tokens > position + 1 for tokens in emitted)
            self._trials[position] = keep * self._trials[position] + trials
            self._accepted[position] = keep * self._accepted[position] + accepted
            self._seen[position] = self._step

    def fade(self, weight: float, start: int = 0) -> None:
        """Limits the weight of the observations at positions from ``start`` on to ``weight`` drafts each."""
        for position, trials in list(enumerate(self._trials))[start:]:
            keep = min(1.0, weight / max(1.0, trials))
            self._trials[position] *= keep
            self._accepted[position] *= keep

    def tokens(self) -> list[float]:
        """Expected tokens per request and step with d drafts, [K + 1].

        A position that was never reached takes the probability of the last one that was.
        """
        expected, reached, last = [1.0], 1.0, 0.0
        for trials, accepted in zip(self._trials, self._accepted, strict=True):
            last = accepted / trials if trials else last
            reached *= last
            expected.append(expected[-1] + reached)
        return expected

    def most(self, drafts: int) -> float:
        """Most tokens per request and step with ``drafts`` drafts."""
        return drafts + 1.0

    def error(self, drafts: int) -> float:
        """Standard error of the logarithm of the expected tokens with ``drafts`` drafts."""
        expected, variance = self.tokens(), 0.0
        for position in range(drafts):
            trials = self._trials[position] + 2  # prior: one accepted and one rejected draft
            chance = (self._accepted[position] + 1) / trials
            behind = (expected[drafts] - expected[position]) / chance  # tokens gained if a draft is accepted here
            variance += behind**2 * chance * (1 - chance) / trials
        return math.sqrt(variance) / expected[drafts]
