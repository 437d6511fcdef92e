"""How many drafts a step has, where that is planned before they are made: so that they cost no time. Pure, no clock.

The length with most tokens per second runs, by what steps of a length take (``length_costs``) and emit
(``acceptance``). Where that is none, a few steps with the fewest drafts that there can be are a *probe*: nothing else
shows that drafts have become likelier or cheaper. Probes are as rare as it takes for them to lose no more than
``_LOSS`` of the time. While there are drafts, steps without are a probe where the machine seems to have changed.

Costs are of each length by itself, where ``step_cost`` has so many seconds for each draft. If the first draft is free
and the second takes two steps, such a line finds that two cost too much, and never that one pays.

All of this may be wrong on a machine that is not as it is assumed to be: so steps with drafts, as they are chosen, and
without take turns now and then, and none are made while steps without are faster (``payback``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from vllm_spac.decisions.guard.acceptance import Acceptance
from vllm_spac.decisions.guard.length_costs import STEPS, LengthCosts
from vllm_spac.decisions.guard.payback import Payback, Verdict

REST = 256  # steps without drafts but for probes, after which the drafter is not kept ready between them
_PROBE = 1 + STEPS  # steps of a probe
_BLOCK = 4  # steps with drafts, or without, that take turns; and between decisions
_FIRST, _SOON = 4, 12  # probes at first, and steps between them
_LEAST, _MOST = 192, 4096  # steps between probes later on: at first, and after drafts that had seemed to pay
_LOSS = 0.005  # share of the time that they may lose
_BETTER = 0.01  # by which another length must be faster than the current one
_MARGIN = 0.05  # by which drafts must be faster than none before they are taken up


def halved(most: int) -> list[int]:
    """Returns 0, and ``most`` halved again and again down to 1; ascending."""
    return [0, *sorted({max(1, most >> power) for power in range(8)})]


class _Batch:
    """What is known of one batch size.

    Attributes:
        length: that runs, but for probes.
        off: steps since drafts last ran, but for probes.
        probing, probed: steps that are left of a probe, and its length.
    """

    def __init__(self, most: int) -> None:
        self.payback, self.costs = Payback(_BLOCK), LengthCosts(most)
        self.length = self.off = self.probing = self.probed = 0
        self.steps = self.probes = self.waited = 0  # so far; steps since the last probe
        self.least = _LEAST  # steps between probes

    def plan_probe(self, length: int) -> None:
        """The next steps have ``length`` drafts."""
        self.probing, self.probed, self.waited, self.probes = _PROBE, length, 0, self.probes + 1


class LengthChooser:
    """Chooses the draft length of each step. Deterministic: the same calls return the same lengths. Not thread-safe.

    Args:
        most: the greatest length, at least 1.
        lengths: that it may choose, besides 0; None: all.

    Attributes:
        ignored: steps that nothing was learned from.
        steps: by draft length.
        lengths: ascending, those that it may choose; ``restricted``: whether these were named.
    """

    def __init__(self, most: int, lengths: Iterable[int] | None = None) -> None:
        assert most >= 1
        self.most, self.ignored = most, 0
        self.steps = Counter[int]()
        self.lengths = list(range(most + 1))
        self.restricted = False
        if lengths is not None:
            self.limit(lengths)
        self._acceptance = Acceptance(most)
        self._batches = defaultdict[int, _Batch](lambda: _Batch(most))  # by batch size, one for each power of two
        self._now = self._ran = self._batches[0]  # of the next step, of the last one

    def limit(self, lengths: Iterable[int]) -> None:
        """Chooses 0 or one of ``lengths`` only; called before any step."""
        assert not self.steps.total(), "steps have run"
        self.lengths, self.restricted = sorted({0, *lengths}), True
        assert 0 < self.lengths[-1] <= self.most

    @property
    def rests(self) -> bool:
        """Whether the next step has no drafts, because these have not paid for long."""
        return self._now.off > REST and not self.choose()

    def choose(self, requests: int | None = None) -> int:
        """Draft tokens per request for the next step; ``requests``: its batch size, None for that of the last step."""
        if requests:
            self._now = self._of(requests)
        now = self._now
        if now.probing:
            return now.probed
        return 0 if now.length and now.payback.stopped else now.length

    def observe(self, drafts: int, emitted: Sequence[int], requests: int, seconds: float) -> Verdict | None:
        """A step has ended. Returns what was found when steps with drafts and without had taken turns for long enough.

        Args:
            drafts: the length that the step ran with, whatever was chosen since. Drafts that the drafter did not
                propose count as rejected.
            emitted: tokens of each request that decoded or verified: its accepted drafts plus one.
            requests: all of the step. One with prompts is ignored: it has more of them than entries in ``emitted``.
            seconds: of the forward and the drafting.
        """
        assert 0 <= drafts <= self.most, f"{drafts} drafts of at most {self.most}"
        if not emitted or requests != len(emitted) or not 0 < seconds < math.inf:
            self.ignored += 1
            return None
        self.steps[drafts] += 1
        self._acceptance.update(drafts, emitted)
        self._now = now = self._of(requests)
        if now is not self._ran:
            now.costs.begin()
        self._ran = now
        now.costs.add(drafts, seconds)
        verdict = None
        if now.length and not now.probing and (drafts == 0) == now.payback.stopped:  # else it was planned before that
            verdict = now.payback.end_step(sum(emitted), seconds)
        if verdict is not None and verdict.stop:
            now.length, now.payback, now.least = 0, Payback(_BLOCK), min(2 * now.least, _MOST)
        else:
            now.least = now.least if verdict is None else _LEAST
            self._plan(now)
        now.off = 0 if now.length and not now.payback.stopped else now.off + 1
        return verdict

    def facts(self) -> dict:
        """Statistics to report.

        Drafts per request of the next step, steps by length, speed relative to no drafts, tokens per request.
        """
        return {
            "draft_length": (length := self.choose()),
            "steps": dict(sorted(self.steps.items())),
            "ignored_steps": self.ignored,
            "speedup": (tokens := self._acceptance.tokens()[length]) / self._now.costs.seconds[length],
            "tokens_per_step": tokens,
        }

    def _plan(self, now: _Batch) -> None:
        """Decides what follows."""
        now.steps, now.waited = now.steps + 1, now.waited + 1
        if now.probing:
            now.probing -= 1
            if now.probing:
                return
        elif now.length and now.costs.doubtful and not now.payback.stopped:
            now.plan_probe(0)
            return
        elif now.costs.settled and now.steps % _BLOCK:  # it need not be decided at every step
            return
        tokens = self._acceptance.tokens()
        rates = {length: tokens[length] / now.costs.seconds[length] for length in self.lengths}
        best = max(rates, key=rates.__getitem__)
        if now.length:
            now.length = best if rates[best] > (1 + _BETTER) * rates[now.length] else now.length
            return
        if now.probes and rates[best] > 1 + _MARGIN:
            now.length = best
            return
        least = self.lengths[1]
        loses = _PROBE * max(0.0, now.costs.seconds[least] - tokens[least])  # steps without drafts
        soon = now.probes < _FIRST or now.costs.doubtful
        if now.waited >= (_SOON if soon else max(now.least, loses / _LOSS)):
            now.plan_probe(least)

    def _of(self, requests: int) -> _Batch:
        return self._batches[(requests - 1).bit_length()]
