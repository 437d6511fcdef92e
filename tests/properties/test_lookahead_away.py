"""Reads ahead by a predictor on a device: what it names comes with the routing, in the wait that a layer has anyway.

The host knows that a copy has arrived only when it waits for it, or for one behind it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_lookahead import BUSY, EXPERTS, POLICIES, STEPS, TOP, Kernel, Pool, draft, run
from torch import Tensor

from vllm_spac.cache.named import BudgetHint, PredictedExperts, named
from vllm_spac.core import RowKind
from vllm_spac.decisions.predictors.base import START, Guess
from vllm_spac.execution.exchange import Exchange


class Lane:
    """Copies at once, as for work that is launched behind; the host knows of the first ``known`` copies only."""

    def __init__(self) -> None:
        self.copies = self.known = self.waits = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)
        self.copies += 1

    def record(self) -> Point:
        return Point(self, self.copies)

    def finish(self) -> None:
        self.known = self.copies


class Point:
    def __init__(self, lane: Lane, copies: int) -> None:
        self._lane, self._copies = lane, copies

    def done(self) -> bool:
        return self._lane.known >= self._copies

    def wait(self) -> None:
        self._lane.waits += not self.done()
        self._lane.known = max(self._lane.known, self._copies)


class There(Kernel):
    """Takes experts and a map to slots."""

    takes_slots = False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of=None, rows: int = 0) -> Tensor:
        return super().__call__(x, weights, slot_of[ids.long()])


class Away(Pool):
    """Its routing has to be brought to the host."""

    def __init__(self, *given, **knobs) -> None:
        self.lane = Lane()
        super().__init__(*given, exchange=Exchange(torch.device("cpu"), self.lane), **knobs)
        self._kernel = There(self.tensors)


@contextlib.contextmanager
def away(*given, **knobs) -> Iterator[Away]:
    with contextlib.closing(Away(*given, **knobs)) as made:
        yield made


def test_prompts_and_dummy_forwards_ask_nothing() -> None:
    with away(16) as made:
        made.script.says = {START: [(1, (6, 7))], 0: [(1, (6, 7))]}
        made.begin(kind=RowKind.PREFILL)
        made.layer(0, (0, 1))
        made.end_forward()
        made.layer(0, (0, 1))
        assert made.script.asked == [] and made.store.order == []


def test_a_predictor_that_fails_there_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    with away(16) as made, caplog.at_level(logging.ERROR, "vllm.spac"):
        made.script.guesses = lambda seen: 1 / 0  # type: ignore[method-assign]
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
    [record] = caplog.records
    assert "nothing is read ahead from now on" in record.getMessage()


@given(STEPS, st.integers(TOP, 20), st.sampled_from(POLICIES))
@settings(max_examples=examples(60), **BUSY)
def test_a_layer_waits_as_often_as_without_a_predictor(steps: list, slots: int, policy: str) -> None:
    """Once, for its routing, and more often only if maps of many waves fill all buffers; rows see their experts."""
    lanes = []
    for stops in (False, True):
        with away(slots, policy, extra=0.0 if stops else 1.0) as made:
            for says, layers in steps:
                made.script.says = {} if stops else says
                rows = max(map(len, layers))
                made.begin(rows)
                for layer, chosen in enumerate(layers):
                    before = made.lane.waits
                    made.layer(layer, *(chosen[number % len(chosen)] for number in range(rows)))
                    fits = len({expert for row in chosen for expert in row}) <= slots
                    lanes.append((stops, fits, made.lane.waits - before))
                made.end_forward()
    plain = [waits for stops, _, waits in lanes if stops]
    assert [waits for stops, _, waits in lanes if not stops] == plain
    assert min(plain) >= 1 and all(waits == 1 for _, fits, waits in lanes if fits), "experts that fit need one wave"


@given(STEPS, st.integers(TOP, 20))
@settings(max_examples=examples(60), **BUSY)
def test_the_same_is_named_as_on_the_host(steps: list, slots: int) -> None:
    """By layers: there the names of the start are known one layer earlier."""
    reads = []
    for kind in (Pool, Away):
        with contextlib.closing(kind(slots)) as made:
            run(made, [({layer: each for layer, each in says.items() if layer != START}, ids) for says, ids in steps])
            reads.append((sorted(made.store.order), made.counters.prefetches, made.counters.prefetch_hits))
    assert reads[0] == reads[1]


# -- while drafts are made -----------------------------------------------------------------------------------------


def test_what_is_named_of_drafts_is_read_once_it_has_arrived() -> None:
    """The drafter is not waited for: what has arrived by its next forward, or by the step, is read."""
    with away(16) as made:
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        made.store.order.clear()
        waits = made.lane.waits
        draft(made, (5, 6), (6, 7))
        assert made.store.order == [], "on its way"
        made.lane.finish()
        draft(made, (5, 7), (6, 7))
        assert made.store.order == [5, 6, 14, 15], "of the first draft"
        made.lane.finish()
        made.script.says = {}
        made.begin()
        assert made.store.order == [5, 6, 14, 15, 7] and made.lane.waits == waits
        assert all(key in made.expected for key in (5, 7, 14, 15)), "until the first layer brings the step's own"
        made.layer(0, (5, 7))
        made.layer(1, (6, 7))
        assert made.counters.misses == 0 and made.counters.prefetch_hits == 4


def test_names_of_drafts_that_come_too_late_are_not_taken_for_those_of_the_step() -> None:
    with away(16) as made:
        made.step((0, 1), (0, 1), (0, 1), (0, 1))
        made.store.order.clear()
        draft(made, (5, 6), (6, 7))
        made.script.says = {START: [(1, (4, 5))]}
        made.step((0, 1), (4, 5), (0, 1), (0, 1))
        assert made.store.order == [12, 13]


# -- names ---------------------------------------------------------------------------------------------------------


@given(st.data())
def test_names_are_those_of_the_scores(data) -> None:
    """Distinct scores, so that there is one order; -inf names nothing."""
    rows, layers, top = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, EXPERTS))
    scores = torch.stack([torch.tensor(data.draw(st.permutations(range(EXPERTS)))) for _ in range(rows * layers)])
    scores = scores.float().masked_fill(scores < data.draw(st.integers(0, EXPERTS)), -torch.inf).view(rows, -1)
    guess, votes = (
        Guess(2 * EXPERTS, scores),
        data.draw(st.lists(st.sampled_from([0.25, 1.0]), min_size=rows, max_size=rows)),
    )
    hint = BudgetHint(
        data.draw(st.sampled_from([None, (1, 1, 3, 2, 4)])), data.draw(st.sampled_from([None, np.array(votes)]))
    )
    ours, theirs = list(PredictedExperts.of(guess, EXPERTS, top).by_layer(hint)), list(named(guess, EXPERTS, top, hint))
    assert [layer for layer, _ in ours] == [layer for layer, _ in theirs] == [2 + number for number in range(layers)]
    assert [experts.tolist() for _, experts in ours] == [experts.tolist() for _, experts in theirs]


@pytest.mark.parametrize(("logits", "bounds", "first"), [(True, (1,), 0), (False, (1,), 2), (True, None, 2)])
def test_under_a_budget_a_name_counts_as_much_as_its_weight(logits: bool, bounds: tuple | None, first: int) -> None:
    """One row is sure of expert 0, two are in doubt and name 2 before 3; without a budget places alone count."""
    scores = torch.zeros(3, EXPERTS)
    scores[0, 0], scores[1:, 2], scores[1:, 3] = 10.0, 0.2, 0.1
    guess, hint = Guess(0, scores, logits), BudgetHint(bounds)
    [(_, ours)] = PredictedExperts.of(guess, EXPERTS, TOP, hint).by_layer(hint)
    [(_, theirs)] = named(guess, EXPERTS, TOP, hint)
    assert ours[0] == theirs[0] == first and (bounds is None or len(ours) == len(theirs) == 1)


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(1, 2), st.integers(1, EXPERTS))
def test_weights_of_names_are_the_same_on_both_sides(seed: int, rows: int, layers: int, bound: int) -> None:
    scores = 3 * torch.randn(rows, layers * EXPERTS, generator=torch.Generator().manual_seed(seed))
    guess, hint = Guess(0, scores, logits=True), BudgetHint((bound,) * layers)
    ours = [experts.tolist() for _, experts in PredictedExperts.of(guess, EXPERTS, TOP, hint).by_layer(hint)]
    assert ours == [experts.tolist() for _, experts in named(guess, EXPERTS, TOP, hint)]


def test_weights_arrive_beside_the_names() -> None:
    """Of several guesses, each with what is its own."""
    with away(16) as made:
        made.script.says = {0: [(1, (6, 7)), (2, (5, 4))]}
        guesses = made.script.guesses
        made.script.guesses = lambda seen: (  # type: ignore[method-assign]
            Guess(each.first, each.scores.expand(2, -1), logits=each.first == EXPERTS) for each in guesses(seen)
        )
        made.begin(2, RowKind.VERIFY, (8, 1, 1, 8))
        made.layer(0, (0, 1), (1, 2))
        assert made.store.order == [EXPERTS + 6, 2 * EXPERTS + 5]
