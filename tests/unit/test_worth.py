"""Which drafts are verified and made: against all choices, on simulated drafters, and in V1's loop over forwards."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.decisions.guard.odds import UNKNOWN, Odds
from vllm_spac.decisions.guard.step_time import StepTime
from vllm_spac.decisions.guard.worth import Drafted, Worth
from vllm_spac.integration.stepping import runner_v1

chance = st.floats(0.02, 0.98)
cost = st.floats(0.0, 2.0)


def told(accepted: float, rejected: float, making: float = 0.0) -> Worth:
    """A ``Worth`` that has been told what drafts cost, in tokens, and that drafters' probabilities are true."""
    worth = Worth()
    worth._now = SimpleNamespace(known=True, unsure=False, token=1.0, accepted=accepted, rejected=rejected)
    worth._making = making
    return worth


def saved(worth: Worth, drafts: Drafted, count: int) -> float:
    """Seconds that verifying the first ``count`` saves: over all that may become of them."""
    chances, total = [worth._odds.chance("a", _depth(drafts, n), drafts.chances[n]) for n in range(count)], 0.0
    for fate in itertools.product((True, False), repeat=count):
        probability, reached, saving = 1.0, [True], 0.0
        for number, good in enumerate(fate):
            probability *= chances[number] if good else 1 - chances[number]
            reached.append(reached[drafts.parent(number)] and good)
            saving += 1.0 - worth._now.accepted if reached[-1] else -worth._now.rejected
        total += probability * saving
    return total


def _depth(drafts: Drafted, number: int) -> int:
    depth = 0
    while (parent := drafts.parent(number)) > 0:
        number, depth = parent - 1, depth + 1
    return depth


@st.composite
def drafted(draw) -> Drafted:
    """A chain or a tree of up to five drafts."""
    chances = draw(st.lists(chance, min_size=1, max_size=5))
    parents = None
    if draw(st.booleans()):
        parents = [draw(st.integers(0, number)) for number in range(len(chances))]
    return Drafted(range(len(chances)), chances, parents)


@given(drafts=drafted(), accepted=st.floats(0.0, 0.9), rejected=cost)
def test_no_other_number_of_drafts_saves_more(drafts: Drafted, accepted: float, rejected: float) -> None:
    worth = told(accepted, rejected)
    best = max(saved(worth, drafts, count) for count in range(len(drafts.tokens) + 1))
    assert saved(worth, drafts, worth.keep("a", drafts)) == pytest.approx(best, abs=1e-9)


@given(chances=st.lists(chance, min_size=1, max_size=6), rejected=cost, more=st.floats(0.0, 0.3), dearer=cost)
def test_surer_drafts_are_kept_for_longer_and_dearer_ones_for_less(chances, rejected, more, dearer) -> None:
    count = told(0.1, rejected).keep("a", Drafted(range(len(chances)), chances))
    surer = [min(0.98, each + more) for each in chances]
    assert told(0.1, rejected).keep("a", Drafted(range(len(chances)), surer)) >= count
    assert told(0.1, rejected + dearer).keep("a", Drafted(range(len(chances)), chances)) <= count


def test_all_are_kept_until_costs_are_known() -> None:
    assert Worth().keep("a", Drafted([1, 2, 3], [0.01, 0.01, 0.01])) == 3


def test_drafting_goes_on_while_the_next_draft_is_likely_to_pay() -> None:
    assert told(0.1, 0.5, making=0.1).goes_on([("a", [0.95])])
    assert not told(0.1, 0.5, making=0.1).goes_on([("a", [0.1])]), "its own draft is not even worth verifying"
    assert not told(0.1, 0.5, making=0.9).goes_on([("a", [0.95])]), "the drafter takes longer than it may save"
    assert told(0.1, 0.5, making=0.1).goes_on([("a", [0.1]), ("b", [0.97])]), "one forward drafts for both"


def learned(true, steps: int = 4000, requests: int = 1) -> Odds:
    odds, draw = Odds(), random.Random(0)
    for step in range(steps):
        request, said = f"{step % requests}", draw.random()
        for depth in range(4):
            accepted = draw.random() < true(step % requests, depth, said)
            odds.add(request, depth, said, accepted)
            if depth == 0:
                odds.fared(request, accepted)
            if not accepted:
                break
    return odds


@pytest.mark.parametrize("said", [0.2, 0.5, 0.9])
def test_a_drafter_that_is_too_sure_of_itself_is_found_out(said: float) -> None:
    odds = learned(lambda request, depth, said: 0.6 * said)
    assert odds.chance("0", 0, said) == pytest.approx(0.6 * said, abs=0.1)
    assert Odds().chance("0", 1, said) == pytest.approx(said), "it is believed at first"


def test_places_in_a_path_and_requests_are_told_apart() -> None:
    by_depth = learned(lambda request, depth, said: (0.9, 0.9, 0.2, 0.9)[depth])
    assert by_depth.chance("0", 1, 0.5) > 0.75 and by_depth.chance("0", 2, 0.5) < 0.35
    by_request = learned(lambda request, depth, said: (0.95, 0.1)[request], requests=2)
    assert by_request.chance("0", 0, UNKNOWN) > by_request.chance("1", 0, UNKNOWN) + 0.4
    by_request.forget("1")
    assert by_request.chance("1", 0, UNKNOWN) == by_request.chance("new", 0, UNKNOWN)


class Asked(Odds):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float, bool]] = []

    def add(self, request, depth, probability, accepted) -> None:
        self.seen.append((depth, probability, accepted))


@pytest.mark.parametrize(
    ("parents", "said", "seen"),
    [
        (None, [5], [(0, 0.9, True)]),  # nothing says what would have followed
        (None, [5, 6, 9], [(0, 0.9, True), (1, 0.8, True), (2, 0.7, False)]),  # the last one had not been verified
        (None, [4], [(0, 0.9, False)]),
        ([0, 0, 2], [6, 7], [(0, 0.9, False), (0, 0.8, True), (1, 0.7, True)]),  # a second branch
        ([0, 0, 1], [5, 8], [(0, 0.9, True), (0, 0.8, False), (1, 0.7, False)]),
        ([0, 1, 0], [5], [(0, 0.9, True), (0, 0.7, False)]),  # beside the accepted one
        (None, [], []),
    ],
)
def test_the_target_s_word_tells_of_each_draft_on_its_path(parents, said, seen) -> None:
    worth = told(0.0, 0.5)
    worth._odds = asked = Asked()
    worth.keep("a", Drafted([5, 6, 7], [0.9, 0.8, 0.7], parents))
    worth.answered("a", said)
    worth.answered("a", said)
    assert asked.seen == seen, "once, whatever was kept"
    worth.keep("b", Drafted([5], [0.9]))
    worth.forget(["b"])
    worth.answered("b", [5])
    assert asked.seen == seen


def test_costs_are_found_and_followed() -> None:
    draw, time = random.Random(0), StepTime()
    for step in range(600):
        plain, accepted, rejected = (1.0, 0.2, 0.6) if step < 400 else (2.0, 0.2, 0.1)
        good, bad = draw.randrange(3), draw.randrange(3)
        noise = 10 if draw.random() < 0.03 else draw.lognormvariate(0, 0.05)
        time.add(good, bad, (plain + accepted * good + rejected * bad) * noise)
        if step == 399:
            assert time.accepted == pytest.approx(0.2, abs=0.1) and 0.4 < time.rejected < 0.65
    assert time.accepted == pytest.approx(0.2, abs=0.15) and time.rejected < 0.25


def test_one_disturbed_step_says_nothing() -> None:
    time = StepTime()
    for step in range(50):
        time.add(step % 2, step % 3, 1 + 0.1 * (step % 2) + 0.3 * (step % 3))
    before = time.accepted, time.rejected, time.token
    time.add(0, 2, 500.0)
    assert (time.accepted, time.rejected) == pytest.approx(before[:2], abs=0.02) and time.token == before[2]


def served(choose, steps: int = 3000, seed: int = 0) -> float:
    """Seconds per token where the drafter is sure of itself in some steps, and right in them, and not in others.

    A step takes 1 second, 0.1 more for an accepted draft and 0.6 for a rejected one.
    """
    draw, seconds, tokens = random.Random(seed), 0.0, 0
    for _ in range(steps):
        sure = draw.random() < 0.4
        chances = [0.95] * 4 if sure else [0.3] * 4
        right = list(itertools.takewhile(bool, (draw.random() < each for each in chances)))
        count = choose(chances)
        accepted = min(count, len(right))
        took = 1 + 0.1 * accepted + 0.6 * (count - accepted)
        choose.tell(accepted, count, len(right), took)
        seconds, tokens = seconds + took, tokens + 1 + accepted
    return seconds / tokens


class Fixed:
    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, chances: list[float]) -> int:
        return self._count

    def tell(self, *step) -> None: ...


class Chosen(Fixed):
    def __init__(self) -> None:
        self.worth = Worth()

    def __call__(self, chances: list[float]) -> int:
        return self.worth.keep("a", Drafted([7] * len(chances), chances))

    def tell(self, accepted: int, count: int, right: int, took: float) -> None:
        self.worth.answered("a", [7] * accepted + [7 if right > accepted else 8])
        self.worth.took(accepted, count - accepted, 1, took)


def test_steps_with_good_drafts_are_told_from_others() -> None:
    fixed = min(served(Fixed(count)) for count in range(5))
    oracle = 0.4 * 1.0 / sum(0.95**n for n in range(5)) + 0.6  # not reached: nobody knows which token is wrong
    assert served(Chosen()) < 0.9 * fixed and oracle < fixed


def test_no_draft_is_verified_where_none_pays() -> None:
    chosen = Chosen()
    served(chosen)
    for _ in range(300):
        chosen.tell(0, 4, 0, 20.0)
        chosen([0.3] * 4)
    before = chosen.worth.kept
    assert chosen([0.3] * 4) == 0 and chosen.worth.kept == before


class Loop:
    """vLLM's loop over the forwards of a drafter of two requests, whose best tokens and their logits are given."""

    def __init__(self, best: list[list[int]], sure: list[float]) -> None:
        self._best, self._sure = best, sure
        self.input_ids, self.forwards = torch.zeros(4, dtype=torch.int32), 0
        self.model = SimpleNamespace(compute_logits=self._logits)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(2, 9)
        rest = (1 - self._sure[self.forwards]) / 8
        logits[torch.arange(2), self._best[self.forwards]] = math.log(self._sure[self.forwards] / rest)
        self.forwards += 1
        return logits

    def propose(self, most: int) -> torch.Tensor:
        drafts = []
        for _ in range(most):
            drafts.append(self.model.compute_logits(torch.zeros(2, 1)).argmax(-1))
            self.input_ids[:2] = drafts[-1]
        return torch.stack(drafts, 1)

    def take_last_draft_probs(self) -> None:
        return None


@pytest.mark.parametrize(
    ("sure", "greedy", "drafts"),
    [
        ([0.97, 0.97, 0.97, 0.97], True, [[1, 3, 5, 7], [2, 4, 6, 8]]),
        ([0.97, 0.2, 0.97, 0.97], True, [[1], [2]]),  # made, and not worth verifying
        ([0.97, 0.2, 0.97, 0.97], False, [[1], [2]]),
    ],
)
def test_drafting_ends_where_it_does_not_pay(sure, greedy: bool, drafts) -> None:
    """A drafter that samples drafts to the end: what it would have sampled is not in its logits."""
    loop, worth = Loop([[1, 2], [3, 4], [5, 6], [7, 8]], sure), told(0.1, 0.5, making=0.05)
    runtime = SimpleNamespace(
        worth=worth, draft_length=lambda: 4, in_prompt=False, budget=SimpleNamespace(weighs=False),
        looks_at_drafts=False, timeline=None, drafted=lambda drafts, seconds: None,
    )  # fmt: skip
    batch = SimpleNamespace(req_ids=["a", "b"], sampling_metadata=SimpleNamespace(all_greedy=greedy))
    speculation = SimpleNamespace(
        method="eagle3", parallel_drafting=False, use_local_argmax_reduction=False, use_heterogeneous_vocab=False
    )
    runner = SimpleNamespace(
        _spac_experts=SimpleNamespace(runtime=runtime), drafter=loop, input_batch=batch, speculative_config=speculation
    )
    plan = SimpleNamespace(num_spec_tokens_to_schedule=4)
    propose = runner_v1._proposing(lambda runner, plan, sampled: loop.propose(plan.num_spec_tokens_to_schedule))
    assert propose(runner, plan, torch.tensor([[3, -1], [5, 6]])) == drafts
    assert loop.forwards == (2 if greedy and sure[1] < 0.5 else 4)


NODES = (0.5, 0.35, 0.29, 0.25, 0.22, 0.2, 0.19, 0.18)  # chance of each node of a tree, all after the last token


def grown(nodes: int | None, cost: float, steps: int = 4000) -> float:
    """Seconds per token with trees of so many nodes, or as many as are worth it; a rejected one adds ``cost``."""
    draw, worth, seconds, tokens = random.Random(0), Worth(), 0.0, 0
    tree = Drafted(range(len(NODES)), NODES, [0] * len(NODES))
    for _ in range(steps):
        count = worth.keep("a", tree) if nodes is None else nodes
        place = draw.random()  # siblings exclude one another
        right = next((n for n in range(len(NODES)) if place < sum(NODES[: n + 1]) / 2), len(NODES))
        accepted = int(right < count)
        took = 1 + 0.02 * accepted + cost * (count - accepted)
        worth.answered("a", [right, 99])
        worth.took(accepted, count - accepted, 1, took)
        seconds, tokens = seconds + took, tokens + 1 + accepted
    return seconds / tokens


@pytest.mark.parametrize("cost", [0.01, 0.08, 0.15])
def test_a_tree_has_about_as_many_nodes_as_pay(cost: float) -> None:
    """Its drafter is twice too sure of itself."""
    fixed = [grown(nodes, cost) for nodes in range(len(NODES) + 1)]
    assert grown(None, cost) < 1.03 * min(fixed), fixed
