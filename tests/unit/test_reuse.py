"""Why ``reuse`` keeps what other policies evict: scans, phases, layers; and its order against a naive model."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_spac.cache.residency import Residency
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.policies.belady import Belady
from vllm_spac.decisions.policies.lfu import LFU
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.decisions.policies.reuse import Reuse

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
LAYERS, EXPERTS = 3, 8
KEYS = LAYERS * EXPERTS


def hits(policy: Policy, steps: list[list[list[int]]], slots: int, *, experts: int = EXPERTS) -> list[int]:
    """Hits of each step of ``steps[step][layer]``, which names experts."""
    residency, found = Residency(len(steps[0]) * experts, slots, policy), []
    for step in steps:
        counts, hit = np.zeros(len(step) * experts, dtype=np.int64), 0
        for layer, chosen in enumerate(step):
            keys = [layer * experts + expert for expert in chosen]
            policy.begin_layer(range(layer * experts, (layer + 1) * experts))
            placement = residency.prepare(keys)
            hit += placement.hits
            for key, _ in placement.loads:
                residency.finish_load(key)
            residency.release(keys)
            counts[keys] += 1
        policy.observe(counts)
        found.append(hit)
    return found


def counts_of(*selected: int) -> np.ndarray:
    counts = np.zeros(KEYS, dtype=np.int64)
    counts[list(selected)] = 1
    return counts


def seen(*steps: np.ndarray, held: range = range(KEYS), **knobs) -> Reuse:
    policy = Reuse(**knobs)
    policy.begin_layer(range(EXPERTS))
    for key in held:
        policy.insert(key)
    for counts in steps:
        policy.observe(counts)
    return policy


@pytest.mark.parametrize(("slots", "each_step"), [(6, 3), (8, 6), (9, 7.5), (10, 9)])
def test_a_scan_leaves_reuse_as_much_as_belady(slots: int, each_step: float) -> None:
    """4 experts in each of 3 layers, again and again: LRU and LFU drop what comes next."""
    steps = [[[0, 1, 2, 3]] * LAYERS] * 40
    future = [layer * EXPERTS + expert for step in steps for layer, chosen in enumerate(step) for expert in chosen]
    assert sum(hits(Reuse(), steps, slots)[-20:]) == sum(hits(Belady(future=future), steps, slots)[-20:])
    assert sum(hits(Reuse(), steps, slots)[-20:]) == 20 * each_step
    if slots <= 8:
        assert sum(hits(LRU(), steps, slots)) == sum(hits(LFU(), steps, slots)) == 0


def test_of_equals_the_layers_that_are_over_go_first_and_the_next_layer_last() -> None:
    policy = seen(counts_of(*range(KEYS)))
    policy.begin_layer(range(EXPERTS, 2 * EXPERTS))
    layers = [key // EXPERTS for key in policy.evict(KEYS, ())]
    assert layers == [1] * EXPERTS + [0] * EXPERTS + [2] * EXPERTS


@pytest.mark.parametrize("half_lives", [(), (0,), (4, -1)])
def test_refuses_wrong_half_lives(half_lives: tuple) -> None:
    with pytest.raises(ValueError, match="half_lives"):
        Reuse(half_lives=half_lives)


def naive_order(probabilities: np.ndarray, held: list[int], layer: int) -> list[int]:
    """From the definition: expected steps and layers to the next use, in float, the last first."""
    due = {}
    for key in held:
        ahead = (key // EXPERTS - layer - 1) % LAYERS + 1
        due[key] = LAYERS * (1 / probabilities[key] - 1) + ahead
    return sorted(held, key=lambda key: -due[key])


@given(
    st.lists(st.lists(st.integers(-1, 2), min_size=KEYS, max_size=KEYS).map(np.array), min_size=1, max_size=6),
    st.permutations(range(KEYS)).flatmap(lambda keys: st.integers(1, KEYS).map(lambda held: keys[:held])),
    st.integers(0, LAYERS - 1),
    st.sets(st.integers(0, KEYS - 1)),
    st.sampled_from([(4, 32), (6,), (1, 2, 3)]),
)
@settings(max_examples=examples(200), **BUSY)
def test_victims_are_those_expected_last(history, held, layer, pinned, half_lives) -> None:
    policy = Reuse(half_lives=half_lives)
    policy.begin_layer(range(EXPERTS))
    for key in held:
        policy.insert(key)
    for counts in history:
        policy.observe(counts)
    policy.begin_layer(range(layer * EXPERTS, (layer + 1) * EXPERTS))
    free = [key for key in held if key not in pinned]
    order = naive_order(policy.likely, held, layer)
    expected = [key for key in order if key not in pinned]
    victims = policy.evict(len(free), pinned)
    assert sorted(victims) == sorted(expected)
    p = policy.likely
    wait = [LAYERS * (1 / p[key] - 1) + (key // EXPERTS - layer - 1) % LAYERS + 1 for key in victims + expected]
    assert wait[: len(victims)] == pytest.approx(wait[len(victims) :], rel=1e-9)
    for (first, this), (second, then) in pairwise(zip(victims, wait, strict=False)):
        if this == then and first // EXPERTS == second // EXPERTS:
            assert held.index(first) < held.index(second), "among equals the one used longest ago"


@given(st.lists(st.integers(0, 2), min_size=KEYS, max_size=KEYS).map(np.array), st.sets(st.integers(0, KEYS - 1)))
@settings(max_examples=examples(100), **BUSY)
def test_a_few_victims_are_the_first_of_many(counts: np.ndarray, pinned: set[int]) -> None:
    """However few are looked at first, pins and ties included."""
    free = KEYS - len(pinned)
    every = seen(counts).evict(free, pinned)
    for count in range(free + 1):
        assert seen(counts).evict(count, pinned) == every[:count]
