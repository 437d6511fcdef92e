"""What steps of a draft length take, relative to steps without drafts: from each change of the length. Pure, no clock.

A machine drifts, so that only steps which follow one another are compared: the first ones of a length with the last
ones of the length before. Medians, since single steps are disturbed. The very first step of a length does not count: it
verifies what one length has left and makes what another one asks for.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from functools import partial

import numpy as np

STEPS = 3  # of a new length that are compared
_BEFORE = 5  # of the length before
_SINCE = 7  # of the current length, by which it is seen that the machine has changed
_KEPT = 4  # comparisons of a length that count
_OLD = 2048  # steps after which a length is forgotten when a shorter one is compared
_FAR = 0.3  # difference of logarithms that is none by chance, or has to be confirmed


class LengthCosts:
    """Of one batch size.

    Args:
        most: the greatest length.

    Attributes:
        seconds: of a step of each length, over those of one without drafts, [most + 1]; between lengths that were
            compared as on a line.
    """

    def __init__(self, most: int) -> None:
        self.seconds = [1.0] * (most + 1)
        self._doubtful = False
        self._length: int | None = None
        self._seconds: deque[float] = deque(maxlen=_SINCE)  # of the current length
        self._before: tuple[int, float] | None = None  # the length before, and its seconds
        self._plain = math.nan  # logarithm of the seconds without drafts, as of the last comparison
        self._shift = 0.0  # by how much it seemed to have changed since
        self._ratios = defaultdict[int, deque[float]](partial(deque, maxlen=_KEPT))  # logarithms, over no drafts
        self._odd: dict[int, float] = {}
        self._steps = 0
        self._compared = defaultdict[int, int](int)  # steps until a length was last compared

    @property
    def doubtful(self) -> bool:
        """Whether the current length should be compared with none again, and has run for long enough.

        The last comparison was far from those before it, or steps take another time than by the comparisons.
        """
        return self._doubtful and self.settled

    @property
    def settled(self) -> bool:
        """Whether the current length has run for some time."""
        return len(self._seconds) == _SINCE

    def begin(self) -> None:
        """The next step does not follow the last one."""
        self._length = self._before = None
        self._seconds.clear()

    def add(self, drafts: int, seconds: float) -> None:
        """Adds a step."""
        self._steps += 1
        if drafts != self._length:
            if self._length is not None and len(self._seconds) >= STEPS:
                self._before = self._length, statistics.median_low(list(self._seconds)[-_BEFORE:])
            self._length = drafts
            self._seconds.clear()
            return
        self._seconds.append(seconds)
        if len(self._seconds) == STEPS and self._before is not None and self._before[0] != drafts:
            self._compare(*self._before)
        elif len(self._seconds) == _SINCE:
            now = math.log(statistics.median_low(self._seconds)) - math.log(self.seconds[drafts])
            if drafts == 0 or math.isnan(self._plain):
                self._plain = now
            elif abs(now - self._plain) > _FAR:
                self._doubtful, self._shift = True, now - self._plain

    def _compare(self, before: int, seconds: float) -> None:
        assert self._length is not None
        now, self._before = statistics.median_low(self._seconds), None
        shift, self._shift, self._doubtful = self._shift, 0.0, False
        ratio = math.log(now / seconds)
        if self._length == 0:
            self._note(before, -ratio, shift)
            self._plain = math.log(now)
        else:
            self._note(self._length, ratio + math.log(self.seconds[before]), 0.0)
            self._plain = math.log(now / self.seconds[self._length])

    def _note(self, length: int, ratio: float, shift: float) -> None:
        """Adds a comparison; ``shift``: by how much steps of this length seemed to take another time before it."""
        odd, away = self._odd.pop(length, None), ratio - math.log(self.seconds[length])
        if self._ratios and abs(away) > _FAR and (shift or length in self._ratios):
            if shift * away <= 0 and (odd is None or abs(odd - ratio) > _FAR):
                self._odd[length], self._doubtful = ratio, True
                return
            self._ratios.clear()  # the machine is another one
        self._ratios[length].append(ratio)
        self._compared[length] = self._steps
        for longer in [each for each in self._ratios if each > length]:
            if self._steps - self._compared[longer] > _OLD:
                del self._ratios[longer]
        self._draw()

    def _draw(self) -> None:
        """Draws the line through what is known."""
        lengths = [0, *sorted(self._ratios)]
        known = [1.0, *(math.exp(statistics.fmean(self._ratios[length])) for length in lengths[1:])]
        each = max(0.0, (known[-1] - 1) / lengths[-1])
        beyond = [known[-1] + (length - lengths[-1]) * each for length in range(lengths[-1] + 1, len(self.seconds))]
        self.seconds = [*np.interp(range(lengths[-1] + 1), lengths, known).tolist(), *beyond]
