"""When steps go on to have a technique, and when they stop having it, by the durations of both kinds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from vllm_spac.decisions.guard.payback import BLOCK, KEEP, LEAST, LONGEST, MOST, PAUSE, Payback, Verdict
from vllm_spac.execution import cpu_check

COMPARED = 2 * BLOCK  # steps of a pair


class Served:
    """Steps of a machine on which the technique makes a step ``times`` as long; single steps vary by ``noise``."""

    def __init__(self, times: float, noise: float = 0.0, seed: int = 0, payback: Payback | None = None) -> None:
        self.payback, self.times, self.noise = payback or Payback(), times, noise
        self.rng = np.random.default_rng(seed)
        self.seconds = self.steps = 0.0  # without it all steps would take ``steps`` seconds

    def step(self, rows: int = 1) -> Verdict | None:
        plain = rows * self.rng.lognormal(0, self.noise)
        took = plain if self.payback.stopped else plain * self.times
        self.steps, self.seconds = self.steps + plain, self.seconds + took
        return self.payback.end_step(rows, took)

    def verdicts(self, steps: int) -> Iterator[tuple[int, Verdict]]:
        for number in range(steps):
            if (verdict := self.step()) is not None:
                yield number + 1, verdict


@pytest.mark.parametrize(("times", "stop"), [(1.1, True), (0.9, False)])
def test_the_shorter_steps_go_on_for_longer_and_longer(times: float, stop: bool) -> None:
    served, expected = Served(times), []
    number, steps = 0, PAUSE if stop else KEEP
    while number < 4 * LONGEST:
        number += LEAST * COMPARED
        expected.append((number, stop, steps))
        number, steps = number + steps, min(2 * steps, LONGEST)
    found = [(number, each.stop, each.steps) for number, each in served.verdicts(expected[-1][0])]
    assert found == expected and found[-1][2] == LONGEST
    assert served.payback.verdict is not None and served.payback.verdict.ratio == pytest.approx(times)


def test_with_and_without_take_turns_and_a_drift_favours_neither() -> None:
    payback, kinds = Payback(), []
    for number in range(2 * COMPARED):
        kinds.append(payback.stopped)
        assert payback.end_step(1, 1.001**number) is None
    assert kinds == [False] * BLOCK + [True] * 2 * BLOCK + [False] * BLOCK
    served = Payback()
    verdict = next(each for n in range(MOST * COMPARED) if (each := served.end_step(1, 1.001**n)) is not None)
    assert verdict.pairs == MOST and abs(verdict.ratio - 1) < 1e-9, "the drift of one pair is taken back by the next"


def test_what_makes_no_difference_is_stopped_after_most_pairs() -> None:
    """It costs bytes, or rounding, and gains nothing."""
    number, verdict = next(Served(1.0).verdicts(MOST * COMPARED))
    assert number == MOST * COMPARED and verdict.stop and verdict.pairs == MOST


def test_the_first_step_of_a_block_does_not_count() -> None:
    """It finds the slots as steps of the other kind left them."""
    payback, seen = Payback(), []
    for number in range(LEAST * COMPARED):
        seconds = (2.0 if payback.stopped else 1.0) if number % BLOCK else (1000.0 if payback.stopped else 1e-6)
        seen.append(payback.end_step(1, seconds))
    assert seen[-1] is not None and not seen[-1].stop and seen[-1].ratio == pytest.approx(0.5)


@pytest.mark.parametrize(("times", "most"), [(1.5, 1.01), (1.1, 1.01), (1.03, 1.01), (0.97, 0.999), (0.8, 0.83)])
def test_what_slows_down_costs_less_than_a_percent_and_what_pays_is_kept(times: float, most: float) -> None:
    """*Simulated*: 8,000 steps that vary by 30 % each (as measured at 25 % in slots on disk), 20 seeds."""
    ratios = []
    for seed in range(20):
        served = Served(times, noise=0.3, seed=seed)
        for _ in range(8000):
            served.step()
        ratios.append(served.seconds / served.steps)
    assert np.mean(ratios) < most and max(ratios) < max(1.02, most + 0.04), ratios


def of_cpu() -> Payback:
    return Payback(cpu_check.BLOCK, cpu_check.SETTLE, cpu_check.MOST, cpu_check.CLEAR)


@pytest.mark.parametrize(
    ("times", "steps", "most"),
    [(1.3, 20_000, 1.01), (1.1, 20_000, 1.01), (1.02, 20_000, 1.01), (1.3, 2000, 1.02), (0.7, 2000, 0.74)],
)
def test_experts_on_the_cpu_where_they_do_not_pay(times: float, steps: int, most: float) -> None:
    """*Simulated*, as above."""
    ratios = []
    for seed in range(20):
        served = Served(times, noise=0.3, seed=seed, payback=of_cpu())
        for _ in range(steps):
            served.step()
        ratios.append(served.seconds / served.steps)
    assert np.mean(ratios) < most, ratios


def test_two_clear_pairs_are_enough_on_one_side() -> None:
    for times, pairs in ((1.3, 2), (0.7, 2), (1.1, LEAST)):
        _, verdict = next(Served(times, payback=of_cpu()).verdicts(2 * cpu_check.BLOCK * LEAST))
        assert (verdict.pairs, verdict.stop) == (pairs, times > 1)
    payback, turns = of_cpu(), iter([1.5, 1.0, 1.0, 0.6])
    for _ in range(4):  # a pair that is longer with it, and one that is shorter
        seconds = next(turns)
        assert all(payback.end_step(1, seconds) is None for _ in range(cpu_check.BLOCK))


@pytest.mark.parametrize("later", range(0, 4 * BLOCK, 5))
def test_reads_ahead_that_are_compared_meanwhile_do_not_shift_what_cpu_experts_bring(later: int) -> None:
    """Both take turns in the same steps; ``later`` is how many steps one began after the other."""
    ahead, cpu = Payback(), of_cpu()
    for _ in range(later):
        ahead.end_step(1, 1.0)
    verdict = None
    while verdict is None:
        seconds = (1.0 if ahead.stopped else 0.7) * (1.0 if cpu.stopped else 1.1)
        verdict = cpu.end_step(1, seconds)
        assert ahead.end_step(1, 1.0) is None, "it has found no difference yet, and goes on to compare"
    assert verdict.stop and verdict.ratio == pytest.approx(1.1, abs=0.01) and verdict.pairs == LEAST
