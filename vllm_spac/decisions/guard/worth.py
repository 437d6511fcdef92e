"""Which drafts are worth verifying, and which are worth making, in each step. Pure.

A draft that is accepted saves what a token costs, and adds to its step what an accepted one does: its experts would
have been loaded for a later step. One that is rejected only adds. So a draft that is accepted with probability q, with
all of its path, is worth verifying if q (token - accepted) > (1 - q) rejected. The costs are measured on the steps
served, and so is q: of drafts that were not verified, too, as far as the target went on to say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vllm_spac.decisions.guard.odds import UNKNOWN, Odds
from vllm_spac.decisions.guard.step_time import StepTime

_LOOK = 8  # steps


class Drafted(NamedTuple):
    """The drafts of one request, in the order in which they would be verified; a parent comes before its children.

    Attributes:
        tokens: [n].
        chances: the drafter's probability of each given its parent, [n]; ``UNKNOWN`` where it has none.
        parents: what each follows, [n]: 0 the request's last token, i the i-th draft. None: a chain.
    """

    tokens: Sequence[int]
    chances: Sequence[float]
    parents: Sequence[int] | None = None

    @classmethod
    def unknown(cls, tokens: Sequence[int]) -> Drafted:
        """A chain of a drafter without probabilities."""
        return cls(tokens, [UNKNOWN] * len(tokens))

    def parent(self, draft: int) -> int:
        """What the draft number ``draft``, from 0, follows."""
        return draft if self.parents is None else self.parents[draft]


class Worth:
    """Chooses among the drafts of each step, and learns from what became of them."""

    def __init__(self) -> None:
        self._odds = Odds()
        self._times: dict[int, StepTime] = {}  # by batch size, one for each power of two
        self._now = StepTime()  # of the last batch size
        self._drafted: dict[str, Drafted] = {}  # those that the target has not answered yet
        self._steps = 0
        self._making = 0.0  # seconds that a further draft takes the drafter
        self.made = self.kept = 0

    # -- what is known ---------------------------------------------------------------------------------------

    def answered(self, request: str, said: Sequence[int]) -> None:
        """The target has said these tokens where the request's last drafts were drafted, whatever was verified."""
        drafts = self._drafted.pop(request, None)
        if drafts is None or not said:
            return
        depths = {0: 0}  # of those that it has said
        for number, (token, chance) in enumerate(zip(drafts.tokens, drafts.chances, strict=True)):
            depth = depths.get(drafts.parent(number), len(said))
            if depth < len(said):
                accepted = token == said[depth]
                self._odds.add(request, depth, chance, accepted)
                if accepted:
                    depths[number + 1] = depth + 1
        self._odds.fared(request, len(depths) > 1)

    def took(self, accepted: float, rejected: float, requests: int, seconds: float) -> None:
        """A step without prompts took ``seconds``, the drafter's not included; drafts per request, in the mean."""
        size = (requests - 1).bit_length()
        self._now = self._times.setdefault(size, StepTime())
        self._now.add(accepted, rejected, seconds)
        self._steps += 1

    def making(self, drafts: int, seconds: float) -> None:
        """The drafter took ``seconds`` for ``drafts`` of each request, one after another."""
        each = seconds / drafts
        self._making = each if not self._making else 0.9 * self._making + 0.1 * min(each, 3 * self._making)

    def forget(self, requests: Iterable[str]) -> None:
        """These requests have finished."""
        for request in requests:
            self._drafted.pop(request, None)
            self._odds.forget(request)

    def facts(self) -> dict:
        """Statistics to report: drafts that were made, and those of them that were to be verified."""
        return {"drafted": self.made, "verified": self.kept}

    # -- what follows ----------------------------------------------------------------------------------------

    def keep(self, request: str, drafts: Drafted) -> int:
        """Returns how many of a request's drafts are to be verified, and waits for the answer to all of them.

        The most worth, of the first n for some n: what comes later may make up for one that is not worth it. Only half
        of them now and then, where otherwise nothing would tell what rejected ones cost.
        """
        self._drafted[request] = drafts
        worth = best = 0.0
        count, reached, depths = 0, [1.0], [0]
        for number, chance in enumerate(drafts.chances):
            parent = drafts.parent(number)
            depth = depths[parent]
            reached.append(reached[parent] * self._odds.chance(request, depth, chance))
            depths.append(depth + 1)
            worth += self._worth(reached[-1])
            if worth >= best:
                best, count = worth, number + 1
        if self._now.known and self._now.unsure and self._steps % _LOOK == 0:
            count //= 2
        self.made, self.kept = self.made + len(drafts.tokens), self.kept + count
        return count

    def goes_on(self, paths: Iterable[tuple[str, Sequence[float]]]) -> bool:
        """Whether one more draft of each request is likely to be worth what it takes to make it.

        The drafter is assumed to be as sure of it as of the last one.

        Args:
            paths: request, and the drafter's probability of each draft that it has so far, of one at least.
        """
        gain = requests = 0.0
        for request, chances in paths:
            reached = 1.0
            for depth, chance in enumerate([*chances, chances[-1]]):
                reached *= self._odds.chance(request, depth, chance)
            requests += 1
            gain += max(0.0, self._worth(reached))
        return not self._now.known or gain >= requests * self._making

    def _worth(self, reached: float) -> float:
        """Seconds that verifying a draft saves which is accepted with this probability."""
        now = self._now
        if not now.known:
            return reached
        return reached * (now.token - now.accepted) - (1 - reached) * now.rejected
