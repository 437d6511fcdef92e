"""Contract of predictors; runs over the folder, so that a new one is tested at once."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from vllm_spac import components
from vllm_spac.core import NOT_RUN
from vllm_spac.predictors.base import Predictor

KEYS = 24
NAMES = [*components.names("predictors"), "outside:Same"]


def steps(seed: int, count: int = 40) -> list[np.ndarray]:
    """Counts of steps; in some of them the last eight keys' layer did not run."""
    rng = np.random.default_rng(seed)
    made = list(rng.integers(0, 10, (count, KEYS)))
    for counts in made[::5]:
        counts[16:] = NOT_RUN
    return made


def fresh(name: str) -> Predictor:
    return components.build("predictors", name, num_experts=KEYS)


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_whole_numbers_one_for_each_key(name: str) -> None:
    predictor = fresh(name)
    assert not predictor.scores.any(), "nothing is known before the first step"
    for counts in steps(0):
        predictor.observe_step(counts)
        assert predictor.scores.shape == (KEYS,) and predictor.scores.dtype == np.int64
        assert predictor.scores.min() >= 0
    assert predictor.scores.any(), "the test says something"


@pytest.mark.parametrize("name", NAMES)
def test_the_same_steps_give_the_same_scores(name: str) -> None:
    one, other = fresh(name), fresh(name)
    for counts in steps(1):
        one.observe_step(counts)
        other.observe_step(counts.copy())
        assert np.array_equal(one.scores, other.scores)


@pytest.mark.parametrize("name", NAMES)
def test_neither_counts_nor_earlier_scores_are_written_to(name: str) -> None:
    predictor = fresh(name)
    for counts in steps(2):
        before, kept, given = predictor.scores, predictor.scores.copy(), counts.copy()
        predictor.observe_step(counts)
        assert np.array_equal(before, kept) and np.array_equal(counts, given)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_that_did_not_run_keeps_its_scores(name: str) -> None:
    predictor = fresh(name)
    for counts in steps(3):
        predictor.observe_step(counts)
    without = copy.deepcopy(predictor)
    predictor.observe_step(np.full(KEYS, NOT_RUN))
    assert np.array_equal(predictor.scores, without.scores)
