"""Draft lengths that are planned ahead, on simulated machines: what that loses, gains and ignores."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.decisions.guard.acceptance import Acceptance
from vllm_spac.decisions.guard.length_costs import LengthCosts
from vllm_spac.decisions.guard.lengths import LengthChooser

Seconds = Callable[[float, int], float]  # (tokens so far, drafts) -> of a step
Chance = Callable[[float, int], float]  # (tokens so far, position) -> of acceptance


@dataclass
class Run:
    """``seconds`` are the expected ones of the lengths that ran: the same noise for everybody."""

    seconds: float = 0.0
    lengths: list[int] = field(default_factory=list)
    chooser: LengthChooser | None = None


def play(
    most: int,
    seconds: Seconds,
    chance: Chance,
    tokens: int,
    *,
    fixed: int | None = None,
    noise: Callable[[random.Random], float] = lambda rng: 1.0,
    seed: int = 0,
    requests: int = 1,
) -> Run:
    rng, run, made = random.Random(seed), Run(chooser=None if fixed is not None else LengthChooser(most)), 0.0
    while made < tokens:
        drafts = fixed if fixed is not None else run.chooser.choose(requests)
        emitted = []
        for _ in range(requests):
            accepted = 0
            while accepted < drafts and rng.random() < chance(made, accepted):
                accepted += 1
            emitted.append(accepted + 1)
        took = seconds(made, drafts)
        if run.chooser:
            run.chooser.observe(drafts, emitted, requests, took * noise(rng))
        run.seconds += took
        run.lengths.append(drafts)
        made += sum(emitted) / requests
    run.seconds *= tokens / made
    return run


def tail(rng: random.Random) -> float:
    """Log-normal, and three steps in a hundred take ten times as long."""
    return rng.lognormvariate(0, 0.15) * (10 if rng.random() < 0.03 else 1)


@pytest.mark.parametrize("noise", [lambda rng: 1.0, tail], ids=["exact", "heavy tails"])
@pytest.mark.parametrize("slope", [0.5, 0.7, 2.0])
def test_drafts_that_never_pay_cost_less_than_one_and_a_half_percent(slope: float, noise) -> None:
    for seed in range(3):
        run = play(8, lambda made, d: 1 + slope * d, lambda made, i: 0.2, 4000, noise=noise, seed=seed)
        assert run.lengths[-200:].count(0) > 190, "but for a probe"
        assert run.seconds < 4000 * 1.015


def test_the_steps_after_a_change_are_not_compared() -> None:
    """They end one thing and begin another: here each takes nine times as long."""
    chooser, last = LengthChooser(2), None
    for _ in range(400):
        drafts = chooser.choose()
        chooser.observe(drafts, [1 + drafts], 1, (1 + 0.2 * drafts) * (9 if drafts != last else 1))
        last = drafts
    assert chooser.facts()["draft_length"] == 2 and chooser.facts()["speedup"] == pytest.approx(3 / 1.4)


def drifting(sd: float, memory: int, seed: int) -> Seconds:
    """A machine whose speed is log-normal and forgotten in so many steps, whatever runs: as a disk that others use."""
    rng, keep = random.Random(seed), math.exp(-1 / memory)
    level = [rng.gauss(0, sd)]

    def seconds(made: float, drafts: int) -> float:
        level[0] = keep * level[0] + sd * math.sqrt(1 - keep**2) * rng.gauss(0, 1)
        return (1 + 0.6 * drafts) * math.exp(level[0])

    return seconds


@pytest.mark.parametrize("memory", [30, 150, 600])
def test_a_machine_that_drifts_is_no_reason_to_speculate(memory: int) -> None:
    """Estimates of different moments would tell whichever length ran while the machine was fast from the others."""
    drafting = []
    for seed in range(20):
        run = play(4, drifting(0.3, memory, seed), lambda made, i: 0.45, 1500, noise=tail, seed=seed)
        drafting.append(sum(length > 0 for length in run.lengths))
    assert sum(drafting) < 20 * 70 and max(drafting) < 150, "no draft pays: probes, and rarely more"


def test_drafts_become_worthwhile_by_cost_and_by_acceptance() -> None:
    cheaper = play(8, lambda made, d: 1 + (0.5 if made < 3000 else 0.02) * d, lambda made, i: 0.7, 20000)
    better = play(8, lambda made, d: 1 + 0.1 * d, lambda made, i: 0.05 if made < 3000 else 0.9, 20000)
    for run in (cheaper, better):
        assert run.chooser.choose() >= 4
        assert run.seconds < 0.85 * 20000


def stepwise(
    seconds: Seconds, chance: Chance, steps: int, seed: int, noise
) -> tuple[list[int], list[float], list[int]]:
    """(lengths, expected seconds, tokens) of each step; the two functions get the number of the step."""
    rng, chooser, lengths, took, made = random.Random(seed), LengthChooser(4), [], [], []
    for step in range(steps):
        drafts, accepted = chooser.choose(1), 0
        while accepted < drafts and rng.random() < chance(step, accepted):
            accepted += 1
        chooser.observe(drafts, [accepted + 1], 1, seconds(step, drafts) * noise(rng))
        lengths.append(drafts)
        took.append(seconds(step, drafts))
        made.append(accepted + 1)
    return lengths, took, made


def level(step: float, change: int, before: float, after: float) -> float:
    return before if step < change else after


ADOPTED = [
    ("cheap", lambda step, d: 1 + level(step, 3000, 1.0, 0.05) * d, lambda step, i: 0.85),
    ("accepted", lambda step, d: 1 + 0.1 * d, lambda step, i: level(step, 3000, 0.05, 0.97)),
    ("both", lambda step, d: 1 + level(step, 3000, 0.5, 0.05) * d, lambda step, i: level(step, 3000, 0.3, 0.9)),
]
DROPPED = [
    ("dear", lambda step, d: 1 + level(step, 1000, 0.02, 1.0) * d, lambda step, i: 0.8),
    ("rejected", lambda step, d: 1 + 0.1 * d, lambda step, i: level(step, 1000, 0.9, 0.05)),
    ("less dear", lambda step, d: 1 + level(step, 1000, 0.02, 0.5) * d, lambda step, i: 0.45),
]


@pytest.mark.parametrize(("noise", "typical"), [(lambda rng: 1.0, 200), (tail, 300)], ids=["exact", "heavy tails"])
@pytest.mark.parametrize(("seconds", "chance"), [case[1:] for case in ADOPTED], ids=[case[0] for case in ADOPTED])
def test_drafts_that_begin_to_pay_threefold_are_adopted_soon(seconds, chance, noise, typical) -> None:
    """By the median; at first half of the steps have drafts, while both take turns. Steps without show nothing of
    drafts, so all waits for a probe, which comes every 192 steps."""
    adopted = []
    for seed in range(9):
        lengths, _, _ = stepwise(seconds, chance, 3800, seed, noise)
        since = (step for step in range(3000, 3780) if sum(d > 2 for d in lengths[step : step + 20]) >= 8)
        adopted.append(next(since, 3800) - 3000)
    assert sorted(adopted)[4] < typical, adopted


@pytest.mark.parametrize("noise", [lambda rng: 1.0, tail], ids=["exact", "heavy tails"])
@pytest.mark.parametrize(("seconds", "chance"), [case[1:] for case in DROPPED], ids=[case[0] for case in DROPPED])
def test_drafts_that_stop_paying_cost_a_percent_or_two(seconds, chance, noise) -> None:
    """Of 2,000 steps, in the mean; the change itself and the probes that follow."""
    lost = []
    for seed in range(9):
        _, took, made = stepwise(seconds, chance, 3000, seed, noise)
        lost.append(sum(took[1000:]) / sum(made[1000:]) - 1)
    assert sum(lost) / len(lost) < (0.01 if noise is not tail else 0.025) and max(lost) < 0.055, lost


@pytest.mark.parametrize("chance", [0.5, 0.55])
def test_drafts_that_were_adopted_by_mistake_are_dropped(chance: float) -> None:
    """A machine whose steps vary makes drafts seem to pay now and then. These seeds once cost 3 to 5 percent."""
    cost = 1, 1.6, 1.8, 2.4, 2.6  # measured with a tenth of a model's experts in slots
    for spread, seed in [(0.3, 6), (0.3, 20), (0.3, 45), (0.3, 58), (0.5, 36), (0.5, 26)]:
        noise = partial(random.Random.lognormvariate, mu=0, sigma=spread)
        run = play(4, lambda made, d: cost[d], lambda made, i: chance, 2500, noise=noise, seed=seed)
        assert run.seconds < 2500 * 1.02, seed


def test_sizes_of_batch_are_told_apart() -> None:
    """Speculation pays for one request, not for sixteen."""
    chooser, rng = LengthChooser(4), random.Random(0)
    for step in range(3000):
        requests = 1 if step // 50 % 2 else 16
        drafts = chooser.choose(requests)
        emitted = [1 + sum(rng.random() < 0.9 for _ in range(drafts)) for _ in range(requests)]
        chooser.observe(drafts, emitted, requests, 1 + (0.02 if requests == 1 else 2.0) * drafts)
    assert chooser.choose(1) == 4 and chooser.choose(16) == 0 and chooser.choose(13) == 0
    assert chooser.choose(0) == chooser.choose() == 0


def test_steps_that_others_have_interrupted_are_not_compared() -> None:
    """The machine may have become another one meanwhile."""
    chooser = LengthChooser(4)
    for requests, drafts, seconds in ((1, 0, 1.0), (16, 0, 5.0), (1, 2, 30.0), (1, 0, 20.0)):
        for _ in range(8):
            chooser.observe(drafts, [1] * requests, requests, seconds)
    assert chooser._batches[0].costs.seconds[2] == pytest.approx(1.5), "by the last two alone"


def test_what_is_no_plain_step_is_ignored() -> None:
    chooser = LengthChooser(4)
    before = chooser.facts()
    assert before["draft_length"] == 0 and before["speedup"] == 1.0
    chooser.observe(4, [5], 2, 1.0)  # a prompt beside
    chooser.observe(0, [], 3, 1.0)  # prompts only
    chooser.observe(2, [1], 1, 0.0)
    chooser.observe(2, [1], 1, math.nan)
    chooser.observe(2, [1], 1, math.inf)
    assert chooser.facts() == before | {"ignored_steps": 5}
    with pytest.raises(AssertionError, match="5 drafts of at most 4"):
        chooser.observe(5, [1], 1, 1.0)


def test_acceptance_follows_for_shorter_lengths_and_from_batches() -> None:
    acceptance, rng = Acceptance(4), random.Random(1)
    for _ in range(300):
        emitted = []
        for _ in range(4):
            accepted = 0
            while accepted < 4 and rng.random() < 0.8:
                accepted += 1
            emitted.append(accepted + 1)
        acceptance.update(4, emitted)
    expected = [sum(0.8**i for i in range(d + 1)) for d in range(5)]
    assert acceptance.tokens() == pytest.approx(expected, rel=0.05)
    for _ in range(600):
        acceptance.update(1, [1])
    assert acceptance.tokens()[4] < 1.2


@settings(deadline=None, max_examples=examples(30))
@given(
    increments=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=8),
    chances=st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    seed=st.integers(0, 9),
    requests=st.integers(1, 3),
)
def test_never_slower_than_not_speculating(increments, chances, seed, requests) -> None:
    """Beyond the first looks: they may cost 60 steps in 3000."""
    most = len(increments)
    seconds = [1 + sum(increments[:d]) for d in range(most + 1)]
    run = play(most, lambda made, d: seconds[d], lambda made, i: chances[i], 3000, seed=seed, requests=requests)
    assert run.seconds < 3000 * 1.02 + 60
    again = play(most, lambda made, d: seconds[d], lambda made, i: chances[i], 3000, seed=seed, requests=requests)
    assert again.lengths == run.lengths
    assert set(run.lengths) <= set(range(most + 1))


@settings(deadline=None, max_examples=examples(60))
@given(
    most=st.integers(1, 9),
    events=st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(0, 9), st.integers(0, 3), st.floats(allow_nan=True, allow_infinity=True)
        ),
        max_size=150,
    ),
)
def test_any_observations(most: int, events) -> None:
    """Lengths that were not chosen, impossible seconds, prompts: the answer stays in range, the counts add up."""
    chooser = LengthChooser(most)
    for drafts, accepted, requests, seconds in events:
        drafts = min(drafts, most)
        chooser.observe(drafts, [1 + min(accepted, drafts)] * requests, max(1, requests), seconds)
        assert 0 <= chooser.choose(requests) <= most
    facts = chooser.facts()
    assert sum(facts["steps"].values()) + facts["ignored_steps"] == len(events)


def ran(costs: LengthCosts, *runs: tuple[int, float]) -> list[float]:
    """Lengths that ran for eight steps each, with the seconds of a step; the first of them takes ten times as long."""
    for length, seconds in runs:
        for step in range(8):
            costs.add(length, seconds * (10 if step == 0 else 1))
    return costs.seconds


def test_lengths_are_compared_where_they_change_whatever_the_machine_does_meanwhile() -> None:
    costs = LengthCosts(4)
    assert ran(costs, (0, 1.0)) == [1.0] * 5, "nothing is known"
    assert ran(costs, (2, 1.5)) == pytest.approx([1, 1.25, 1.5, 1.75, 2]), "a line, and on behind it"
    for power in range(6):  # slower and slower: that counts for a length once, and once against it
        ran(costs, (0, 1.2 ** (2 * power + 1)), (2, 1.5 * 1.2 ** (2 * power + 2)))
    assert costs.seconds[2] == pytest.approx(1.5)
    ran(costs, (0, 7.0), (4, 4 * 7.0))
    assert costs.seconds[3:] == pytest.approx([(costs.seconds[2] + 4) / 2, 4.0])
    costs.begin()
    ran(costs, (0, 50.0))
    assert costs.seconds[4] == pytest.approx(4.0), "steps that do not follow one another are not compared"


def test_a_comparison_far_from_those_before_has_to_be_confirmed() -> None:
    costs = LengthCosts(2)
    ran(costs, (0, 1.0), (1, 1.5), (0, 1.0), (2, 2.0), (0, 1.0))
    for seconds in (9.0, 4.0, 4.0, 4.0, *[1.5] * 5):
        costs.add(1, seconds)
    assert costs.seconds[1] == pytest.approx(1.5) and costs.doubtful
    assert ran(costs, (0, 1.0), (1, 1.5))[1] == pytest.approx(1.5), "it was disturbed"
    ran(costs, (0, 1.0), (1, 4.0))
    assert ran(costs, (0, 1.0)) == pytest.approx([1, 4, 7]), "another machine, of which 2 is not known"


def test_steps_that_become_slower_while_a_length_runs_are_noticed_and_one_look_is_enough() -> None:
    costs = LengthCosts(1)
    ran(costs, (0, 1.0), (1, 1.5), (1, 1.5))
    assert not costs.doubtful
    ran(costs, (1, 3.0))
    assert costs.doubtful
    assert ran(costs, (0, 1.0))[1] == pytest.approx(3.0)
    ran(costs, (1, 3.0), (1, 6.0))
    assert costs.doubtful and ran(costs, (0, 2.0))[1] == pytest.approx(3.0), "all is slower, drafts are not dearer"


def test_machines_that_change_at_random() -> None:
    """Nothing raises, whatever changes when."""
    for seed in range(20):
        rng = random.Random(seed)
        chooser, cost, chance = LengthChooser(rng.choice([1, 2, 4, 8])), 0.1, 0.5
        for step in range(3000):
            if step % 500 == 0:
                cost, chance = rng.uniform(0.02, 0.6), rng.random()
            drafts, accepted = chooser.choose(1), 0
            while accepted < drafts and rng.random() < chance:
                accepted += 1
            chooser.observe(drafts, [accepted + 1], 1, (1 + cost * drafts) * rng.lognormvariate(0, 0.05))
