"""Which drafts each step verifies, and which are made, so that they cost no time. Pure.

A draft that is accepted saves what a token costs, and adds to its step what an accepted one does: its experts would
have been loaded for a later step. One that is rejected only adds. So a draft that is accepted with probability q, with
all of its path, is worth verifying if q (token - accepted) > (1 - q) rejected. The costs are measured on the steps
served (``step_cost``), and so is q (``odds``): of drafts that were not verified, too, as far as the target went on to
say the same. Where the drafts of a step gain less than it takes to make them, none are made, but for one step in
``_PROBE``. All of this may be wrong on a machine that is not as it is assumed to be: so steps with drafts, as they are
chosen, and without take turns now and then, and none are made while steps without are faster (``payback``).

This is for runners that learn of the drafts before a step is planned. V2's scheduler does not: there ``lengths`` plans
how many drafts are made, and ``device_chooser`` which of them are worth their experts.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_spac.decisions.guard.lookups import Lookups
from vllm_spac.decisions.guard.odds import UNKNOWN, Odds
from vllm_spac.decisions.guard.payback import Payback, Verdict
from vllm_spac.decisions.guard.step_cost import StepCost

_PROBE = 64  # steps, while no drafts are made
_LOOK = 8  # steps, while it is not known what drafts cost
_FREE = 0.003  # of a step: drafts may lose this much, from which it is learned when they pay again
_OUTLIER = 3  # times as long as a forward takes: one that takes longer is taken for disturbed
_GAINS = 0.95, 0.7  # weight of what drafts gained before a step, of all steps and of the probes


class Drafted(NamedTuple):
    """The drafts of one request, in the order in which they would be verified; a parent comes before its children.

    Attributes:
        chances: the drafter's probability of each given its parent, [n]; ``UNKNOWN`` where it has none.
        parents: what each follows, [n]: 0 the request's last token, i the i-th draft. None: a chain.
    """

    tokens: Sequence[int]  # [n]
    chances: Sequence[float]
    parents: Sequence[int] | None = None

    @classmethod
    def unknown(cls, tokens: Sequence[int]) -> Drafted:
        """A chain of a drafter without probabilities."""
        return cls(tokens, [UNKNOWN] * len(tokens))

    def parent(self, draft: int) -> int:
        """What the draft number ``draft``, from 0, follows."""
        return draft if self.parents is None else self.parents[draft]


class _Stakes(NamedTuple):
    """Seconds, for one request alone, that verifying a draft saves if it is accepted, and wastes if it is not."""

    saves: float
    wastes: float

    def worth(self, reached: float) -> float:
        """Seconds that verifying a draft saves which is accepted with this probability."""
        return reached * self.saves - (1 - reached) * self.wastes


def observe_answer(odds: Odds, request: str, drafts: Drafted, emitted: Sequence[int]) -> None:
    """Teaches ``odds`` what became of a request's drafts: the target has ``emitted`` these tokens in their place."""
    if not emitted:
        return
    depths = {0: 0}  # of those that it has emitted
    for number, (token, chance) in enumerate(zip(drafts.tokens, drafts.chances, strict=True)):
        depth = depths.get(drafts.parent(number), len(emitted))
        if depth < len(emitted):
            accepted = token == emitted[depth]
            odds.add(request, depth, chance, accepted)
            if accepted:
                depths[number + 1] = depth + 1
    odds.add_first(request, len(depths) > 1)


class Chooser:
    """Chooses the drafts of each step, and learns from what became of them.

    Args:
        most: drafts of a request that a step can have.
        lookups: decides between n-grams and the drafter; None: no n-grams are looked up beside it.

    Attributes:
        ignored: steps that nothing was learned from.
    """

    def __init__(self, most: int, lookups: Lookups | None = None) -> None:
        self.most, self.lookups = most, lookups
        self.ignored = 0
        self._payback = Payback()
        self._odds = Odds()
        self._costs = defaultdict[int, StepCost](StepCost)  # by batch size, one for each power of two
        self._now = StepCost()  # of the last batch size
        self._drafted: dict[str, Drafted] = {}  # those that the target has not answered yet
        self._making = 0.0  # seconds that a further forward takes the drafter
        self._gain = 0.0  # seconds that the drafts of a step gain, less what it takes to make them
        self._worths: list[float] = []  # of the drafts of each request that is being drafted for
        self._length = 0
        self._idle = 0  # steps since drafts were made, while they are not
        self._steps = Counter[int]()  # by drafts that a request had at most
        self._made = self._kept = 0

    # -- what is known ---------------------------------------------------------------------------------------

    def observe_tokens(self, request: str, emitted: Sequence[int]) -> None:
        """The target has said these tokens where the request's last drafts were drafted, whatever was verified."""
        drafts = self._drafted.pop(request, None)
        if drafts is not None:
            observe_answer(self._odds, request, drafts, emitted)
        if self.lookups is None:
            return
        chain = () if drafts is None or drafts.parents is not None else drafts.tokens
        if found := self.lookups.observe_tokens(request, emitted, chain):
            observe_answer(self.lookups.odds, request, Drafted.unknown(found), emitted)

    def end_step(
        self, drafts: Sequence[int], tokens: Sequence[int], requests: int, seconds: float, drafting: float, misses: int
    ) -> Verdict | None:
        """A step has ended. Returns what was found when steps with drafts and without had taken turns for long enough.

        Args:
            drafts, tokens: verified drafts of each request that had left its prompt, and tokens that it emitted.
            requests: all of the step. One with prompts is ignored: it has more of them.
            seconds, drafting: of it, and of the drafter in it.
            misses: experts that were not in fast memory, of all layers.
        """
        if not tokens or requests != len(tokens) or not drafting < seconds < math.inf:
            self.ignored += 1
            return None
        self._steps[max(drafts)] += 1
        mean = sum(drafts) / requests
        accepted = min(mean, sum(tokens) / requests - 1)
        self._of(requests).add(accepted, mean - accepted, seconds - drafting, misses)
        return None if self._idle else self._payback.end_step(sum(tokens), seconds)

    def observe_drafter(self, forwards: int, seconds: float) -> None:
        """The drafter took ``seconds`` for so many forwards, one after another; ``keep`` was told of the drafts."""
        each, known = seconds / forwards, self._making
        if not known or known >= _OUTLIER * each:  # the first, or those before it were disturbed
            self._making, self._gain = each, 0.0
        else:
            each = min(each, _OUTLIER * known)
            self._making = 0.9 * known + 0.1 * each
        gain = sum(self._worths) / max(1, len(self._worths)) - forwards * each
        memory = _GAINS[self._idle > 0]
        self._gain = memory * self._gain + (1 - memory) * gain

    def remove(self, requests: Iterable[str]) -> None:
        """These requests have finished."""
        for request in requests:
            self._drafted.pop(request, None)
            self._odds.remove(request)
            if self.lookups is not None:
                self.lookups.remove(request)

    def facts(self) -> dict:
        """Statistics to report.

        Drafts that a request of the next step may have at most; steps by drafts of a request; drafts that were made,
        and those of them that were worth verifying; how often n-grams were a request's drafts; of the last steps
        tokens per second, over those without drafts, and tokens per request.
        """
        now = self._now
        return {
            "draft_length": self._length,
            "steps": dict(sorted(self._steps.items())),
            "ignored_steps": self.ignored,
            "drafted": self._made,
            "verified": self._kept,
            "looked_up": 0 if self.lookups is None else self.lookups.taken,
            "speedup": now.plain / now.token if now.known else 1.0,
            "tokens_per_step": now.tokens if now.known else 1.0,
        }

    # -- what follows ----------------------------------------------------------------------------------------

    def allows(self, requests: int | None = None) -> int:
        """Returns how many drafts of each request may be made for the next step; ``requests``: its batch size."""
        if requests:
            self._of(requests)
        least = -_FREE * self._now.plain if self._now.known else 0.0
        self._idle = 0 if self._gain >= least else self._idle + 1
        none = self._idle % _PROBE if self._idle else self._payback.stopped
        self._length = 0 if none else self.most
        self._worths.clear()
        return self._length

    def keep(self, request: str, drafts: Drafted, looked: bool = False) -> int:
        """Returns how many of a request's drafts are to be verified, and waits for the answer to all of them.

        ``looked``: they are n-grams, whose answer ``lookups`` waits for.

        The most worth, of the first n for some n: what comes later may make up for one that is not worth it. Only half
        of them now and then, while all steps have as many and nothing tells what a draft costs.
        """
        if not looked:
            self._drafted[request] = drafts
        odds = self.lookups.odds if looked and self.lookups is not None else self._odds
        stakes, worth, best = self._stakes, 0.0, 0.0
        count, reached, depths = 0, [1.0], [0]
        for number, chance in enumerate(drafts.chances):
            parent = drafts.parent(number)
            depth = depths[parent]
            reached.append(reached[parent] * odds.chance(request, depth, chance))
            depths.append(depth + 1)
            worth += stakes.worth(reached[-1])
            if worth >= best:
                best, count = worth, number + 1
        self._worths.append(best)
        if self._probes:
            count //= 2
        self._made, self._kept = self._made + len(drafts.tokens), self._kept + count
        return count

    def goes_on(self, paths: Iterable[tuple[str, Sequence[float]]]) -> bool:
        """Whether one more forward of the drafter, a draft behind each path, is likely to be worth its time.

        The drafter is assumed to be as sure of each as of the one before it.

        Args:
            paths: request, and the drafter's probability of each draft on a path of its own, of one at least. Of a
                tree a request has several.
        """
        if not self._now.known:
            return True
        stakes, gain, requests = self._stakes, 0.0, set[str]()
        for request, chances in paths:
            reached = 1.0
            for depth, chance in enumerate([*chances, chances[-1]]):
                reached *= self._odds.chance(request, depth, chance)
            requests.add(request)
            gain += max(0.0, stakes.worth(reached))
        return gain >= len(requests) * self._making

    @property
    def _probes(self) -> bool:
        """Whether this step is one that has fewer drafts than are worth it, so that their cost becomes known."""
        return self._steps.total() % _LOOK == 0 and self._now.known and self._now.unsure

    def _of(self, requests: int) -> StepCost:
        self._now = self._costs[(requests - 1).bit_length()]
        return self._now

    @property
    def _stakes(self) -> _Stakes:
        """Of the next step's drafts."""
        now = self._now
        return _Stakes(now.token - now.accepted, now.rejected) if now.known else _Stakes(1.0, 0.0)
