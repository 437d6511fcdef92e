"""How many draft tokens a step may use, so that speculating is never slower than not speculating.

One length d is the current one. Now and then another one runs for a few steps, a *look*, and its seconds are compared
with those of the current steps right before and after it, and with nothing else: a machine whose disk or clock drifts
slows all lengths alike, and what was measured a minute ago says nothing of now. For each size of batch the last ratios
are kept; with the decayed probability that a draft is accepted at each position they say what every d would gain.

No speculation is the safe answer. It is left for a gain of more than ``margin`` that is also surer than chance, and
returned to as soon as it seems ahead; while there is speculation, it is looked at again and again.

Two things are not left to that schedule. While there is speculation, a Page test adds up how much longer steps take
than their tokens are worth; where the sum runs away, no speculation is looked at next, and judged by the steps since
the change. While there is none, a *probe* of one draft runs every ``_PROBE`` steps, as far as ``loss`` allows: nothing
else shows that drafts would be accepted or have become cheap. A length that looks cheaper than ever is looked at again
at once.

Looks at drafts are at most ``share`` of a size of batch's steps beyond its first ``ALLOWANCE``; what they lost, by
their own seconds and tokens, is at most ``loss`` of its seconds before there is another one, the first looks apart.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from vllm_spac.speculation.acceptance import Acceptance
from vllm_spac.speculation.trials import BLOCK, Look, LookCosts

ALLOWANCE = 48  # steps that may try lengths before ``share`` counts
_SURE = 1.5  # standard errors
_LEVEL = 32  # steps by which the speed of the current length is known
_SURPRISE = 1.2  # the ratio by which it must change for others to be looked at soon
_FIRST, _LONGEST = 32, 2048  # steps between looks when nothing seems better
_CHECKS = 16, 128, 512  # steps between looks at no speculation: at first, at most, at most while it is far behind
_FAR = 0.2  # of the logarithm of its speed
_PROBE = 96  # steps between probes
_PROBE_STEPS = 1  # that count, beside the first
_ROUTINE, _PROBING = 0.3, 0.85  # of ``loss`` that looks without a reason, and those and probes, may use
_SLACK, _ALARM = 0.3, 5.0  # of the Page test, in steps: what a step may lose unnoticed, the sum that is no chance
_SLOWEST = 3.0  # times the typical seconds that a step counts in it
_PRIOR = 1  # steps as expected beside those since the change


class Guard:
    """Decides the draft length of each step. Deterministic: the same calls give the same answers. Not thread-safe.

    Args:
        max_drafts: the greatest length (K), at least 1.
        share: of steps that may go into trying other lengths.
        loss: of seconds that may be lost by it.
        margin: a length replaces a shorter or longer one only if it gives so much more tokens a second.
        memory: verified steps after which an accepted draft counts 1/e; a position not reached as long is stale.
        clock: seconds that never go back; asked only where ``observe`` is not given any.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        share: float = 0.03,
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
        behind = batch.gains()[0]
        return {
            "draft_length": batch.length,
            "steps": {length: count for length, count in enumerate(self.steps) if count},
            "ignored_steps": self.ignored,
            "explored_steps": sum(item.explored for item in self._batches.values()),
            "switches": sum(item.switches for item in self._batches.values()),
            "speedup": None if behind is None else math.exp(-behind),
            "tokens_per_step": self.acceptance.tokens()[batch.current],
        }

    def _batch_of(self, requests: int) -> _Batch:
        """Sizes from one power of two to the next share their estimates."""
        size = (requests - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = _Batch(self)
        return self._batches[size]


class _Batch:
    """What is known and decided for one size of batch."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._costs = LookCosts(guard.max_drafts + 1)
        self._ladder = [0, *sorted({max(1, guard.max_drafts >> power) for power in range(8)})]
        self._first = [guard.max_drafts >> 1, guard.max_drafts] if guard.max_drafts > 1 else [1]
        self._look: Look | None = None
        self._recent: deque[float] = deque(maxlen=_LEVEL)  # seconds of the current length's last steps
        self._seen = dict.fromkeys(self._ladder, -1)  # step of the last look
        self._interval, self._check = _FIRST, _CHECKS[0]
        self._usual: float | None = None
        self._excess, self._rise = 0.0, deque[tuple[float, float]](maxlen=4 * BLOCK)  # the Page test's sum, its steps
        self._probed = 0  # step of the last look at drafts
        self._again: int | None = None  # a length whose last look was odd
        self._typical = math.inf  # seconds of a current step
        self._seconds = self._lost = 0.0
        self.current = self.steps = self.explored = self.switches = 0

    @property
    def length(self) -> int:
        return self._look.length if self._look and not self._look.over else self.current

    def gains(self) -> list[float | None]:
        """Logarithm of tokens a second with d drafts over those now, [K + 1]; None before the first look."""
        tokens, costs = self._guard.acceptance.tokens(), self._costs.estimates
        if costs is None:
            return [0.0 if length == self.current else None for length in range(len(tokens))]
        now = tokens[self.current]
        return [math.log(t / now) - cost for t, cost in zip(tokens, costs, strict=True)]

    def observe(self, drafts: int, seconds: float, tokens: float, settled: bool) -> None:
        """``tokens``: of a request. ``settled``: the step before was of the same kind; only then its seconds are those
        of the length."""
        self.steps += 1
        counted = min(seconds, 4 * self._typical)  # a step that the machine disturbed is no length's
        self._seconds += counted
        look = self._look
        if drafts == self.current and settled:
            self._recent.append(seconds)
            if look is not None:
                look.after.append(seconds)
            elif self.current and self._alarmed(seconds, tokens):
                self._start(0, urgent=True)
                return
        if look is None:
            if self._first or self.steps % BLOCK == 0:  # what is decided between looks can wait so long
                self._think()
            return
        look.patience -= 1
        if not look.over and drafts == look.length:
            self._take(look, seconds, counted, tokens, settled)
        if look.over and (look.urgent or len(look.after) == BLOCK or look.patience <= 0):
            self._judge(look)
        elif not look.over and look.patience <= 0:
            self._close(look)

    def _take(self, look: Look, seconds: float, counted: float, tokens: float, settled: bool) -> None:
        """A step of a look."""
        self.explored += look.length > 0
        look.done += 1
        look.seconds += counted
        look.tokens += tokens
        look.fastest = min(look.fastest, seconds)
        if settled:
            look.during.append(seconds)
        hopeless = look.done > 1 and self._hopeless(look.length, look.fastest / look.around)
        if len(look.during) == look.steps or hopeless:
            self._close(look)

    def _close(self, look: Look) -> None:
        look.over, look.patience = True, 4 * BLOCK
        look.after.clear()

    def _judge(self, look: Look) -> None:
        """A look and the steps after it are over: learn from it, and decide."""
        self._look = None
        self._seen[look.length] = self.steps
        if look.done == 0:  # the drafter proposed nothing else
            self._first.clear()
            self._interval = min(2 * self._interval, _LONGEST)
            return
        if look.urgent and self._fled(look):
            return
        changed = self._costs.add(look.length, look.ratio)
        odd = self._costs.odd(look.length)
        self._again = look.length if odd is not None and odd < self._costs.estimates[look.length] else None
        if not look.first and look.length:
            tokens = self._guard.acceptance.tokens()[self.current]
            self._lost = max(0.0, self._lost + look.seconds - look.tokens * look.around / tokens)
        if look.first and all(
            self._hopeless(length, math.exp(self._costs.estimates[length]))
            for length in self._ladder
            if length != self.current
        ):
            self._first.clear()
        if self._switched():
            return
        if changed:
            self._interval, self._check = _FIRST, _CHECKS[0]
        elif look.steps < BLOCK:
            return
        elif look.length == 0:
            self._check = min(2 * self._check, _CHECKS[1 + (self.gains()[0] < -_FAR)])
        elif self._promising() is None:
            self._interval = min(2 * self._interval, _LONGEST)

    def _think(self) -> None:
        """Between looks."""
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
        length = self._promising()
        if length is not None and self._affords(length):
            self._start(length)
            return
        length = max(since, key=since.get, default=0)
        if min(since.values(), default=0) >= self._interval and self._affords(length, part=_ROUTINE):
            self._start(length)
        elif self.current == 0 and self.steps - self._probed >= _PROBE and self._affords(1, _PROBE_STEPS, _PROBING):
            self._start(1, steps=_PROBE_STEPS)

    def _start(self, length: int, *, first: bool = False, steps: int = BLOCK, urgent: bool = False) -> None:
        before = list(self._recent)[-BLOCK:]
        if urgent:  # after a change all steps are slow: a fast one among them says that it was the machine
            before = sorted(seconds for seconds, _ in self._rise)[(len(self._rise) - 1) // 4 :][:1]
        self._look = Look(length, first, before, steps, urgent)
        self._again = None
        if length:
            self._probed = self.steps
        if not urgent:
            self._calm()

    def _alarmed(self, seconds: float, tokens: float) -> bool:
        """Page's test: whether steps of the current length have begun to take longer than their tokens are worth."""
        if len(self._recent) < _LEVEL // 2 or self._typical == math.inf:
            return False
        worth = tokens / self._guard.acceptance.tokens()[self.current]
        self._excess += min(seconds / self._typical, _SLOWEST) - worth - _SLACK
        if self._excess <= 0:
            self._calm()
            return False
        self._rise.append((seconds, tokens))
        return self._excess > _ALARM

    def _calm(self) -> None:
        self._excess = 0.0
        self._rise.clear()

    def _fled(self, look: Look) -> bool:
        """Whether no speculation, looked at in alarm, beats the steps since the change: it is current from now on."""
        expected = self._guard.acceptance.tokens()[self.current]
        tokens = (_PRIOR * expected + sum(emitted for _, emitted in self._rise)) / (_PRIOR + len(self._rise))
        self._calm()
        if -math.log(tokens) - look.ratio <= 0:
            self._excess = _ALARM / 2  # steps before the change may have been among them: soon asked again if it is one
            return False
        self._costs.forget()
        self._costs.add(0, look.ratio)
        self._guard.acceptance.fade(_PRIOR)
        self._seconds = self._lost = 0.0  # what was saved up for looks is of another machine
        self._move(0)
        return True

    def _switched(self) -> bool:
        """Let the best length be the current one, if another is surely better, or no speculation seems to be."""
        gains = self.gains()
        better = [
            length for length in self._others() if self._costs.times(length) and gains[length] > self._least(length)
        ]
        if not better:
            return False
        self._move(max(better, key=lambda length: gains[length]))
        return True

    def _move(self, best: int) -> None:
        """Let ``best``, which was looked at, be the current length."""
        if self.current == 0:
            self._costs.forget(above=best)  # they were looked at when not even this one paid
            self._guard.acceptance.fade(0, best)
        self._costs.move(best)
        self._calm()
        self._again = None
        self._recent.clear()
        self._typical = math.inf
        self.current, self._interval, self._check, self._usual = best, _FIRST, _CHECKS[0], None
        self._seen[0] = self._probed = self.steps
        self.switches += 1

    def _others(self) -> Iterable[int]:
        return (length for length in range(self._guard.max_drafts + 1) if length != self.current)

    def _least(self, length: int) -> float:
        """The gain that a length must show to become the current one."""
        if length == 0:
            return 0.0
        if self._costs.times(length) < 2:
            return math.inf
        return max(math.log1p(self._guard.margin), _SURE * self._error(length))

    def _error(self, length: int) -> float:
        return math.hypot(self._costs.error(length), self._guard.acceptance.error(length))

    def _promising(self) -> int | None:
        """The length that may well be better and is not known surely enough, if there is one."""
        gains = self.gains()
        if None in gains:
            return None
        fastest = max(self._others(), key=lambda length: gains[length])
        rivals = {*self._ladder, fastest} - {0, self.current}
        hopes = {length: gains[length] + self._error(length) for length in rivals}
        best = max(hopes, key=hopes.get, default=None)
        return best if best is not None and hopes[best] > math.log1p(self._guard.margin) else None

    def _watch(self) -> None:
        """Look around soon when the current length became much faster or slower.

        No speculation that became slower is no reason: what an expert costs, all others pay more often.
        """
        if len(self._recent) < _LEVEL:
            return
        rate = self._guard.acceptance.tokens()[self.current] / self._typical
        if self._usual is None:
            self._usual = rate
        elif not 1 / _SURPRISE < rate / self._usual < _SURPRISE:
            if self.current:
                self._check = _CHECKS[0]
            if self.current or rate > self._usual:
                self._interval = _FIRST
            self._usual = rate

    def _affords(self, length: int, steps: int = BLOCK, part: float = 1.0) -> bool:
        guard, gain = self._guard, self.gains()[length]
        expected = 0.0
        if gain is not None:
            cost, odd = self._costs.estimates[length], self._costs.odd(length)
            if odd is not None and odd < cost:
                gain, cost = gain + cost - odd, odd
            expected = (steps + 1) * self._typical * math.exp(cost) * max(0.0, 1 - math.exp(gain))
        explored = self.explored + steps + 1 <= guard.share * self.steps + ALLOWANCE
        return explored and self._lost + expected <= part * guard.loss * self._seconds

    def _hopeless(self, length: int, cost: float) -> bool:
        """Whether a length whose step takes as long as ``cost`` current ones would lose even if twice as many drafts
        were accepted as it seems."""
        tokens = self._guard.acceptance.tokens()
        return min(length + 1, 2 * tokens[length]) / tokens[self.current] < cost
