"""Contract of eviction policies, and further guarantees of the packaged ones.

A new file in ``policies/`` is tested without a change here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from copy import deepcopy
from itertools import combinations

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_spac import components
from vllm_spac.cache.residency import Residency
from vllm_spac.decisions.policies._next_use import NextUse
from vllm_spac.decisions.policies.base import Policy, PolicyContext
from vllm_spac.decisions.policies.belady import Belady
from vllm_spac.decisions.policies.lfu import LFU
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.methods.moe_spac.utility_policy import Utility
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
KEYS = 8
NO_AGEING = 1 << 60

every_policy = pytest.mark.parametrize("name", [*components.names("policies"), "outside:Fifo"])
keys = st.integers(0, KEYS - 1)
row_counts = st.lists(st.integers(-1, 9), min_size=KEYS, max_size=KEYS).map(np.array)
prompts = st.integers(1, 3).flatmap(lambda rows: arrays(bool, (rows, KEYS)))
ops = st.lists(
    st.one_of(
        st.tuples(st.just("use"), keys),
        st.tuples(st.just("use"), keys),
        st.tuples(st.just("remove"), keys),
        st.tuples(st.just("evict"), st.integers(0, KEYS), st.sets(keys)),
        st.tuples(st.just("observe"), row_counts),
        st.tuples(st.just("observe_prompt"), prompts),
    ),
    max_size=60,
)


class Pins(Container):
    """The least that ``pinned`` promises: ``in`` and nothing else."""

    def __init__(self, pinned: Iterable[int]) -> None:
        self._pinned = frozenset(pinned)

    def __contains__(self, key: object) -> bool:
        return key in self._pinned


def use(policy: Policy, key: int) -> None:
    (policy.touch if key in policy else policy.insert)(key)


def filled(name: str, uses: Iterable[int] = (3, 1, 4, 1, 5, 2, 6, 5, 3, 5)) -> Policy:
    policy = components.build("policies", name)
    for key in uses:
        use(policy, key)
    return policy


@every_policy
def test_victims_one_by_one_are_the_victims_together(name: str) -> None:
    """ "The first to go first": a batch of misses evicts whom single misses would have evicted."""
    together, single = filled(name), filled(name)
    assert together.evict(4, Pins({6})) == [single.evict(1, Pins({6}))[0] for _ in range(4)]


@every_policy
@given(ops)
@settings(max_examples=examples(100), **BUSY)
def test_contract_holds_whatever_happens(name: str, ops: list[tuple]) -> None:
    """``plain`` never gets a call that must fail, so that any trace such a call leaves makes the two differ."""
    policy, plain = components.build("policies", name), components.build("policies", name)
    held: set[int] = set()
    for op in ops:
        if op[0] == "use":
            use(policy, op[1])
            use(plain, op[1])
            held.add(op[1])
        elif op[0] == "remove":
            if op[1] in held:
                policy.remove(op[1])
                plain.remove(op[1])
                held.remove(op[1])
        elif op[0] == "observe":
            before = op[1].copy()
            policy.observe(op[1])
            plain.observe(op[1])
            assert (op[1] == before).all(), "the counts are the caller's"
        elif op[0] == "observe_prompt":
            policy.observe_prompt(op[1])
            plain.observe_prompt(op[1])
        else:
            _, count, pinned = op
            if count > len(held - pinned):
                with pytest.raises(LookupError):
                    policy.evict(count, Pins(pinned))
            else:
                victims = policy.evict(count, Pins(pinned))
                assert len(set(victims)) == len(victims) == count
                assert set(victims) <= held - pinned
                assert plain.evict(count, Pins(pinned)) == victims, "not deterministic, or a failed evict left traces"
                held -= set(victims)
        assert len(policy) == len(held)
        assert {key for key in range(KEYS) if key in policy} == held
    assert policy.evict(len(held), Pins(())) == plain.evict(len(held), Pins(()))


@given(st.lists(row_counts, max_size=30), keys)
def test_reuse_knows_what_a_use_would_make_of_it(steps: list[np.ndarray], key: int) -> None:
    """By what it has learnt so far: the step itself would teach it more."""
    formula = Reuse().formula(1, KEYS, torch.device("cpu"))
    for counts in steps:
        formula.observe_counts(torch.from_numpy(counts))
    expected = float(formula.used[key])
    alone = torch.zeros(KEYS, dtype=torch.int64)
    alone[key] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextUse, "_fit", lambda *_: None)
        formula.observe_counts(alone)
    if steps:
        assert formula.kept[key] - 0.5 == expected, "half a step later than one that may be ahead"
    else:
        assert expected == 0, "before the first step all are alike"


@given(st.lists(row_counts, max_size=4), prompts, st.floats(0.5, 40.0))
@settings(max_examples=examples(100), **BUSY)
def test_the_last_rows_of_a_prompt_are_as_many_steps(
    steps: list[np.ndarray], rows: np.ndarray, half_life: float
) -> None:
    """To reuse's averages; the weights, which are fitted to steps, stay."""
    at_once, one_by_one = NextUse((2, half_life), KEYS), NextUse((2, half_life), KEYS)
    for each in (at_once, one_by_one):
        for counts in steps:
            each.observe(torch.from_numpy(counts))
    weights = at_once._weights.clone()
    at_once.observe_prompt(torch.from_numpy(rows))
    for row in rows:
        one_by_one.observe_prompt(torch.from_numpy(row[None]))
    np.testing.assert_allclose(at_once._shares, one_by_one._shares, atol=1e-6)
    np.testing.assert_allclose(at_once.probabilities, one_by_one.probabilities, rtol=1e-4)
    one_by_one._shares.zero_()
    one_by_one.observe_prompt(torch.ones(1, KEYS, dtype=torch.bool))
    np.testing.assert_allclose(one_by_one._shares, one_by_one._gains.expand(-1, KEYS), rtol=1e-6)
    assert (at_once._weights == weights).all()


@pytest.mark.parametrize(
    ("needs", "which"),
    [("on_device", ["lfu", "lru", "reuse", "utility"]), ("offline", ["belady"])],
)
def test_what_policies_need(needs: str, which: list[str]) -> None:
    kinds = {name: components.find("policies", name) for name in components.names("policies")}
    assert [name for name, kind in kinds.items() if getattr(kind, needs)] == which


def test_drop_evicts_past_layers_before_later_ones() -> None:
    """Layers of four keys; the running one is 1, and 3 and 0 wait: 3 comes sooner, so 0 goes before it."""
    policy = components.build("policies", "drop")
    for key in (0, 1):
        policy.insert(key)
    policy.begin_layer(range(0, 4))
    policy.touch(0)
    policy.insert(5)  # read ahead
    policy.insert(4)
    policy.begin_layer(range(4, 8))
    policy.touch(5)
    policy.insert(6)  # on demand
    for key in (13, 12, 2):
        policy.insert(key)
    assert deepcopy(policy).evict(8, ()) == [1, 0, 4, 5, 6, 2, 13, 12]
    assert policy.evict(3, {0, 5}) == [1, 4, 6] and policy.evict(2, ()) == [0, 5]
    policy.begin_layer(range(0, 4))
    assert policy.evict(1, ()) == [2], "of the running layer"
    policy.begin_layer(range(12, 16))
    policy.begin_layer(range(4, 8))
    assert policy.evict(2, ()) == [13, 12], "in the order in which they came"


def test_the_boundaries_of_utility_follow_the_drafts() -> None:
    """Those of the paper's variant; what is given, or not known, is left."""

    def starts(drafts: int | None, **knobs) -> float:
        policy = Utility.of(PolicyContext(4, 2, drafts), **knobs)
        policy.observe(np.zeros(KEYS, dtype=np.int64))
        return float(policy._estimator.up[0])

    assert [starts(drafts) for drafts in (None, 0, 4, 8, 16)] == [4, 1, 2, 4, 8]
    assert starts(16, gamma=4) == 2 and starts(0, variant="literal") == 4 and starts(16, boundaries=(3, 1)) == 3


@pytest.mark.parametrize("name", ["lru", "layer_lru", "lfu"])
def test_counts_mean_nothing_to_those_that_know_uses_only(name: str) -> None:
    policy = filled(name)
    policy.observe(np.arange(KEYS)[::-1].copy())
    assert policy.evict(6, Pins(())) == filled(name).evict(6, Pins(()))


class Against(RuleBasedStateMachine):
    """A policy beside a naive model that answers ``victims``: all that may go, the first to go first."""

    policy: Policy

    def victims(self, pinned: set[int]) -> list[int]:
        raise NotImplementedError

    def held(self) -> set[int]:
        return set(self.victims(set()))

    def used(self, key: int) -> None:
        raise NotImplementedError

    def gone(self, key: int) -> None:
        raise NotImplementedError

    @rule(key=keys)
    def use(self, key: int) -> None:
        use(self.policy, key)
        self.used(key)

    @precondition(lambda self: self.held())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held())))
        self.policy.remove(key)
        self.gone(key)

    @rule(count=st.integers(0, KEYS), pinned=st.sets(keys))
    def evict(self, count: int, pinned: set[int]) -> None:
        expected = self.victims(pinned)
        if count > len(expected):
            with pytest.raises(LookupError):
                self.policy.evict(count, pinned)
            return
        assert self.policy.evict(count, pinned) == expected[:count]
        for key in expected[:count]:
            self.gone(key)

    @invariant()
    def holds_the_same(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy) == len(self.held())
            assert {key for key in range(KEYS) if key in self.policy} == self.held()


class AgainstList(Against):
    """LRU: a list in the order of last use."""

    @initialize()
    def start(self) -> None:
        self.policy, self.order = LRU(), []

    def victims(self, pinned: set[int]) -> list[int]:
        return [key for key in self.order if key not in pinned]

    def used(self, key: int) -> None:
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)

    def gone(self, key: int) -> None:
        self.order.remove(key)


class AgainstDict(Against):
    """LFU: uses ever, and the time of the last use of those that are held; with ageing and without."""

    @initialize(half_life=st.sampled_from([NO_AGEING, NO_AGEING, 5]))
    def start(self, half_life: int) -> None:
        self.policy, self.half_life = LFU(half_life=half_life), half_life
        self.uses: dict[int, float] = dict.fromkeys(range(KEYS), 0.0)
        self.last: dict[int, int] = {}
        self.clock = 0

    def victims(self, pinned: set[int]) -> list[int]:
        return sorted(self.last.keys() - pinned, key=lambda key: (self.uses[key], self.last[key]))

    def used(self, key: int) -> None:
        self.clock += 1
        self.uses[key] += 1
        self.last[key] = self.clock
        if self.clock % self.half_life == 0:
            self.uses = {key: uses / 2 for key, uses in self.uses.items()}

    def gone(self, key: int) -> None:
        del self.last[key]


class AgainstScores(Against):
    """Utility: an estimator of its own, and the time of the last use; ``fresh`` are those used since ``observe``."""

    @initialize(recycle=st.booleans(), upper=st.sampled_from([1, 2, 4]))
    def start(self, recycle: bool, upper: int) -> None:
        self.policy = Utility(gamma=2, upper=upper, recycle=recycle)
        self.estimator, self.recycle = UtilityEstimator(KEYS, gamma=2, upper=upper), recycle
        self.last: dict[int, int] = {}
        self.fresh: set[int] = set()
        self.clock = 0

    def victims(self, pinned: set[int]) -> list[int]:
        def rank(key: int) -> tuple[int, int]:
            return 0 if self.recycle and key in self.fresh else int(self.estimator.scores[key]), self.last[key]

        return sorted(self.last.keys() - pinned, key=rank)

    def used(self, key: int) -> None:
        self.clock += 1
        self.last[key] = self.clock
        self.fresh.add(key)

    def gone(self, key: int) -> None:
        del self.last[key]

    @rule(key=keys)
    def insert_ahead(self, key: int) -> None:
        if key not in self.policy:
            self.policy.insert_ahead(key)
            self.used(key)
            self.fresh.discard(key)

    @invariant()
    def recycles_what_was_used(self) -> None:
        if hasattr(self, "policy"):
            recycled = {key for key in self.held() if key in self.policy.recycled}
            assert recycled == (self.held() & self.fresh if self.recycle else set())

    @rule(counts=row_counts)
    def observe(self, counts: np.ndarray) -> None:
        self.policy.observe(counts)
        self.estimator.observe_step(counts)
        self.fresh.clear()


for _machine in (AgainstList, AgainstDict, AgainstScores):
    _machine.TestCase.settings = settings(max_examples=examples(50), stateful_step_count=30, **BUSY)
TestLRU = AgainstList.TestCase
TestLFU = AgainstDict.TestCase
TestUtility = AgainstScores.TestCase


def test_lfu_ages_those_outside_too() -> None:
    """Else an expert evicted in its prime would come back as a favourite for ever."""
    policy = LFU(half_life=8)
    for key in [1] * 8:
        use(policy, key)
    policy.evict(1, ())
    for key in [2] * 24:  # 1 falls from 4 to 0.5
        use(policy, key)
    for key in (3, 3, 1):
        use(policy, key)
    assert policy.evict(1, {2}) == [1]


@pytest.mark.parametrize("knobs", [{"upper": 0}, {"variant": "mine"}, {"forget": 2}])
def test_utility_refuses_wrong_knobs_at_once(knobs: dict) -> None:
    with pytest.raises(ValueError, match="use"):
        Utility(**knobs)


def test_belady_notices_another_future() -> None:
    policy = Belady(future=[1])
    use(policy, 1)
    with pytest.raises(AssertionError, match="more often"):
        use(policy, 1)


def fewest_misses(batches: list[list[int]], slots: int) -> int:
    """By trying every set that could be kept."""
    states = {frozenset(): 0}
    for batch in batches:
        after: dict[frozenset, int] = {}
        for held, misses in states.items():
            others = held - set(batch)
            cost = misses + len(set(batch) - held)
            for size in range(min(len(others), slots - len(batch)) + 1):
                for kept in combinations(sorted(others), size):
                    state = frozenset(batch) | frozenset(kept)
                    after[state] = min(cost, after.get(state, cost))
        states = after
    return min(states.values())


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True), min_size=1, max_size=12),
    st.integers(3, 5),
)
@settings(max_examples=examples(100), **BUSY)
def test_belady_misses_as_little_as_possible(batches: list[list[int]], slots: int) -> None:
    residency = Residency(6, slots, Belady(future=[key for batch in batches for key in batch]))
    misses = 0
    for batch in batches:
        placement = residency.prepare(batch)
        misses += len(placement.loads)
        for key, _ in placement.loads:
            residency.finish_load(key)
        residency.release(batch)
    assert misses == fewest_misses(batches, slots)
