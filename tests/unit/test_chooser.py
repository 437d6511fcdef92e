"""Which drafts are verified and made: against all choices, on simulated drafters, and in V1's loop over forwards."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.decisions.guard.lengths import LengthChooser
from vllm_spac.decisions.guard.odds import UNKNOWN, Odds
from vllm_spac.decisions.guard.step_cost import StepCost
from vllm_spac.integration.stepping.v1 import runner_v1

chance = st.floats(0.02, 0.98)
cost = st.floats(0.0, 2.0)


def told(accepted: float, rejected: float, making: float = 0.0) -> Chooser:
    """One that knows what drafts cost, in tokens, and believes the drafter."""
    chooser = Chooser(8)
    chooser._now = SimpleNamespace(known=True, unsure=False, token=1.0, accepted=accepted, rejected=rejected)
    chooser._making = making
    return chooser


def saved(chooser: Chooser, drafts: Drafted, count: int) -> float:
    """Seconds that verifying the first ``count`` saves: over all that may become of them."""
    chances, total = [chooser._odds.chance("a", _depth(drafts, n), drafts.chances[n]) for n in range(count)], 0.0
    for fate in itertools.product((True, False), repeat=count):
        probability, reached, saving = 1.0, [True], 0.0
        for number, good in enumerate(fate):
            probability *= chances[number] if good else 1 - chances[number]
            reached.append(reached[drafts.parent(number)] and good)
            saving += 1.0 - chooser._now.accepted if reached[-1] else -chooser._now.rejected
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
    chooser = told(accepted, rejected)
    best = max(saved(chooser, drafts, count) for count in range(len(drafts.tokens) + 1))
    assert saved(chooser, drafts, chooser.keep("a", drafts)) == pytest.approx(best, abs=1e-9)


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
                odds.add_first(request, accepted)
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
    by_request.remove("1")
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
    chooser = told(0.0, 0.5)
    chooser._odds = asked = Asked()
    chooser.keep("a", Drafted([5, 6, 7], [0.9, 0.8, 0.7], parents))
    chooser.observe_tokens("a", said)
    chooser.observe_tokens("a", said)
    assert asked.seen == seen, "once, whatever was kept"
    chooser.keep("b", Drafted([5], [0.9]))
    chooser.remove(["b"])
    chooser.observe_tokens("b", [5])
    assert asked.seen == seen


def test_costs_are_found_and_followed() -> None:
    """Misses make the steps of this machine differ fourfold; then it becomes another one."""
    draw, cost = random.Random(0), StepCost()
    for step in range(800):
        plain, row, load = (1.0, 0.05, 0.1) if step < 500 else (3.0, 0.2, 0.1)
        good, bad = draw.randrange(3), draw.randrange(3)
        misses = sum(draw.randrange(0, 21) for _ in range(1)) + 4 * good + 8 * bad
        noise = 10 if draw.random() < 0.03 else draw.lognormvariate(0, 0.05)
        cost.add(good, bad, (plain + row * (good + bad) + load * misses) * noise, misses)
        if step == 499:
            assert cost.plain == pytest.approx(2.0, abs=0.2)
            assert cost.accepted == pytest.approx(0.45, abs=0.1) and cost.rejected == pytest.approx(0.85, abs=0.15)
    assert cost.plain == pytest.approx(4.0, abs=0.4) and cost.rejected == pytest.approx(1.0, abs=0.2)


def test_what_a_draft_costs_is_hoped_to_be_less_unless_steps_are_slow() -> None:
    def costs(tokens: int) -> StepCost:
        cost = StepCost()
        for _ in range(60):
            cost.add(0, 0, 1.0, 3)
            cost.add(tokens, 4 - tokens, 2.0, 9)
        return cost

    pays, loses = costs(4), costs(0)
    assert pays.token < pays.plain and pays.accepted < pays._added(1)[0]
    assert loses.token == loses.plain and loses.rejected == loses._added(2)[0]


def served(choose, steps: int = 3000, seed: int = 0) -> float:
    """Seconds per token where the drafter is sure of itself in some steps, and right in them, and not in others.

    A step takes 1 second, 0.1 more for a draft, and 0.5 for what a rejected one misses.
    """
    draw, seconds, tokens = random.Random(seed), 0.0, 0
    for _ in range(steps):
        sure = draw.random() < 0.4
        chances = [0.95] * 4 if sure else [0.3] * 4
        right = list(itertools.takewhile(bool, (draw.random() < each for each in chances)))
        count = choose(chances)
        accepted = min(count, len(right))
        took = 1 + 0.1 * count + 0.5 * (count - accepted)
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
        self.chooser = Chooser(8)

    def __call__(self, chances: list[float]) -> int:
        return self.chooser.keep("a", Drafted([7] * len(chances), chances))

    def tell(self, accepted: int, count: int, right: int, took: float) -> None:
        self.chooser.observe_tokens("a", [7] * accepted + [7 if right > accepted else 8])
        self.chooser.end_step([count], [1 + accepted], 1, took, 0.0, 10 * (count - accepted))


def test_steps_with_good_drafts_are_told_from_others() -> None:
    fixed = min(served(Fixed(count)) for count in range(5))
    oracle = 0.4 * 1.0 / sum(0.95**n for n in range(5)) + 0.6  # not reached: nobody knows which token is wrong
    assert served(Chosen()) < 0.9 * fixed and oracle < fixed


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
    loop, chooser = Loop([[1, 2], [3, 4], [5, 6], [7, 8]], sure), told(0.1, 0.5, making=0.05)
    runtime = SimpleNamespace(
        drafts=SimpleNamespace(chooser=chooser, length=lambda: 4, in_prompt=False), observes_drafts=False,
        budget=SimpleNamespace(weighs=False), recorder=SimpleNamespace(timeline=None),
        end_drafts=lambda drafts, seconds, forwards: None,
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
    """Seconds per token with trees of so many nodes, or as many as are worth it; a rejected one misses ``cost``."""
    draw, chooser, seconds, tokens = random.Random(0), Chooser(8), 0.0, 0
    tree = Drafted(range(len(NODES)), NODES, [0] * len(NODES))
    for _ in range(steps):
        count = chooser.keep("a", tree) if nodes is None else nodes
        place = draw.random()  # siblings exclude one another
        right = next((n for n in range(len(NODES)) if place < sum(NODES[: n + 1]) / 2), len(NODES))
        accepted = int(right < count)
        took = 1 + 0.02 * count + cost * (count - accepted)
        chooser.observe_tokens("a", [right, 99])
        chooser.end_step([count], [1 + accepted], 1, took, 0.0, 20 * (count - accepted))
        seconds, tokens = seconds + took, tokens + 1 + accepted
    return seconds / tokens


@pytest.mark.parametrize("cost", [0.0, 0.06, 0.13])
def test_a_tree_has_about_as_many_nodes_as_pay(cost: float) -> None:
    """Its drafter is twice too sure of itself."""
    fixed = [grown(nodes, cost) for nodes in range(len(NODES) + 1)]
    assert grown(None, cost) < 1.03 * min(fixed), fixed


@dataclass
class Machine:
    """Serves a text with drafts as they are chosen; a step takes 1 second, ``load`` more for each of its misses.

    Attributes:
        right: chance of a draft, of which its drafter says the truth.
        making: seconds of the drafter for each.
        noise: by which a step takes longer.
    """

    load: float
    right: Callable[[random.Random], float]
    making: float = 0.0
    noise: Callable[[random.Random], float] = lambda rng: 1.0
    most: int = 4

    def step(self, draw: random.Random, chances: list[float], count: int) -> tuple[int, int, float]:
        """Returns how many drafts in a row are right, the misses with ``count`` drafts, and the seconds."""
        right = len(list(itertools.takewhile(bool, (draw.random() < each for each in chances))))
        misses = sum(draw.randrange(5, 25) for _ in range(1 + min(right, count)))
        misses += sum(draw.randrange(10, 35) for _ in range(count - min(right, count)))
        return right, misses, 1 + 0.02 * count + self.load * misses

    def serve(self, tokens: int, fixed: int | None = None, seed: int = 0) -> tuple[float, Chooser]:
        """Returns expected seconds per token, those of the drafter included."""
        draw, chooser, seconds, made, chances = random.Random(seed), Chooser(self.most), 0.0, 0, list[float]()
        count = 0
        while made < tokens:
            right, misses, took = self.step(draw, chances, count)
            said = [7] * min(right, count) + [7 if right > count else 8]
            if fixed is None:
                chooser.observe_tokens("a", said)
            length = chooser.allows(1) if fixed is None else fixed
            chances = [self.right(draw) for _ in range(length)]
            drafting = self.making * length
            slow = self.noise(draw)
            verified, count = count, length
            if fixed is None:
                if length:
                    count = chooser.keep("a", Drafted([7] * length, chances))
                    chooser.observe_drafter(length, max(drafting, 1e-6))
                chooser.end_step([verified], [len(said)], 1, took * slow + drafting, drafting, misses)
            seconds, made = seconds + took + drafting, made + len(said)
        return seconds / made, chooser


def tail(rng: random.Random) -> float:
    """Log-normal, and three steps in a hundred take ten times as long."""
    return rng.lognormvariate(0, 0.15) * (10 if rng.random() < 0.03 else 1)


@dataclass
class Drift:
    """A machine whose speed is log-normal and forgotten in so many steps, besides: as a disk that others use."""

    memory: int
    level: float = 0.0

    def __call__(self, rng: random.Random) -> float:
        keep = math.exp(-1 / self.memory)
        self.level = keep * self.level + 0.3 * math.sqrt(1 - keep**2) * rng.gauss(0, 1)
        return math.exp(self.level) * tail(rng)


NOISES: dict[str, Callable[[], Callable[[random.Random], float]]] = {
    "none": lambda: lambda rng: 1.0,
    "heavy tails": lambda: tail,
    "drift of 30 steps": lambda: Drift(30),
    "drift of 600 steps": lambda: Drift(600),
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("load", [0.02, 0.3])
def test_drafts_that_never_pay_cost_next_to_nothing(load: float, noise: str) -> None:
    """Beyond what it takes to find out."""
    for seed in range(3):
        machine = Machine(load, lambda rng: rng.uniform(0.0, 0.2), making=0.2, noise=NOISES[noise]())
        none, _ = machine.serve(4000, fixed=0, seed=seed)
        chosen, chooser = machine.serve(4000, seed=seed)
        assert chosen < 1.02 * none, chooser.facts()


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("load", [0.02, 0.3])
def test_drafts_that_pay_are_made(load: float, noise: str) -> None:
    """As fast as the best length or nearly; where the machine's speed hides that, faster than without."""
    for seed in range(3):
        machine = Machine(load, lambda rng: 0.97 if rng.random() < 0.7 else 0.3, making=0.01, noise=NOISES[noise]())
        none, *fixed = (machine.serve(6000, fixed=length, seed=seed)[0] for length in range(5))
        chosen, chooser = machine.serve(6000, seed=seed)
        if noise == "none":
            assert chosen < 1.04 * min(fixed), chooser.facts()
        else:  # with a load of 0.3 even the best gains little
            assert chosen < (0.95 if load < 0.1 else 1.02) * none, chooser.facts()


def test_a_drafter_that_idles_is_tried_again() -> None:
    quality = [0.05]
    machine = Machine(0.05, lambda rng: quality[0], making=0.1)
    _, chooser = machine.serve(1000)
    assert chooser.facts()["draft_length"] == 0
    quality[0] = 0.95
    draw, drafts = random.Random(1), 0
    for _ in range(400):
        length = chooser.allows(1)
        if length:
            chooser.keep("a", Drafted([7] * length, [0.95] * length))
            chooser.observe_drafter(length, 0.1 * length)
            chooser.observe_tokens("a", [7] * length + [8])
        chooser.end_step(
            [length], [1 + length], 1, 1.5 + 0.02 * length + 0.1 * length, 0.1 * length, draw.randrange(20)
        )
        drafts += length > 0
    assert drafts > 200, "within a few probes, less the blocks without drafts of a comparison"


@pytest.mark.parametrize("disturbed", [(0,), (100, 101), (0, 50, 150)])
def test_a_drafter_that_was_disturbed_drafts_on(disturbed: tuple[int, ...]) -> None:
    """A forward that once takes a thousand times as long, as one that compiles does, stops no drafts."""
    chooser, without = Chooser(4), 0
    found_out = 64 if 0 in disturbed else 0  # by a probe: that the first was no measure
    for step in range(200):
        length = chooser.allows(1)
        without += length == 0
        if length:
            made = next((n for n in range(1, length) if not chooser.goes_on([("a", [0.9] * n)])), length)
            chooser.keep("a", Drafted([7] * made, [0.9] * made))
            chooser.observe_drafter(made, 0.01 * made * (1000 if step in disturbed else 1))
            chooser.observe_tokens("a", [7] * made + [8])
            assert made == 4 or step < 10 + found_out
        chooser.end_step([length], [1 + length], 1, 1.0 + 0.02 * length, 0.01 * length, step % 20)
    assert without <= 80 + found_out, "in the blocks without drafts of a comparison alone"


def test_a_machine_that_is_not_as_assumed_is_found_out() -> None:
    """Steps with drafts take three times as long, whatever is verified: as if the drafter slowed the target down."""
    chooser = Chooser(4)
    lengths = []
    for _ in range(800):
        length = chooser.allows(1)
        if length:
            chooser.keep("a", Drafted([7] * length, [0.6] * length))
            chooser.observe_tokens("a", [7, 8])
            chooser.observe_drafter(length, 1e-6)
        chooser.end_step([length], [1 + (length > 0)], 1, 3.0 if length else 1.0, 0.0, 0)
        lengths.append(length)
    assert not any(lengths[200:]), "made no more once steps without drafts were seen to be faster"


def test_steps_with_prompts_are_ignored() -> None:
    chooser = Chooser(4)
    steps = ([4], [5], 2, 1.0), ([], [], 3, 1.0), ([2], [1], 1, 0.0), ([2], [1], 1, math.inf)
    for drafts, tokens, requests, seconds in steps:
        assert chooser.end_step(drafts, tokens, requests, seconds, 0.0, 5) is None
    assert chooser.ignored == 4 and chooser.facts()["steps"] == {}
    chooser.end_step([2], [3], 1, 1.0, 0.0, 5)
    read = {"draft_length", "speedup", "tokens_per_step"}  # by the live page
    assert read <= set(chooser.facts()) & set(LengthChooser(4).facts()) and chooser.facts()["tokens_per_step"] == 3


def test_sizes_of_batch_have_costs_of_their_own() -> None:
    chooser = Chooser(4)
    for step in range(403):
        requests = 1 if step // 50 % 2 else 16
        drafts = step % 3
        cost = 0.02 if requests == 1 else 2.0
        chooser.end_step([drafts] * requests, [1 + drafts] * requests, requests, 1 + cost * drafts, 0.0, 0)
    counts = []
    for requests in (1, 16):
        chooser.allows(requests)
        counts.append(chooser.keep("a", Drafted([1, 2, 3], [0.8] * 3)))
    assert counts == [3, 0]
