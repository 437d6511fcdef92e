"""Paired timing trials: the cost of a draft length relative to the current one, with its standard error."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

BLOCK = 4  # steps that are compared: of a trial, before it and after it; the first after a change does not count
_KEPT = 8  # trials of a length that count
_NOISE = 0.1  # of the logarithm of a trial's ratio, until it is known
_CHANGED = 4.0  # standard deviations by which a trial says that all before it are history


@dataclass
class Trial:
    """A few steps of another draft length than the current one.

    Attributes:
        patience: steps until it is over although they do not come.
        first: one of the first trials, which are not charged.
        steps: how many it is meant to have that count.
        urgent: it is judged by the steps before it alone.
        before, during, after: seconds of the steps that are compared.
        done: steps of it so far, compared or not; ``seconds`` and ``tokens`` (of a request) are theirs.
        fastest: seconds of the fastest of them.
        over: no more of it is to come.
    """

    length: int
    first: bool
    before: list[float]
    steps: int = BLOCK
    urgent: bool = False
    patience: int = 4 * BLOCK
    during: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    done: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    fastest: float = math.inf
    over: bool = False

    @property
    def around(self) -> float:
        """Seconds of a current step meanwhile."""
        return math.sqrt(math.prod(statistics.median_low(block) for block in (self.before, self.after or self.before)))

    @property
    def ratio(self) -> float:
        """The logarithm of the seconds of one of its steps over those of a current one."""
        return math.log((statistics.median_low(self.during) if self.during else self.fastest) / self.around)


class TrialCosts:
    """The cost of a step of each length relative to one of the current length, from trials' ratios (logarithms).

    Attributes:
        estimates: logarithms, [K + 1], in between along a straight line; 0 before the first trial.
        known: whether there was a trial since all were forgotten.
        spread: standard deviation of a trial, from those at all lengths; ``_NOISE`` counts as two.
    """

    def __init__(self, lengths: int) -> None:
        self._trials: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(lengths)]
        self._odd: list[float | None] = [None] * lengths
        self._current = 0
        self.known = False
        self.estimates = [0.0] * lengths
        self.spread = _NOISE

    def add(self, length: int, ratio: float) -> bool:
        """A trial is over. Returns whether it is the second in turn that is far from those before: then all that was
        known of any length is forgotten; one alone is not believed, and neither is the first of a length that takes far
        longer than others let expect."""
        trials, odd = self._trials[length], self._odd[length]
        self._odd[length] = None
        far = _CHANGED * self.spread
        is_odd = len(trials) > 1 and abs(ratio - statistics.fmean(trials)) > far
        is_dear = not trials and self.known and ratio - self.estimates[length] > far
        if (is_odd or is_dear) and odd is None:
            self._odd[length] = ratio
            return False
        if is_odd and odd is not None:
            self.forget()
            trials.append(odd)
        trials.append(ratio)
        self._estimate()
        return is_odd

    def forget(self, above: int = -1) -> None:
        """The machine has changed: no trial of a length above counts any more."""
        for length in range(above + 1, len(self._trials)):
            self._trials[length].clear()
            self._odd[length] = None
        self.known &= above >= 0  # nothing is left that the next trial could be too dear for

    def odd(self, length: int) -> float | None:
        """The ratio of the last trial of a length, if it is far from those before and another one must confirm it."""
        return self._odd[length]

    def move(self, length: int) -> None:
        """``length``, which was tried, is the current one now."""
        own, by = self._trials[length], statistics.fmean(self._trials[length])
        self._trials = [deque((ratio - by for ratio in trials), _KEPT) for trials in self._trials]
        self._trials[self._current] = deque((-ratio for ratio in own), _KEPT)
        self._trials[length].clear()
        self._odd = [None] * len(self._odd)
        self._current = length
        self._estimate()

    def times(self, length: int) -> int:
        """How many trials count."""
        return len(self._trials[length])

    def error(self, length: int) -> float:
        """Standard error of an estimate; of one that was never tried, as after one trial."""
        return self.spread / math.sqrt(max(1, self.times(length)))

    def _estimate(self) -> None:
        known = [length for length, trials in enumerate(self._trials) if trials or length == self._current]
        ratios = [math.exp(statistics.fmean(self._trials[length] or [0.0])) for length in known]
        self.known = True
        self.estimates = np.log(np.interp(range(len(self._trials)), known, ratios)).tolist()
        squares, free = 2 * _NOISE**2, 2
        for trials in filter(None, self._trials):
            mean = statistics.fmean(trials)
            squares += sum((ratio - mean) ** 2 for ratio in trials)
            free += len(trials) - 1
        self.spread = math.sqrt(squares / free)
