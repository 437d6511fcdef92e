"""The estimate behind ``reuse``: a naive model of it, what it learns, and that no history breaks it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.decisions.policies._next_use import NextUse

HALF_LIVES = (2.0, 8.0, 32.0)
KEYS = 64


def observe(estimate: NextUse, counts: np.ndarray) -> None:
    estimate.observe(torch.from_numpy(counts))


def fitted(steps: list[np.ndarray], half_lives: tuple[float, ...] = HALF_LIVES) -> NextUse:
    estimate = NextUse(half_lives, len(steps[0]))
    for counts in steps:
        observe(estimate, counts)
    return estimate


def naive(steps: list[np.ndarray]) -> np.ndarray:
    """The recursion as it is written down, key by key, in float64."""
    gains = [1 - 0.5 ** (1 / half_life) for half_life in HALF_LIVES]
    shares, keep = [[0.0] * len(steps[0]) for _ in gains], 0.5 ** (1 / 200)
    weights, hessian = np.array([0.0] + [1 / len(gains)] * len(gains)), np.eye(len(gains) + 1)

    def row(key: int) -> np.ndarray:
        pairs = [(s[key], g / 4) for s, g in zip(shares, gains, strict=True)]
        return np.array([1.0] + [np.log((s + f) / (1 - s + f)) for s, f in pairs])

    def predicted(key: int) -> float:
        return float(1 / (1 + np.exp(-np.clip(weights @ row(key), -20, 20))))

    for number, counts in enumerate(steps):
        if number:
            ran = [key for key, count in enumerate(counts) if count >= 0]
            hessian = keep * hessian + (1 - keep) * np.eye(len(weights))
            gradient = np.zeros(len(weights))
            for key in ran:
                p = predicted(key)
                hessian = hessian + np.outer(row(key), row(key)) * max(p * (1 - p), 1e-3)
                gradient += row(key) * ((counts[key] > 0) - p)
            change = np.linalg.solve(hessian, gradient)
            weights = weights + change * min(1.0, 1 / max(np.linalg.norm(change), 1e-30))
        for share, gain in zip(shares, gains, strict=True):
            for key, count in enumerate(counts):
                if count >= 0:
                    share[key] += gain * ((count > 0) - share[key])
    return np.array([predicted(key) for key in range(len(steps[0]))])


def popular(rng: np.random.Generator) -> np.ndarray:
    """Experts of fixed and different popularity, each step drawn anew."""
    return (rng.random(KEYS) < np.linspace(0.02, 0.6, KEYS)).astype(int)


def local(rng: np.random.Generator, before: np.ndarray) -> np.ndarray:
    """Nine of ten experts stay selected or not; all are equally popular."""
    return np.where(rng.random(KEYS) < 0.9, before, rng.random(KEYS) < 0.2).astype(int)


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_recursion(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [np.where(rng.random(KEYS) < 0.1, -1, popular(rng)) for _ in range(25)]
    # float32 features and a Hessian of condition up to 1e4 leave three digits
    assert fitted(steps).probabilities.numpy() == pytest.approx(naive(steps), rel=1e-3, abs=1e-4)


def test_it_learns_what_the_routing_is_like() -> None:
    """After an expert was used once: it comes back where routing is local, and is as rare as before where it is not."""
    rng, now = np.random.default_rng(0), np.zeros(KEYS, dtype=int)
    flat, near = NextUse(HALF_LIVES, KEYS), NextUse(HALF_LIVES, KEYS)
    for _ in range(600):
        now = local(rng, now)
        observe(flat, popular(rng)), observe(near, now)
    rarest = int(flat.probabilities[:8].argmin())
    once = np.zeros(KEYS, dtype=int)
    once[rarest] = 1
    observe(flat, once), observe(near, once)
    assert flat.probabilities[rarest] < 0.1 and near.probabilities[rarest] > 3 * flat.probabilities[rarest]


def test_it_follows_routing_that_changes_its_kind() -> None:
    rng, now = np.random.default_rng(1), np.zeros(KEYS, dtype=int)
    estimate = fitted([popular(rng) for _ in range(500)])
    losses = []
    for _ in range(400):
        now = local(rng, now)
        p = estimate.probabilities.numpy()
        losses.append(-np.log(np.where(now > 0, p, 1 - p)).mean())
        observe(estimate, now)
    ideal = 0.9 * -np.log(0.92) + 0.1 * 0.5 * -(np.log(0.08))  # roughly: most stay
    assert np.mean(losses[-100:]) < 0.75 * np.mean(losses[:30])
    assert np.mean(losses[-100:]) < 2 * ideal


def test_a_share_halves_in_a_half_life() -> None:
    once, never = np.ones(KEYS, dtype=int), np.zeros(KEYS, dtype=int)
    estimate = fitted([once, *[never] * 5], half_lives=(5.0,))
    assert estimate._shares[0].numpy() == pytest.approx((1 - 0.5 ** (1 / 5)) / 2)


def test_many_experts_are_sampled_in_turn() -> None:
    """Each is fitted to in one step of two, and all of them together, also where the last turn has fewer."""
    estimate, found = NextUse(HALF_LIVES, 3001), []
    estimate._fit = lambda features, counts, predicted: found.extend(counts[counts >= 0].tolist())
    for _ in range(estimate._strides):
        observe(estimate, np.arange(3001))
    assert estimate._strides == 2 and sorted(found) == list(range(3001))


@given(
    st.lists(
        st.one_of(
            st.just(np.zeros(8, dtype=int)),
            st.just(np.ones(8, dtype=int)),
            st.just(np.full(8, -1)),
            st.lists(st.integers(-1, 3), min_size=8, max_size=8).map(np.array),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(1, 40),
)
@settings(max_examples=examples(100))
def test_no_history_breaks_it(steps: list[np.ndarray], times: int) -> None:
    """Also one that was constant for long, which leaves nothing to learn, and then is not."""
    estimate = fitted([counts for counts in steps for _ in range(times)])
    for p in (estimate.probabilities, estimate.if_used()):
        assert p.isfinite().all() and (p > 0).all() and (p < 1).all()
    assert estimate._weights.isfinite().all()
