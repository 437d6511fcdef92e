"""The utility estimator against Algorithm 1 written down expert by expert."""

from __future__ import annotations

import math

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator


class Expert:
    """One expert, line by line as in the paper and, for ``released``, in the authors' code."""

    def __init__(self, gamma: int, upper: int, forget: float, variant: str, boundaries=None) -> None:
        self.upper, self.forget, self.variant, self.boundaries = upper, forget, variant, boundaries
        self.score, self.last = 0, 0
        self.up = self.down = max(1, gamma // 2) if variant == "paper" else gamma // 2
        if boundaries:
            self.up, self.down = boundaries

    def step(self, count: int) -> int:
        if count == -1:
            return self.score
        if self.variant == "released":
            if count - self.score >= 5:
                self.score = min(self.upper, self.score + 1)
            elif self.score - count >= 1:
                self.score = max(0, self.score - 1)
            return self.score
        delta, self.last = count - self.last, count
        if delta >= math.floor(self.up):
            self.score = min(self.upper, self.score + 1)
        elif -delta >= math.floor(self.down):
            self.score = max(0, self.score - 1)
        if self.boundaries:
            return self.score
        if delta > 0:
            self.up = self.moved(self.up, delta)
        elif delta < 0:
            self.down = self.moved(self.down, -delta)
        return self.score

    def moved(self, boundary: float, change: int) -> float:
        new = (1 - self.forget) * boundary + self.forget * change
        return math.floor(new) if self.variant == "literal" else max(1.0, new)


def update(estimator: UtilityEstimator, counts: np.ndarray) -> np.ndarray:
    """The scores after a step."""
    estimator.observe_step(counts)
    return estimator.scores


observed = st.integers(-1, 12) | st.integers(0, 3 * 4096).map(lambda votes: votes / 4096)  # rows, or their votes
variants = st.sampled_from(["paper", "literal", "released"])


@given(
    counts=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(observed, min_size=n, max_size=n), min_size=1, max_size=30)
    ),
    gamma=st.integers(0, 12),
    upper=st.integers(1, 8),
    forget=st.sampled_from([0.0, 0.1, 0.3, 1.0]),
    variant=variants,
    fixed=st.sampled_from([None, None, (3, 1), (1, 2)]),
)
@settings(max_examples=examples(400), deadline=None)
def test_agrees_with_the_loop(counts, gamma, upper, forget, variant, fixed):
    boundaries = None if variant == "released" else fixed
    estimator = UtilityEstimator(len(counts[0]), gamma, upper, forget, variant, boundaries=boundaries)
    twins = [Expert(gamma, upper, forget, variant, boundaries) for _ in counts[0]]
    for step in counts:
        assert update(estimator, np.array(step)).tolist() == [twin.step(f) for twin, f in zip(twins, step, strict=True)]


def test_first_steps_by_hand():
    """gamma = 8: both boundaries start at 4. 5 -> up; 5 again -> stays; 1 -> down; 9 -> up."""
    estimator = UtilityEstimator(1)
    assert [int(update(estimator, np.array([f]))[0]) for f in (5, 5, 1, 9)] == [1, 1, 0, 1]
    assert estimator.up[0] == pytest.approx(0.9 * (0.9 * 4 + 0.1 * 5) + 0.1 * 8)
    assert estimator.down[0] == pytest.approx(4.0)


def test_scores_are_replaced_and_not_written_to():
    estimator = UtilityEstimator(1)
    before = estimator.scores
    assert update(estimator, np.array([9]))[0] == 1 and before[0] == 0


@pytest.mark.parametrize(
    "knobs",
    [
        {"num_experts": 0},
        {"num_experts": 1, "gamma": -1},
        {"num_experts": 1, "upper": 0},
        {"num_experts": 1, "forget": 1.5},
        {"num_experts": 1, "variant": "mine"},
        {"num_experts": 1, "variant": "released", "boundaries": (3, 1)},
        {"num_experts": 1, "boundaries": (-1, 1)},
    ],
)
def test_refuses(knobs):
    with pytest.raises(ValueError, match="use|only"):
        UtilityEstimator(**knobs)


@pytest.mark.parametrize("counts", [[1], [1, 2, 3], [-0.5, 1.0], [float("nan"), 0], [-2, 0]])
def test_malformed_counts(counts):
    with pytest.raises(AssertionError):
        update(UtilityEstimator(2), np.array(counts))
