"""``layer_lru`` is one LRU cache per layer, and lends slots to a layer that needs more than its share at once."""

from __future__ import annotations

from collections import Counter

from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_spac.cache.residency import Residency
from vllm_spac.decisions.policies.layer_lru import LayerLRU
from vllm_spac.decisions.policies.lru import LRU

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
LAYERS, EXPERTS, SHARE = 3, 8, 4
KEYS = LAYERS * EXPERTS

few = st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=SHARE).map(sorted)
many = st.sets(st.integers(0, EXPERTS - 1), min_size=1).map(sorted)


class Served:
    """A pool whose slots are filled with an equal share of each layer, as at the start of serving."""

    def __init__(self, policy, slots: int) -> None:
        self.residency = Residency(KEYS, slots, policy)
        for layer in range(LAYERS):
            self._hold(range(layer * EXPERTS, layer * EXPERTS + slots // LAYERS + (layer < slots % LAYERS)))

    def layer(self, layer: int, experts: list[int]) -> int:
        """Returns the hits."""
        self.residency.policy.begin_layer(range(layer * EXPERTS, (layer + 1) * EXPERTS))
        return self._hold([layer * EXPERTS + expert for expert in experts])

    def shares(self) -> list[int]:
        held = Counter(key // EXPERTS for key in self.residency.owner.tolist())
        return [held[layer] for layer in range(LAYERS)]

    def _hold(self, keys) -> int:
        placement = self.residency.prepare(list(keys))
        for key, _ in placement.loads:
            self.residency.finish_load(key)
        self.residency.release(keys)
        self.residency.check_integrity()
        return placement.hits


@given(st.lists(st.tuples(few, few, few), max_size=15), st.integers(0, 2))
@settings(max_examples=examples(200), **BUSY)
def test_a_cache_a_layer(steps: list, more: int) -> None:
    """Beside a list of each layer; ``more`` slots than equal shares stay where they were at the start."""
    served = Served(LayerLRU(), LAYERS * SHARE + more)
    caches = [list(range(SHARE + (layer < more))) for layer in range(LAYERS)]
    for step in steps:
        for layer, (experts, cache) in enumerate(zip(step, caches, strict=True)):
            hits = [expert for expert in experts if expert in cache]
            misses = [expert for expert in experts if expert not in cache]
            cache[:] = ([expert for expert in cache if expert not in experts] + hits + misses)[-len(cache) :]
            assert served.layer(layer, experts) == len(hits)
            assert served.shares() == [len(cache) for cache in caches]


@given(st.lists(st.tuples(many, many, many), min_size=1, max_size=8), st.integers(EXPERTS, KEYS - 1))
@settings(max_examples=examples(200), **BUSY)
def test_what_a_prompt_borrows_comes_back(prompts: list, slots: int) -> None:
    """As soon as each layer misses as much as it has lent."""
    served = Served(LayerLRU(), slots)
    for prompt in prompts:
        for layer, experts in enumerate(prompt):
            served.layer(layer, experts)
    for turn in range(4 * EXPERTS):
        for layer in range(LAYERS):
            served.layer(layer, [turn % EXPERTS])
    assert max(served.shares()) - min(served.shares()) <= 1 and sum(served.shares()) == slots


def test_a_layer_does_not_pay_for_another() -> None:
    """Six slots: layer 0 goes through all its experts, layer 2 needs the same one again and again."""
    hits = {}
    for policy in (LRU(), LayerLRU()):
        served = Served(policy, 6)
        for _ in range(3):
            for expert in range(EXPERTS):
                served.layer(0, [expert])
            hits[type(policy)] = served.layer(2, [0])
    assert hits == {LRU: 0, LayerLRU: 1}


@given(st.permutations(range(KEYS)), st.integers(0, LAYERS - 1), st.integers(1, EXPERTS), st.integers(0, KEYS))
@settings(max_examples=examples(200), **BUSY)
def test_a_batch_of_misses_evicts_whom_single_misses_would(keys: list[int], layer: int, count: int, held: int) -> None:
    """Each newcomer takes its slot before the next victim is chosen."""
    asking = range(layer * EXPERTS, (layer + 1) * EXPERTS)
    together, single = LayerLRU(), LayerLRU()
    for policy in (together, single):
        for key in keys[:held]:
            policy.insert(key)
        policy.begin_layer(asking)
    newcomers = [key for key in asking if key not in keys[:held]][:count]
    if held < len(newcomers):
        return
    expected = []
    for key in newcomers:
        expected += single.evict(1, newcomers)
        single.insert(key)
    assert together.evict(len(newcomers), newcomers) == expected
