"""The host's part of choosing drafts on the device: what drafts cost and gain, as of the steps before.

V2 keeps drafts on the device, and plans how many a step has before they exist. So the host sends numbers ahead of each
step, by which the device cuts drafts that are not worth their experts (``cut_rule``), and hears what became of all of
them when the step has ended. Where these numbers cut nothing, the step is as it would be without. What a draft costs
is fitted for each planned length by itself (``step_cost``): a cut draft still has its row in attention, and was made.
So only what cutting spares, experts and their loads, is in what a rejected draft adds.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vllm_spac.decisions.guard.chooser import Drafted, observe_answer
from vllm_spac.decisions.guard.cut_rule import pack
from vllm_spac.decisions.guard.odds import Odds
from vllm_spac.decisions.guard.step_cost import StepCost

TAUGHT = 8  # requests of a step, at most about, whose drafts are learned from: others have their turn in the next ones
LOOK = 8  # steps, while it is not known what drafts cost: in one of them half are cut


class StepDrafts(NamedTuple):
    """What a step verified, once the host has heard of it."""

    drafts: Mapping[str, Drafted]  # of each request that had any, also those that were cut
    kept: Mapping[str, int]  # of them, those that were not cut
    misses: int  # experts of the step that were not in fast memory, of all layers


class DeviceChooser:
    """Fits the numbers by which the device cuts drafts. Deterministic, no clock.

    Args:
        depth: drafts on the longest path.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._odds = Odds()
        # by batch size, one for each power of two, and most drafts
        self._costs = defaultdict[tuple[int, int], StepCost](StepCost)
        self._steps = self._turn = 0
        self._finished: set[str] = set()
        self._counts = Counter[str]()

    def numbers(self, requests: Sequence[str], drafts: Sequence[int]) -> np.ndarray | None:
        """Returns what decides which drafts of a step are cut, as of ``cut_rule.pack``; None: none of them is.

        Every ``LOOK``-th step may keep half of them only, while it is hardly known what a rejected one adds.

        Args:
            requests: all of the step, in the order of its rows.
            drafts: that each of them has.
        """
        cost, most = self._of(requests, drafts), np.array(drafts, dtype=np.float64)
        if not cost.known:
            return None
        if looks := self._steps % LOOK == 0 and cost.unsure:
            most = most // 2
        gain, loss = cost.token - cost.accepted, cost.rejected
        if gain >= 0 >= loss and not looks:
            return None
        return pack(self._odds.terms(requests, self._depth), gain, loss, most)

    def cutting_none(self, requests: Sequence[str], drafts: Sequence[int]) -> np.ndarray:
        """As ``numbers``, before anything is known: every draft is kept."""
        return pack(self._odds.terms(requests, self._depth), 0.0, 0.0, np.array(drafts, dtype=np.float64))

    def end_step(self, step: StepDrafts, emitted: Mapping[str, Sequence[int]], requests: int, seconds: float) -> None:
        """A step with drafts has ended.

        Args:
            emitted: the tokens that each request that had left its prompt emitted.
            requests: all of the step. Nothing is learned of the costs of one with prompts.
            seconds: of it, and of the drafter in it; 0 if they tell nothing of the costs.
        """
        drafted = {request: len(drafts.tokens) for request, drafts in step.drafts.items()}
        self._counts["drafts"] += sum(drafted.values())
        self._counts["cut_drafts"] += sum(drafted.values()) - sum(step.kept.values())
        every = max(1, -(-len(step.drafts) // TAUGHT))
        self._turn += 1
        for request, drafts in list(step.drafts.items())[self._turn % every :: every]:
            observe_answer(self._odds, request, drafts, emitted.get(request, ()))
        if requests != len(emitted) or not all(emitted.values()) or not seconds > 0:
            return
        self._steps += 1
        accepted = sum(map(len, emitted.values())) / requests - 1
        rejected = sum(step.kept.values()) / requests - accepted
        cost = self._of(list(emitted), [drafted.get(request, 0) for request in emitted])
        cost.add(accepted, max(0.0, rejected), seconds, step.misses)

    def remove(self, requests: Iterable[str]) -> None:
        """These requests have finished; called before each step, also where none has.

        With async scheduling a step has been launched with a request before its end is known, and that step ends after
        this call. So a request is forgotten here and once more before the next step.
        """
        finished = set(requests)
        for request in self._finished | finished:
            self._odds.remove(request)
        self._finished = finished

    def facts(self) -> dict:
        """Statistics: drafts that steps had, those of them that were cut, and how many requests are remembered."""
        counts = {name: self._counts[name] for name in ("drafts", "cut_drafts")}
        return counts | {"remembered": self._odds.requests}

    def _of(self, requests: Sequence[str], drafts: Sequence[int]) -> StepCost:
        return self._costs[(len(requests) - 1).bit_length(), max(drafts)]
