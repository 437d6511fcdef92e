"""What a step costs with drafts, from the steps served: seconds by rows and misses, and misses by drafts. Pure.

Most of what makes one step longer than another is the experts that it misses. So seconds are explained by these, and
these by drafts: either is known after few steps, where seconds by drafts alone would take hundreds.
"""

from __future__ import annotations

import math

import numpy as np

_DRIFT = 0.03  # by which a machine's speed changes from step to step, all costs alike
_CHANGE = 0.003  # the same of each cost alone
_NOISE, _LEAST = 0.1, 0.02  # spread of a step's seconds that misses do not explain, relative: at first, at least
_FAR = 3.0  # standard deviations from which a step is an outlier, unless the next one is as well
_KEEP = 0.999  # of what is known about misses, with each further step
_FORGET = 0.2  # share of the first uncertainty that comes back to it in the long run
_HOPE = 0.7  # standard deviations by which a draft's cost is taken to be less than it seems, so that it is tried again
_UNSURE, _LITTLE = 0.3, 0.1  # error of what a draft adds, relative to it; it counts as this share of a step at least
_MEMORY = 0.97  # weight of what a token cost before a step


class _Seconds:
    """Seconds of a step without misses, of each draft, and of each missing expert; a Kalman filter."""

    def __init__(self, counts: np.ndarray, seconds: float) -> None:
        shares = np.array([1.0, 0.05, 0.3 / max(1.0, counts[2])])
        self.costs = shares * seconds / float(shares @ counts)
        self.spread = np.diag(np.array([0.3, 4.0, 0.5]) * self.costs) ** 2
        self._noise = _NOISE
        self._odd = 0.0  # sign of the last step's error, if it was an outlier

    def add(self, counts: np.ndarray, seconds: float) -> None:
        """Adds a step of ``counts`` [3]: 1, its drafts per request, its missing experts."""
        costs = self.costs
        alone = np.diag(_CHANGE * np.array([costs[0], costs[0], costs[2]])) ** 2
        self.spread = self.spread + _DRIFT**2 * np.outer(costs, costs) + alone
        expected = max(float(counts @ costs), 0.1 * float(costs[0]))
        error = seconds - expected
        variance = float(counts @ self.spread @ counts) + (self._noise * expected) ** 2
        far = math.copysign(1.0, error) if abs(error) > _FAR * math.sqrt(variance) else 0.0
        relative = min(abs(error) / expected, _FAR * self._noise)
        self._noise = max(_LEAST, math.sqrt(0.97 * self._noise**2 + 0.03 * relative**2))
        odd, self._odd = self._odd, far
        if far and odd != far:
            return
        if far:  # twice: the machine is another one
            self._odd = 0.0
            self.spread = self.spread + np.diag(error / np.maximum(counts, 1.0)) ** 2
            variance = float(counts @ self.spread @ counts) + (self._noise * expected) ** 2
        towards = self.spread @ counts
        self.costs = np.maximum(costs + towards * (error / variance), [0.01 * seconds, 0.0, 0.0])
        self.spread = self.spread - np.outer(towards, towards) / variance


class _Misses:
    """Missing experts of a step without drafts, and of each accepted and each rejected one; least squares."""

    def __init__(self, counts: np.ndarray, misses: float) -> None:
        plain = misses / float(counts @ (1.0, 0.5, 0.5))
        self.counts = np.array([plain, plain / 2, plain / 2])
        self._first = np.diag(np.array([1.0, 0.5, 0.5]) * (plain + 1)) ** 2
        self.spread = self._first
        self._noise = ((plain + 1) / 2) ** 2

    def add(self, counts: np.ndarray, misses: float) -> None:
        """Adds a step of ``counts`` [3]: 1, its accepted and its rejected drafts per request."""
        error = misses - float(counts @ self.counts)
        self._noise = 0.98 * self._noise + 0.02 * min(error * error, 9 * self._noise)
        towards = self.spread @ counts
        variance = float(counts @ towards) + self._noise
        self.counts = self.counts + towards * (error / variance)
        learned = self.spread - np.outer(towards, towards) / variance
        self.spread = _KEEP * learned + (1 - _KEEP) * _FORGET * self._first


class StepCost:
    """Costs of the steps of one batch size, in seconds.

    An accepted draft adds the loads that a later step would have had.

    Attributes:
        token: per token and request, of the steps as they were; no more than ``plain``.
    """

    def __init__(self) -> None:
        self._seconds: _Seconds | None = None
        self._misses: _Misses | None = None
        self._sums = np.zeros(2)  # seconds and tokens per request, older steps weighing less

    @property
    def known(self) -> bool:
        """Whether there was a step."""
        return self._seconds is not None

    def add(self, accepted: float, rejected: float, seconds: float, misses: int = 0) -> None:
        """Adds a step.

        Args:
            accepted, rejected: its drafts per request, in the mean.
            seconds: of it, drafting not included.
            misses: experts that were not in fast memory, of all layers.
        """
        rows, fates = np.array([1.0, accepted + rejected, misses]), np.array([1.0, accepted, rejected])
        if self._seconds is None or self._misses is None:
            self._seconds, self._misses = _Seconds(rows, seconds), _Misses(fates, misses)
            self._sums = np.array([seconds, 1 + accepted])
        typical = self._last
        self._seconds.add(rows, seconds)
        self._misses.add(fates, misses)
        counted = min(seconds, 3 * typical * (1 + accepted))  # a disturbed step is no reason
        self._sums = _MEMORY * self._sums + (1 - _MEMORY) * np.array([counted, 1 + accepted])

    @property
    def tokens(self) -> float:
        """Tokens per request of the last steps."""
        return float(self._sums[1])

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        assert self._seconds is not None and self._misses is not None
        return float(self._seconds.costs[0] + self._seconds.costs[2] * self._misses.counts[0])

    @property
    def token(self) -> float:
        """Seconds per token and request, of the steps as they were; without drafts at most."""
        return min(self._last, self.plain)

    @property
    def unsure(self) -> bool:
        """Whether it is hardly known what a rejected draft adds, as where all steps had as many drafts."""
        added, error = self._added(2)
        return error > _UNSURE * max(added, _LITTLE * self.plain)

    @property
    def accepted(self) -> float:
        """Seconds that an accepted draft adds, less than they seem by what is not known of it.

        As they seem while the last steps took longer for a token than one without drafts.
        """
        return self._hoped(1)

    @property
    def rejected(self) -> float:
        """The same of a rejected draft."""
        return self._hoped(2)

    @property
    def _last(self) -> float:
        """Seconds per token and request of the last steps."""
        return float(self._sums[0] / self._sums[1])

    def _hoped(self, fate: int) -> float:
        added, error = self._added(fate)
        return max(0.0, added - (_HOPE * error if self._last <= self.plain else 0.0))

    def _added(self, fate: int) -> tuple[float, float]:
        assert self._seconds is not None and self._misses is not None
        row, load = float(self._seconds.costs[1]), float(self._seconds.costs[2])
        unknown = float(self._seconds.spread[1, 1] + load**2 * self._misses.spread[fate, fate])
        return row + load * float(self._misses.counts[fate]), math.sqrt(max(0.0, unknown))
