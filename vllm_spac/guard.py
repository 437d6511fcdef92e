"""How many draft tokens a step may use, so that speculating is never slower than not speculating.

Kept are decayed estimates of the seconds of a step with d drafts, for each size of batch, and of the probability that
a draft is accepted at each position. Tokens a second follow for every d, measured or in between, and the best d runs.
No speculation is the safe answer: it is left for a gain of ``margin`` only, and returned to as soon as it is ahead.

What is not run grows stale, so now and then another d runs for a few steps, less often each time that the answer stays
the same. Such steps are at most ``share`` of a size of batch's beyond its first ``ALLOWANCE``; what they lost, by their
own seconds and tokens, is at most ``loss`` of its seconds before there is another one, the first looks apart.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

ALLOWANCE = 48  # steps that may try lengths before ``share`` counts
_WINDOW = 32  # measured steps of a length that count
_BURST = 5  # steps of a look at another length; the first is not measured
_TRIAL = 9  # steps of a look at one that promises to be better
_DWELL = 16  # steps before an answer is questioned
_FIRST, _LONGEST = 32, 2048  # steps between looks
_STALE_WEIGHT, _STALE_SECONDS = 8, 4  # drafts, steps that an old estimate counts as when it is measured again
_SURPRISE = 1.2  # the ratio by which the running length's speed must change for others to be looked at soon


class Guard:
    """Decides the draft length of each step. Deterministic: the same calls give the same answers. Not thread-safe.

    Args:
        max_drafts: the greatest length (K), at least 1.
        share: of steps that may go into trying other lengths.
        loss: of seconds that may be lost by it.
        margin: a length replaces a shorter or longer one only if it gives so much more tokens a second.
        memory: steps after which an observation counts 1/e, and after which a length that did not run is stale.
        clock: seconds that never go back; asked only where ``observe`` is not given any.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        share: float = 0.02,
        loss: float = 0.005,
        margin: float = 0.05,
        memory: int = 100,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert max_drafts >= 1 and 0 < share < 1 and 0 < loss < 1 and margin >= 0 and memory >= 1
        self.max_drafts, self.share, self.loss = max_drafts, share, loss
        self.margin, self.memory = margin, memory
        self.acceptance = Acceptance(max_drafts, memory)
        self.steps = [0] * (max_drafts + 1)
        self.ignored = 0
        self._clock = clock
        self._batches: dict[int, _Batch] = {}
        self._batch = self._batch_of(1)
        self._last: tuple[int, _Batch] | None = None
        self._began: float | None = None

    def choose(self, requests: int | None = None) -> int:
        """Draft tokens that each request may use in the next step; ``requests``: its size, the last one's if None."""
        if requests:
            self._batch = self._batch_of(requests)
        self._began = self._clock()
        return self._batch.length

    def observe(self, drafts: int, emitted: Sequence[int], requests: int, seconds: float | None = None) -> None:
        """A step is over.

        Args:
            drafts: the length that the step ran under, whatever was chosen meanwhile. A drafter that proposed less
                had the rest rejected.
            emitted: tokens of each request that decoded or verified: accepted drafts and one more.
            requests: all requests of the step. More than emitted tokens: prompts were in it, and it is ignored.
            seconds: of the forward and the drafting; None: since ``choose``.
        """
        assert 0 <= drafts <= self.max_drafts, f"{drafts} drafts of at most {self.max_drafts}"
        if seconds is None:
            seconds = self._clock() - self._began if self._began is not None else 0.0
        self._began = None
        if not emitted or requests != len(emitted) or not 0 < seconds < math.inf:
            self.ignored += 1
            return
        self.steps[drafts] += 1
        self.acceptance.update(drafts, emitted)
        self._batch = self._batch_of(requests)
        settled = self._last == (drafts, self._batch)
        self._last = (drafts, self._batch)
        self._batch.observe(drafts, seconds, sum(emitted) / len(emitted), settled)

    def facts(self) -> dict:
        """What to show: the length that runs now, steps by length, speed over no speculation (None: not known yet)."""
        batch = self._batch
        rates = batch.rates()
        known = rates[0] and rates[batch.current]
        return {
            "draft_length": batch.length,
            "steps": {length: count for length, count in enumerate(self.steps) if count},
            "ignored_steps": self.ignored,
            "explored_steps": sum(item.explored for item in self._batches.values()),
            "switches": sum(item.switches for item in self._batches.values()),
            "speedup": rates[batch.current] / rates[0] if known else None,
            "tokens_per_step": self.acceptance.tokens()[batch.current],
        }

    def _batch_of(self, requests: int) -> _Batch:
        """Sizes from one power of two to the next share their estimates."""
        size = (requests - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = _Batch(self)
        return self._batches[size]


class Acceptance:
    """The probability that a draft token is accepted when those before it were, for each position; decayed."""

    def __init__(self, positions: int, memory: int) -> None:
        self._keep, self._memory, self._step = math.exp(-1 / memory), memory, 0
        self._trials, self._accepted, self._seen = ([0.0] * positions for _ in range(3))

    def update(self, drafts: int, emitted: Sequence[int]) -> None:
        """One step, as ``Guard.observe``."""
        self._step += 1
        for position in range(drafts):
            trials = sum(tokens > position for tokens in emitted)
            if trials == 0:
                return
            keep = self._keep
            if self._step - self._seen[position] > self._memory:
                keep = min(keep, _STALE_WEIGHT / max(1.0, self._trials[position]))
            accepted = sum(tokens > position + 1 for tokens in emitted)
            self._trials[position] = keep * self._trials[position] + trials
            self._accepted[position] = keep * self._accepted[position] + accepted
            self._seen[position] = self._step

    def tokens(self) -> list[float]:
        """Expected tokens of a request and step with d drafts, [K + 1]; a position never reached is as the last one."""
        expected, reached, last = [1.0], 1.0, 0.0
        for trials, accepted in zip(self._trials, self._accepted, strict=True):
            last = accepted / trials if trials else last
            reached *= last
            expected.append(expected[-1] + reached)
        return expected


class _Times:
    """Seconds of the steps of one length: the mean of the last ones without the eighth at either end."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=_WINDOW)
        self.seen = -math.inf
        self.estimate: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, seconds: float, step: int, memory: int) -> None:
        if step - self.seen > memory:
            self._values = deque(list(self._values)[-_STALE_SECONDS:], _WINDOW)
        self._values.append(seconds)
        self.seen = step
        cut = -(-len(self._values) // 8) if len(self._values) > 2 else 0
        kept = sorted(self._values)[cut : len(self._values) - cut]
        self.estimate = sum(kept) / len(kept)


@dataclass
class _Trial:
    """A look at another length.

    Attributes:
        left, done: steps of it to come, and so far; patience: steps until it is given up because they do not come.
        first: one of the first looks, which are not charged.
        seconds, tokens: of its steps so far, tokens of a request.
        fastest: seconds of its fastest step.
    """

    length: int
    left: int
    patience: int
    first: bool
    done: int = 0
    seconds: float = 0.0
    tokens: float = 0.0
    fastest: float = math.inf


class _Batch:
    """What is known and decided for one size of batch."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._times = [_Times() for _ in range(guard.max_drafts + 1)]
        self._ladder = [0, *sorted({max(1, guard.max_drafts >> power) for power in range(8)})]
        self._first = [guard.max_drafts >> 1, guard.max_drafts] if guard.max_drafts > 1 else [1]
        self._trial: _Trial | None = None
        self._looks = 0
        self._interval, self._decided, self._looked = _FIRST, 0, 0
        self._usual: float | None = None
        self._seconds = self._lost = 0.0
        self.current = self.steps = self.explored = self.switches = 0

    @property
    def length(self) -> int:
        return self._trial.length if self._trial else self.current

    def rates(self) -> list[float | None]:
        """Tokens a request and second with d drafts, [K + 1]; between measured lengths a straight line is assumed."""
        tokens = self._guard.acceptance.tokens()
        return [t / s if s else None for t, s in zip(tokens, self._estimates(), strict=True)]

    def observe(self, drafts: int, seconds: float, tokens: float, settled: bool) -> None:
        """``tokens``: of a request. ``settled``: the step before was of the same kind; only then its seconds are those
        of the length."""
        self.steps += 1
        usual = self._times[drafts].estimate
        counted = min(seconds, 4 * usual) if usual else seconds  # a step that the machine disturbed is no length's
        self._seconds += counted
        if settled:
            self._times[drafts].add(seconds, self.steps, self._guard.memory)
        trial = self._trial
        if trial is None:
            self._think()
            return
        trial.patience -= 1
        if drafts == trial.length:
            trial.left -= 1
            trial.done += 1
            trial.seconds += counted
            trial.tokens += tokens
            trial.fastest = min(trial.fastest, seconds)
            self.explored += 1
        if trial.left <= 0 or trial.patience <= 0 or (trial.done > 1 and self._hopeless(trial.length, trial.fastest)):
            self._finish(trial)

    def _think(self) -> None:
        if len(self._times[self.current]) < min(self.steps, _BURST - 1):
            return
        if self._first:
            self._start(self._first.pop(), _BURST, first=True)
            return
        if self.steps - self._decided < _DWELL:
            return
        self._watch()
        best = self._best()
        if best != self.current:
            if best == 0 or self._fresh(best):
                self._switch(best)
            elif self._behind():
                self._switch(0)
            elif self._affords(best, _TRIAL):
                self._start(best, _TRIAL)
        elif self.steps - self._looked >= self._interval:
            length = self._next_look()
            steps = _BURST if length else _TRIAL  # what all else is compared with is worth a better look
            if self._affords(length, steps):
                self._looks += 1
                self._start(length, steps)

    def _finish(self, trial: _Trial) -> None:
        self._trial = None
        self._looked = self.steps
        if not trial.first and (rate := self.rates()[self.current]):
            self._lost = max(0.0, self._lost + trial.seconds - trial.tokens / rate)
        seconds = self._estimates()
        if self._first and not all(self._hopeless(length, seconds[length]) for length in self._ladder[1:]):
            self._start(self._first.pop(), _BURST, first=True)
            return
        self._first.clear()
        best = self._best()
        if best != self.current and (best == 0 or self._fresh(best)):
            self._switch(best)
        elif best not in (self.current, 0) and trial.patience > 0 and self._affords(best, _TRIAL):
            self._start(best, _TRIAL)
        else:
            self._interval = min(2 * self._interval, _LONGEST)

    def _start(self, length: int, steps: int, *, first: bool = False) -> None:
        self._trial = _Trial(length, steps, 4 * steps, first)

    def _switch(self, length: int) -> None:
        self.current, self._decided, self._interval, self._usual = length, self.steps, _FIRST, None
        self._looks = 0
        self.switches += 1

    def _watch(self) -> None:
        """Look around soon when the running length became much faster or slower.

        No speculation that became slower is no reason: what an expert costs, all others pay more often.
        """
        rate = self.rates()[self.current]
        if self._usual is None or rate is None:
            self._usual = rate
        elif not 1 / _SURPRISE < rate / self._usual < _SURPRISE:
            if self.current or rate > self._usual:
                self._interval = _FIRST
            self._usual = rate

    def _best(self) -> int:
        rates = self.rates()
        handicap = 1 + self._guard.margin

        def score(length: int) -> float:
            rate = rates[length] or 0.0
            return rate if length in (0, self.current) else rate / handicap

        return max(range(len(rates)), key=lambda length: (score(length), length == self.current))

    def _behind(self) -> bool:
        """Whether no speculation would be faster than what runs."""
        rates = self.rates()
        return (rates[0] or 0.0) > (rates[self.current] or 0.0)

    def _next_look(self) -> int:
        """In turns: the strongest rival (that is no speculation, while there is some), and what is known least."""
        rates = self.rates()
        others = [length for length in self._ladder if length != self.current]
        if self._looks % 2:
            return min(others, key=lambda length: self._times[length].seen)
        return 0 if self.current else max(others, key=lambda length: rates[length] or 0.0)

    def _fresh(self, length: int) -> bool:
        times = self._times[length]
        return len(times) >= _TRIAL - 2 and self.steps - times.seen <= self._guard.memory

    def _affords(self, length: int, steps: int) -> bool:
        guard, lost = self._guard, self._lost + self._loss(length, steps)
        return self.explored + steps <= guard.share * self.steps + ALLOWANCE and lost <= guard.loss * self._seconds

    def _loss(self, length: int, steps: int) -> float:
        """Seconds that ``steps`` of another length are estimated to lose."""
        rates, seconds = self.rates(), self._estimates()[length]
        mine, its = rates[self.current], rates[length]
        return max(0.0, steps * seconds * (1 - its / mine)) if mine and its and seconds else 0.0

    def _hopeless(self, length: int, seconds: float | None) -> bool:
        """Whether a length would lose even if twice as many drafts were accepted as it seems, and another one."""
        rate = self.rates()[self.current]
        tokens = min(length + 1, 2 * self._guard.acceptance.tokens()[length])
        return rate is not None and seconds is not None and tokens < rate * seconds

    def _estimates(self) -> list[float | None]:
        """Seconds of a step with d drafts, [K + 1]; beyond the measured lengths as at the nearest."""
        known = [length for length, times in enumerate(self._times) if times.estimate is not None]
        if not known:
            return [None] * len(self._times)
        return np.interp(range(len(self._times)), known, [self._times[length].estimate for length in known]).tolist()
