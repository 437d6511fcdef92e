"""What steps of another draft length take against those right before and after them, and how sure that is."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

BLOCK = 4  # steps that are compared: of a look, before it and after it; the first after a change does not count
_KEPT = 8  # looks at a length that count
_NOISE = 0.1  # of the logarithm of a look's ratio, until it is known
_CHANGED = 4.0  # standard deviations by which a look says that all before it are history


@dataclass
class Look:
    """A few steps of another length.

    Attributes:
        patience: steps until it is over although they do not come.
        first: one of the first looks, which are not charged.
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
        """The logarithm of what a step of it takes against a current one."""
        return math.log((statistics.median_low(self.during) if self.during else self.fastest) / self.around)


class LookCosts:
    """What a step of each length takes against one of the current length, 0 at first: from looks' ratios (logarithms).

    Attributes:
        estimates: logarithms, [K + 1], in between along a straight line; None before the first look.
        spread: standard deviation of a look, from those at all lengths; ``_NOISE`` counts as two.
    """

    def __init__(self, lengths: int) -> None:
        self._looks = [deque(maxlen=_KEPT) for _ in range(lengths)]
        self._odd: list[float | None] = [None] * lengths
        self._current = 0
        self.estimates: list[float] | None = None
        self.spread = _NOISE

    def add(self, length: int, ratio: float) -> bool:
        """A look is over. Returns whether it is the second in turn that is far from those before: then all that was
        known of any length is forgotten; one alone is not believed, and neither is the first of a length that takes far
        longer than others let expect."""
        looks, odd = self._looks[length], self._odd[length]
        self._odd[length] = None
        far = _CHANGED * self.spread
        is_odd = len(looks) > 1 and abs(ratio - statistics.fmean(looks)) > far
        is_dear = not looks and self.estimates is not None and ratio - self.estimates[length] > far
        if (is_odd or is_dear) and odd is None:
            self._odd[length] = ratio
            return False
        if is_odd:
            self.forget()
            looks.append(odd)
        looks.append(ratio)
        self._estimate()
        return is_odd

    def forget(self, above: int = -1) -> None:
        """The machine has changed: no look at a length above counts any more."""
        for length in range(above + 1, len(self._looks)):
            self._looks[length].clear()
            self._odd[length] = None

    def odd(self, length: int) -> float | None:
        """The ratio of the last look at a length, if it is far from those before and another one must confirm it."""
        return self._odd[length]

    def move(self, length: int) -> None:
        """``length``, which was looked at, is the current one now."""
        own, by = self._looks[length], statistics.fmean(self._looks[length])
        self._looks = [deque((ratio - by for ratio in looks), _KEPT) for looks in self._looks]
        self._looks[self._current] = deque((-ratio for ratio in own), _KEPT)
        self._looks[length].clear()
        self._odd = [None] * len(self._odd)
        self._current = length
        self._estimate()

    def times(self, length: int) -> int:
        """How many looks count."""
        return len(self._looks[length])

    def error(self, length: int) -> float:
        """Standard error of an estimate; of one that was never looked at, as after one look."""
        return self.spread / math.sqrt(max(1, self.times(length)))

    def _estimate(self) -> None:
        known = [length for length, looks in enumerate(self._looks) if looks or length == self._current]
        ratios = [math.exp(statistics.fmean(self._looks[length] or [0.0])) for length in known]
        self.estimates = np.log(np.interp(range(len(self._looks)), known, ratios)).tolist()
        squares, free = 2 * _NOISE**2, 2
        for looks in filter(None, self._looks):
            mean = statistics.fmean(looks)
            squares += sum((ratio - mean) ** 2 for ratio in looks)
            free += len(looks) - 1
        self.spread = math.sqrt(squares / free)
