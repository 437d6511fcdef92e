"""The guard for one batch size: which draft length runs, which is tried next, and what both cost."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_spac.decisions.guard.acceptance import Acceptance
from vllm_spac.decisions.guard.trials import BLOCK, AdoptedDrafts, Trial, TrialCosts

ALLOWANCE = 48  # steps that may go into trials before ``share`` applies
_SURE = 1.5  # standard errors
_LEVEL = 32  # steps over which the speed of the current length is measured
_SURPRISE = 1.2  # the ratio by which it must change for other lengths to be tried soon
_FIRST, _LONGEST = 32, 2048  # steps between trials when nothing seems better
_CHECKS = 16, 128, 512  # steps between trials of no speculation: at first, at most, at most while it is much slower
_FAR = 0.2  # much slower: difference of the logarithms of tokens per second
_PROBE = 96  # steps between probes
_PROBE_STEPS = 1  # measured steps of a probe, in addition to the first, which is not counted
_ROUTINE, _PROBING = 0.3, 0.85  # share of ``loss`` for routine trials, and for routine trials and probes together
_SLACK, _ALARM = 0.3, 5.0  # of the Page test, in steps: the excess ignored per step, the sum that raises the alarm
_SLOWEST = 3.0  # a step counts in it for at most this many times the typical seconds
_CHARGED = 0.25  # share of what adopted drafts lost that must be earned before further trials
REST = 256  # steps without drafts but for trials, after which the drafter is not kept ready between them
_PRIOR = 1  # steps of the expected length, averaged with those since the change


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Limits on a guard's trials.

    Attributes:
        share: share of the steps that may go into trials of other lengths.
        loss: share of the seconds that these trials may lose.
        margin: a length replaces another only if it yields more tokens per second by at least this share.
        memory: verified steps after which an accepted draft counts 1/e; a position not reached for half as many is
            stale.
        lengths: ascending, the draft lengths that may run, 0 among them; empty: all up to ``max_drafts``.
    """

    max_drafts: int
    share: float = 0.03
    loss: float = 0.005
    margin: float = 0.05
    memory: int = 100
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert not self.lengths or (self.lengths[0] == 0 < self.lengths[-1] <= self.max_drafts)
        assert self.max_drafts >= 1 and 0 < self.share < 1 and 0 < self.loss < 1
        assert self.margin >= 0 and self.memory >= 1


def halved(most: int) -> list[int]:
    """Returns 0, and ``most`` halved again and again down to 1; ascending."""
    return [0, *sorted({max(1, most >> power) for power in range(8)})]


class BatchGuard:
    """The guard for one batch size.

    Attributes:
        current: the draft length that runs outside trials.
        steps, explored, switches: steps observed, steps in trials of drafts, changes of ``current``.
    """

    def __init__(self, settings: GuardSettings, acceptance: Acceptance) -> None:
        self._settings, self._acceptance = settings, acceptance
        self._costs = TrialCosts(settings.max_drafts + 1)
        self._lengths = settings.lengths or range(settings.max_drafts + 1)
        self._ladder = list(settings.lengths or halved(settings.max_drafts))
        self._first = self._ladder[1:][-2:]
        self._trial: Trial | None = None
        self._recent: deque[float] = deque(maxlen=_LEVEL)  # seconds of the current length's last steps
        self._seen = dict.fromkeys(self._ladder, -1)  # step of the last trial
        self._interval, self._check = _FIRST, _CHECKS[0]
        self._usual: float | None = None
        self._excess, self._rise = 0.0, deque[tuple[float, float]](maxlen=4 * BLOCK)  # sum and steps of the Page test
        self._adopted = AdoptedDrafts()
        self._probed = 0  # step of the last trial of drafts
        self._again: int | None = None  # a length whose last trial was an outlier
        self._typical = math.inf  # seconds of a current step
        self._seconds = self._lost = 0.0
        self._off = 0  # steps since drafts were dropped
        self.current = self.steps = self.explored = self.switches = 0

    @property
    def length(self) -> int:
        return self._trial.length if self._trial and not self._trial.over else self.current

    @property
    def rests(self) -> bool:
        """Whether the next step has no drafts, because these have not paid for long."""
        return self.length == 0 and self._off > REST

    def gains(self) -> list[float]:
        """Logarithm of tokens per second with d drafts relative to the current length, [K + 1].

        Before the first trial all lengths are assumed to cost the same.
        """
        tokens = self._acceptance.tokens()
        now = tokens[self.current]
        return [math.log(t / now) - cost for t, cost in zip(tokens, self._costs.estimates, strict=True)]

    def observe(self, drafts: int, seconds: float, tokens: float, settled: bool) -> None:
        """Adds one step, and starts, ends or judges a trial.

        Args:
            drafts: the draft length that the step ran with.
            tokens: mean emitted tokens per request.
            settled: the step before had the same draft length and batch size. Only then are the seconds a measurement
                of that length.
        """
        self.steps += 1
        self._off = self._off + 1 if self.current == 0 else 0
        counted = min(seconds, 4 * self._typical)  # so that one disturbed step does not count against a length
        self._seconds += counted
        trial = self._trial
        if drafts == self.current and settled:
            self._recent.append(seconds)
            if trial is not None:
                trial.after.append(seconds)
            elif self.current:
                self._adopted.add(seconds, tokens, self._typical)
                if self._alarmed(seconds, tokens) or self._adopted.lose:
                    self._start(0, urgent=True)
                    return
        if trial is None:
            if self._first or self.steps % BLOCK == 0:  # decisions between trials need not be made at every step
                self._think()
            return
        trial.patience -= 1
        if not trial.over and drafts == trial.length:
            self._take(trial, seconds, counted, tokens, settled)
        if trial.over and (trial.urgent or len(trial.after) == BLOCK or trial.patience <= 0):
            self._judge(trial)
        elif not trial.over and trial.patience <= 0:
            self._close(trial)

    def _take(self, trial: Trial, seconds: float, counted: float, tokens: float, settled: bool) -> None:
        """Adds a step to the running trial."""
        self.explored += trial.length > 0
        trial.done += 1
        trial.seconds += counted
        trial.tokens += tokens
        trial.fastest = min(trial.fastest, seconds)
        if settled:
            trial.during.append(seconds)
        hopeless = trial.done > 1 and self._hopeless(trial.length, trial.fastest / trial.around)
        if len(trial.during) == trial.steps or hopeless:
            self._close(trial)

    def _close(self, trial: Trial) -> None:
        trial.over, trial.patience = True, 4 * BLOCK
        trial.after.clear()

    def _judge(self, trial: Trial) -> None:
        """Evaluates a trial once the steps after it have finished, and decides what runs next."""
        self._trial = None
        self._seen[trial.length] = self.steps
        if trial.done == 0:  # the drafter proposed nothing else
            self._first.clear()
            self._interval = min(2 * self._interval, _LONGEST)
            return
        if trial.length == 0 and trial.during:
            self._adopted.measured(statistics.median_low(trial.during))
        if trial.urgent and self._fled(trial):
            return
        changed = self._costs.add(trial.length, trial.ratio)
        odd = self._costs.odd(trial.length)
        self._again = trial.length if odd is not None and odd < self._costs.estimates[trial.length] else None
        if not trial.first and trial.length:
            tokens = self._acceptance.tokens()[self.current]
            self._lost = max(0.0, self._lost + trial.seconds - trial.tokens * trial.around / tokens)
        if trial.first and all(
            self._hopeless(length, math.exp(self._costs.estimates[length]))
            for length in self._ladder
            if length != self.current
        ):
            self._first.clear()
        if self._switched():
            return
        if changed:
            self._interval, self._check = _FIRST, _CHECKS[0]
        elif trial.steps < BLOCK:
            return
        elif trial.length == 0:
            self._check = min(2 * self._check, _CHECKS[1 + (self.gains()[0] < -_FAR)])
        elif self._promising() is None:
            self._interval = min(2 * self._interval, _LONGEST)

    def _think(self) -> None:
        """Decides between trials: switches, or starts the next trial."""
        if len(self._recent) < min(BLOCK, self.steps) or self._switched():
            return
        self._typical = statistics.median(self._recent)
        if self._first:
            self._start(self._first.pop(), first=True)
            return
        self._watch()
        if self.current and self.steps - self._seen[0] >= self._check:
            self._start(0)
            return
        if self._again is not None and self._again != self.current and self._affords(self._again):
            self._start(self._again)
            return
        since = {length: self.steps - seen for length, seen in self._seen.items() if length not in (0, self.current)}
        promising = self._promising()
        if promising is not None and self._affords(promising):
            self._start(promising)
            return
        length = max(since, key=since.__getitem__, default=0)
        if min(since.values(), default=0) >= self._interval and self._affords(length, part=_ROUTINE):
            self._start(length)
        elif self.current or self.steps - self._probed < _PROBE:
            return
        elif self._affords(least := self._ladder[1], _PROBE_STEPS, _PROBING):
            self._start(least, steps=_PROBE_STEPS)

    def _start(self, length: int, *, first: bool = False, steps: int = BLOCK, urgent: bool = False) -> None:
        before = list(self._recent)[-BLOCK:]
        if urgent and self._adopted.lose:
            before = [self._adopted.seconds]
        elif urgent:  # after a change all steps are slow: a fast one among them shows a passing disturbance
            before = sorted(seconds for seconds, _ in self._rise)[(len(self._rise) - 1) // 4 :][:1]
        self._trial = Trial(length, first, before, steps, urgent)
        self._again = None
        if length:
            self._probed = self.steps
        if not urgent:
            self._calm()

    def _alarmed(self, seconds: float, tokens: float) -> bool:
        """Whether steps of the current length have begun to take longer than their tokens justify (Page's test)."""
        if len(self._recent) < _LEVEL // 2 or self._typical == math.inf:
            return False
        worth = tokens / self._acceptance.tokens()[self.current]
        self._excess += min(seconds / self._typical, _SLOWEST) - worth - _SLACK
        if self._excess <= 0:
            self._calm()
            return False
        self._rise.append((seconds, tokens))
        return self._excess > _ALARM

    def _calm(self) -> None:
        self._excess = 0.0
        self._rise.clear()

    def _fled(self, trial: Trial) -> bool:
        """Switches to no speculation if an urgent trial of it beats the steps that led to it; whether it did."""
        lost = self._adopted.lose
        since = self._adopted.tokens if lost else [tokens for _, tokens in self._rise]
        expected = self._acceptance.tokens()[self.current]
        tokens = (_PRIOR * expected + sum(since)) / (_PRIOR + len(since))
        charged = _CHARGED * self._adopted.behind * self._adopted.plain if lost else 0.0
        self._calm()
        self._adopted.level()
        if -math.log(tokens) - trial.ratio <= 0:
            if not lost:
                self._excess = _ALARM / 2  # steps before the change may be among them: a real change soon alarms again
            return False
        self._costs.forget()
        self._costs.add(0, trial.ratio)
        self._acceptance.fade(_PRIOR)
        self._seconds, self._lost = 0.0, charged  # what was earned before was earned at another speed
        self._move(0)
        return True

    def _switched(self) -> bool:
        """Switches to the length with the greatest gain, if it suffices (``_least``); returns whether it switched."""
        gains = self.gains()
        better = [
            length for length in self._others() if self._costs.times(length) and gains[length] > self._least(length)
        ]
        if not better:
            return False
        self._move(max(better, key=lambda length: gains[length]))
        return True

    def _move(self, best: int) -> None:
        """Makes ``best``, which has been tried, the current length."""
        if self.current == 0:
            self._costs.forget(above=best)  # longer ones were tried while not even this one was worth its cost
            self._acceptance.fade(0, best)
            self._adopted.begin(statistics.median(self._recent))
        self._costs.move(best)
        self._calm()
        self._again = None
        self._recent.clear()
        self._typical = math.inf
        self.current, self._interval, self._check, self._usual = best, _FIRST, _CHECKS[0], None
        self._seen[0] = self._probed = self.steps
        self.switches += 1

    def _others(self) -> Iterable[int]:
        return (length for length in self._lengths if length != self.current)

    def _least(self, length: int) -> float:
        """The least gain at which a length becomes the current one: any for no speculation, a sure one for others."""
        if length == 0:
            return 0.0
        if self._costs.times(length) < 2:
            return math.inf
        return max(math.log1p(self._settings.margin), _SURE * self._error(length))

    def _error(self, length: int) -> float:
        return math.hypot(self._costs.error(length), self._acceptance.error(length))

    def _promising(self) -> int | None:
        """The length whose gain may exceed ``margin`` but is not yet measured precisely enough; None if none does."""
        if not self._costs.known:
            return None
        gains = self.gains()
        fastest = max(self._others(), key=lambda length: gains[length])
        rivals = {*self._ladder, fastest} - {0, self.current}
        hopes = {length: gains[length] + self._error(length) for length in rivals}
        best = max(hopes, key=hopes.__getitem__, default=None)
        return best if best is not None and hopes[best] > math.log1p(self._settings.margin) else None

    def _watch(self) -> None:
        """Schedules trials of other lengths when the current one became much faster or slower.

        Not when no speculation became slower: if experts cost more, longer drafts, which use more of them, lose more.
        """
        if len(self._recent) < _LEVEL:
            return
        rate = self._acceptance.tokens()[self.current] / self._typical
        if self._usual is None:
            self._usual = rate
        elif not 1 / _SURPRISE < rate / self._usual < _SURPRISE:
            if self.current:
                self._check = _CHECKS[0]
            if self.current or rate > self._usual:
                self._interval = _FIRST
            self._usual = rate

    def _affords(self, length: int, steps: int = BLOCK, part: float = 1.0) -> bool:
        settings, gain = self._settings, self.gains()[length]
        expected = 0.0
        if self._costs.known:
            cost, odd = self._costs.estimates[length], self._costs.odd(length)
            if odd is not None and odd < cost:
                gain, cost = gain + cost - odd, odd
            expected = (steps + 1) * self._typical * math.exp(cost) * max(0.0, 1 - math.exp(gain))
        explored = self.explored + steps + 1 <= settings.share * self.steps + ALLOWANCE
        return explored and self._lost + expected <= part * settings.loss * self._seconds

    def _hopeless(self, length: int, cost: float) -> bool:
        """Whether a length would lose even with twice the estimated acceptance.

        Args:
            cost: seconds of a step of that length, relative to a step of the current one.
        """
        tokens = self._acceptance.tokens()
        return min(self._acceptance.most(length), 2 * tokens[length]) / tokens[self.current] < cost
