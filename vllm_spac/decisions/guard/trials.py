"""Paired timing trials: the cost of a draft length relative to the current one, with its standard error.

And what adopted drafts have cost, compared with no speculation: seconds and tokens as they came, no estimates.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

BLOCK = 4  # steps compared: of a trial, before it and after it; the first step after a change does not count
_KEPT = 8  # trials kept per length
_NOISE = 0.1  # assumed standard deviation of the logarithm of a trial's ratio, until it is measured
_CHANGED = 4.0  # standard deviations by which a trial shows that those before it no longer hold


@dataclass
class Trial:
    """A few steps of another draft length than the current one.

    Attributes:
        first: one of the first trials, whose loss is not charged.
        before, during, after: seconds of the steps that are compared.
        steps: measured steps that it should get.
        urgent: it is compared with the steps before it alone.
        patience: steps until it is ended even if no more of its steps run.
        done: its steps so far, compared or not. ``seconds`` and ``tokens`` (per request) are their sums.
        fastest: seconds of the fastest of them.
        over: no more of its steps will run.
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
        """Seconds per step of the current length around the trial."""
        return math.sqrt(math.prod(statistics.median_low(block) for block in (self.before, self.after or self.before)))

    @property
    def ratio(self) -> float:
        """Logarithm of the seconds per step of this length relative to the current one."""
        return math.log((statistics.median_low(self.during) if self.during else self.fastest) / self.around)


class TrialCosts:
    """The cost per step of each length relative to the current one, from the ratios of trials (logarithms).

    Attributes:
        estimates: logarithms, [K + 1]; lengths between tried ones are interpolated linearly; 0 before the first trial.
        known: whether there was a trial since all were discarded.
        spread: standard deviation of a trial, pooled over all lengths; ``_NOISE`` counts as two observations.
    """

    def __init__(self, lengths: int) -> None:
        self._trials: list[deque[float]] = [deque(maxlen=_KEPT) for _ in range(lengths)]
        self._odd: list[float | None] = [None] * lengths
        self._current = 0
        self.known = False
        self.estimates = [0.0] * lengths
        self.spread = _NOISE

    def add(self, length: int, ratio: float) -> bool:
        """Adds a finished trial; returns whether it confirmed that the machine has changed.

        That is so for the second consecutive outlier of a length: then all earlier trials of all lengths are discarded.
        A single outlier is set aside, and so is the first trial of a length that takes far longer than the trials of
        other lengths predict.
        """
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
        """Discards the trials of all lengths greater than ``above``, because the machine has changed."""
        for length in range(above + 1, len(self._trials)):
            self._trials[length].clear()
            self._odd[length] = None
        self.known &= above >= 0  # no estimate is left that the next trial could be compared with

    def odd(self, length: int) -> float | None:
        """The ratio of the last trial of a length if it is an outlier that another trial must confirm, else None."""
        return self._odd[length]

    def move(self, length: int) -> None:
        """Makes ``length``, which has been tried, the current one, and expresses all ratios relative to it."""
        own, by = self._trials[length], statistics.fmean(self._trials[length])
        self._trials = [deque((ratio - by for ratio in trials), _KEPT) for trials in self._trials]
        self._trials[self._current] = deque((-ratio for ratio in own), _KEPT)
        self._trials[length].clear()
        self._odd = [None] * len(self._odd)
        self._current = length
        self._estimate()

    def times(self, length: int) -> int:
        """Number of trials kept for ``length``."""
        return len(self._trials[length])

    def error(self, length: int) -> float:
        """Standard error of an estimate; a length that was never tried counts as tried once."""
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


_LIMIT = 10.0  # steps without speculation that drafts may lose
_LOSING = 32  # steps since they began to lose that are kept
_SLOWEST = 2.0  # a step counts for at most this many times the typical seconds
_PLAIN = 5  # measurements of no speculation, of which the median counts: one may have been disturbed


class AdoptedDrafts:
    """How far the current draft length is behind no speculation, in steps of the latter; a gain is not saved up.

    Drafts that were adopted by mistake lose from their first step on. Tests for changes do not notice them, and the
    estimates by which they were adopted are the ones that were wrong.

    Attributes:
        behind: steps without speculation that were lost since drafts last were level with it.
    """

    def __init__(self) -> None:
        self.behind = 0.0
        self._plain = deque[float](maxlen=_PLAIN)
        self._since = deque[tuple[float, float]](maxlen=_LOSING)

    @property
    def lose(self) -> bool:
        """Whether no speculation must be tried now."""
        return self.behind > _LIMIT

    @property
    def plain(self) -> float:
        """Seconds of a step without speculation."""
        return statistics.median_low(self._plain)

    @property
    def seconds(self) -> float:
        """Mean seconds of the steps that lost."""
        return statistics.fmean(seconds for seconds, _ in self._since)

    @property
    def tokens(self) -> list[float]:
        """Tokens per request of each step that lost."""
        return [tokens for _, tokens in self._since]

    def begin(self, plain: float) -> None:
        """Drafts are adopted; ``plain``: seconds of the steps before."""
        self._plain.clear()
        self._plain.append(plain)
        self.level()

    def measured(self, plain: float) -> None:
        """Adds the seconds of a step without speculation, from a trial of it."""
        self._plain.append(plain)

    def add(self, seconds: float, tokens: float, typical: float) -> None:
        """Adds a step with drafts; ``typical``: seconds of most of them, infinite until that is known."""
        if typical == math.inf:
            return
        counted = min(seconds, _SLOWEST * typical)
        self.behind += counted / self.plain - tokens
        self._since.append((counted, tokens))
        if self.behind <= 0:
            self.level()

    def level(self) -> None:
        """Starts again from no loss."""
        self.behind = 0.0
        self._since.clear()
