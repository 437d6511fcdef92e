"""What ``prefetch=auto`` chooses, by recall and costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.core import MoEShape
from vllm_spac.decisions.prefetch_choice import LEAST, StepCosts, choose

SECONDS = st.floats(0, 10)
SHARE = st.floats(0, 1)
SIZES = {"small": 10, "middle": 20, "big": 30}


@given(SECONDS, SECONDS, SHARE, SHARE)
def test_the_promise_grows_with_the_recall_up_to_the_ceiling(compute: float, loads: float, one: float, two: float):
    costs, (low, high) = StepCosts(compute, loads), sorted((one, two))
    assert costs.promise(0) == 1 <= costs.promise(low) <= costs.promise(high) <= costs.ceiling <= 2 + 1e-9
    if max(compute, loads) > 0:
        assert costs.ceiling == pytest.approx((compute + loads) / max(compute, loads))


def test_the_promise_by_hand() -> None:
    """4 ms of computing hide 3 of 4 ms of the loads: 10 ms become 7."""
    assert StepCosts(0.004, 0.006).promise(0.75) == pytest.approx(10 / 7)


def test_a_step_has_the_experts_of_a_row_and_misses_those_without_a_slot() -> None:
    shape = MoEShape(("0", "1", "2"), 8, 2, {})
    costs = StepCosts.of(shape, 6, fast=0.5, load=2.0, other=1.0, origin="x")
    assert costs == StepCosts(6 * 0.5 + 1.0, 6 * 0.75 * 2.0, "x")
    assert StepCosts.of(shape, 24, 0.5, 2.0, 1.0, "").ceiling == 1, "nothing is missing"


def test_the_best_is_chosen_and_of_equal_ones_the_smallest() -> None:
    costs = StepCosts(0.001, 0.001)
    assert choose({"small": 0.5, "middle": 0.8, "big": 0.805}, SIZES, costs).predictor == "middle"
    assert choose({"small": 0.5, "middle": 0.8, "big": 0.82}, SIZES, costs).predictor == "big"
    chosen = choose({"small": 0.9, "middle": 0.8, "big": 0.9}, SIZES, costs)
    assert chosen.predictor == "small"
    assert chosen.describe() == (
        "auto (small: recall 0.90; 1 ms of computing and 1 ms of loads per step promise 1.82x, 2.00x if always right)"
    )


@given(SECONDS, SECONDS, SHARE)
def test_nothing_is_read_ahead_that_promises_too_little(compute: float, loads: float, recall: float) -> None:
    costs = StepCosts(compute, loads)
    choice = choose({"small": recall}, SIZES, costs)
    assert (choice.predictor is None) == (costs.promise(recall) < LEAST)
    if choice.predictor is None:
        assert choice.describe().startswith("auto (off: ") and "at least 1.05x is asked for" in choice.why
