"""The slot state machine against a naive model, whatever the order of calls: a slot that is handed out while
a reader still uses it is a wrong token that no later check would find.
"""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_spac.cache.residency import NOWHERE, Placement, Residency, SlotState
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.policies.lfu import LFU
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.methods.moe_spac.utility_policy import Utility

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
KEYS, SLOTS = 12, 5
some_keys = st.lists(st.integers(0, KEYS - 1), unique=True, max_size=SLOTS + 2)


def snapshot(residency: Residency) -> str:
    """Everything it knows, private parts and the policy's included."""
    facts = {name: value for name, value in vars(residency).items() if name != "policy"}
    return f"{facts} {vars(residency.policy)}"


class Machine(RuleBasedStateMachine):
    """The model is a dictionary of what lies where and a set of pins; ``twin`` is a second policy, told the same."""

    make_policy: type[Policy]

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(KEYS, SLOTS, self.make_policy())
        self.twin = self.make_policy()
        self.slot: dict[int, int] = {}
        self.loading: set[int] = set()
        self.pinned: set[int] = set()

    def answer(self) -> st.SearchStrategy[int]:
        return st.sampled_from(sorted(self.loading))

    @rule(keys=some_keys)
    def prepare(self, keys: list[int]) -> None:
        keys = [key for key in keys if key not in self.pinned]
        missing = [key for key in keys if key not in self.slot]
        evictions = max(0, len(missing) - (SLOTS - len(self.slot)))
        frozen = self.pinned | self.loading | set(keys)
        may_go = self.slot.keys() - frozen
        before = snapshot(self.residency)
        if evictions > len(may_go):
            with pytest.raises(LookupError):
                self.residency.prepare(keys)
            assert snapshot(self.residency) == before, "not all or nothing"
            return
        victims = self.twin.evict(evictions, frozen)
        assert set(victims) <= may_go

        placement = self.residency.prepare(keys)
        waited = [key for key in keys if key in self.loading]
        assert placement.hits == len(keys) - len(missing) - len(waited)
        assert placement.waits == tuple((key, self.slot[key]) for key in waited)
        assert [key for key, _ in placement.loads] == missing
        for key in victims:
            del self.slot[key]
        for key in keys:
            if key not in missing:
                self.twin.touch(key)
        for key, slot in placement.loads:
            assert 0 <= slot < SLOTS and slot not in self.slot.values(), "a slot in use is handed out"
            self.slot[key] = slot
            self.twin.insert(key)
        self.loading |= set(missing)
        self.pinned |= set(keys)

    @rule(key=st.integers(0, KEYS - 1))
    def exchange(self, key: int) -> None:
        if key in self.slot:
            return
        self.twin.insert(key)
        victims = [] if len(self.slot) < SLOTS else self.twin.evict(1, self.pinned | self.loading)
        placement = self.residency.exchange(key)
        if victims == [key]:
            assert placement is None
            return
        for victim in victims:
            del self.slot[victim]
        ((loaded, slot),) = placement.loads
        assert loaded == key and placement.victims == tuple(victims) and slot not in self.slot.values()
        self.slot[key] = slot
        self.loading.add(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def loaded(self, data: st.DataObject) -> None:
        key = data.draw(self.answer())
        self.residency.finish_load(key)
        self.loading.remove(key)

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def failed(self, data: st.DataObject) -> None:
        key = data.draw(self.answer())
        self.residency.cancel_load(key)
        self.twin.remove(key)
        del self.slot[key]
        self.loading.remove(key)
        self.pinned.discard(key)

    @rule(keys=some_keys)
    def release(self, keys: list[int]) -> None:
        """Any that are not loading: also those that were never pinned, or whose load failed."""
        keys = [key for key in keys if key not in self.loading]
        self.residency.release(keys)
        self.pinned -= set(keys)

    @rule()
    def finish(self) -> None:
        """All loads arrive and all pins go, as at the end of a forward."""
        for key in self.loading:
            self.residency.finish_load(key)
        self.residency.release(list(self.pinned))
        self.loading, self.pinned = set(), set()

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), others=some_keys)
    def prepare_twice(self, data: st.DataObject, others: list[int]) -> None:
        key = data.draw(st.sampled_from(sorted(self.pinned)))
        before = snapshot(self.residency)
        with pytest.raises(AssertionError):
            self.residency.prepare([*(other for other in others if other != key), key])
        assert snapshot(self.residency) == before

    @precondition(lambda self: self.slot.keys() - self.loading)
    @rule(data=st.data())
    def answer_twice(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.slot.keys() - self.loading)))
        before = snapshot(self.residency)
        for call in (self.residency.finish_load, self.residency.cancel_load):
            with pytest.raises(AssertionError):
                call(key)
        assert snapshot(self.residency) == before

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Slots of resident keys never move; pinned keys never go."""
        self.residency.check_integrity()
        assert {key: int(slot) for key, slot in enumerate(self.residency.slot_of) if slot != NOWHERE} == self.slot
        states = {key: self.residency.state[slot] for key, slot in self.slot.items()}
        assert {key for key, state in states.items() if state == SlotState.LOADING} == self.loading
        assert self.pinned <= self.slot.keys()
        assert self.residency.resident == len(self.slot) - len(self.loading)
        assert {key for key in range(KEYS) if key in self.residency.policy} == self.slot.keys()
        for layer in (range(4), range(4, 8)):
            spare = [key for key in self.slot.keys() - self.pinned - self.loading if key not in layer]
            assert self.residency.spare(layer) == SLOTS - len(self.slot) + len(spare)


class WithLRU(Machine):
    make_policy = LRU


class WithLFU(Machine):
    make_policy = LFU


for _machine in (WithLRU, WithLFU):
    _machine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, **BUSY)
TestWithLRU = WithLRU.TestCase
TestWithLFU = WithLFU.TestCase


def ready(residency: Residency, *keys: int) -> Placement:
    placement = residency.prepare(keys)
    for key, _ in placement.loads:
        residency.finish_load(key)
    residency.release(keys)
    return placement


# -- ahead of need -------------------------------------------------------------------------------------------------

SCORES = np.array([0, 1, 2, 3, 2, 1])


def test_a_read_ahead_takes_the_slot_of_what_is_recycled_and_not_one_of_another_read_ahead() -> None:
    """MoE-SpAc, appendix D: an expert scores 0 after its layer, and what was read for a later layer keeps its score."""
    residency = Residency(6, 2, Utility(recycle=True))
    residency.policy.observe(np.array([9, 9, 9, 9, 9, 9]))
    scores = residency.policy.scores
    for key in (0, 1):
        ready(residency, key)
    assert residency.admit(4, scores) == Placement(0, ((4, 0),), victims=(0,))
    residency.finish_load(4)
    assert residency.admit(5, scores) == Placement(0, ((5, 1),), victims=(1,))
    residency.finish_load(5)
    assert residency.admit(3, scores) is None, "4 and 5 were not used yet, and score as much"
    residency.policy.observe(np.array([9, 9, 9, 9, 9, 9]))
    assert residency.admit(3, scores) is None
    residency.check_integrity()


@given(
    order=st.permutations(range(KEYS)),
    held=st.integers(SLOTS - 1, SLOTS),
    pinned=st.sets(st.integers(0, SLOTS - 1), max_size=2),
    soft=st.sets(st.integers(0, SLOTS + 1), min_size=1),
    needed=st.sets(st.integers(0, SLOTS + 3), min_size=1),
    policy=st.sampled_from([LRU, LFU]),
)
@settings(max_examples=examples(300), **BUSY)
def test_soft_pins_go_last_and_hinder_nobody(order, held, pinned, soft, needed, policy) -> None:
    """A call succeeds with them if it does without; and none is evicted while another one could be.

    Sets are of places in ``order``, whose first ``held`` keys are resident.
    """
    pinned, soft, needed = ({order[place] for place in places} for places in (pinned, soft, needed))
    plain, made = Residency(KEYS, SLOTS, policy()), Residency(KEYS, SLOTS, policy())
    for residency in (plain, made):
        for key in order[:held]:
            ready(residency, key)
        residency.prepare(sorted(pinned.intersection(order[:held])))
    made.soft = soft
    keys = sorted(needed - pinned)
    before, resident = snapshot(made), set(order[:held])
    try:
        expected = plain.prepare(keys)
    except LookupError:
        with pytest.raises(LookupError):
            made.prepare(keys)
        assert snapshot(made) == before
        return
    placement = made.prepare(keys)
    assert len(placement.victims) == len(expected.victims) and placement.hits == expected.hits
    stay = resident - pinned - set(keys) - set(placement.victims)
    assert not soft.intersection(placement.victims) or stay <= soft
    made.check_integrity()


@pytest.mark.parametrize("policy", [LRU, LFU])
def test_what_a_layer_uses_without_pins_stays_until_it_has_run(policy) -> None:
    residency = Residency(KEYS, 3, policy())
    for key in (0, 1, 2):
        ready(residency, key)
    assert residency.use(np.array([1, 2]))
    assert residency.admit_unless((3, 4), ()).victims == (0,), "3 has the slot of 0, and 4 none"
    assert residency.use(np.array([1, 2])), "3 is loading, and that concerns nobody else"
    assert not residency.use(np.array([1, 3]))
    residency.end_use()
    assert residency.admit_unless((4,), ()).victims
    residency.check_integrity()


@pytest.mark.parametrize("call", ["prepare", "admit", "exchange"])
def test_a_policy_that_gives_a_frozen_expert_away_is_stopped(call: str) -> None:
    class Careless(LRU):
        def evict(self, count, pinned):
            return super().evict(count, ())

    residency = Residency(6, 1, Careless())
    residency.admit(0, SCORES)
    with pytest.raises(AssertionError, match="frozen"):
        getattr(residency, call)(*{"prepare": ([3],), "admit": (3, SCORES), "exchange": (3,)}[call])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.slot_of.__setitem__(0, NOWHERE),
        lambda r: r.slot_of.__setitem__(3, 0),
        lambda r: r.owner.__setitem__(0, 3),
        lambda r: r.owner.__setitem__(0, NOWHERE),
        lambda r: r.state.__setitem__(0, SlotState.FREE),
        lambda r: r.state.__setitem__(2, SlotState.READY),
        lambda r: r._free.append(0),
        lambda r: r._free.pop(),
        lambda r: r.policy.remove(0),
        lambda r: r.policy.insert(3),
        lambda r: (r.policy.remove(0), r.policy.insert(3)),
        lambda r: r._pinned.add(3),
        lambda r: r._loading.add(0),
        lambda r: r.state.__setitem__(0, SlotState.LOADING),
    ],
)
def test_integrity_check_notices(spoil) -> None:
    residency = Residency(4, 3, LRU())
    ready(residency, 0, 1)
    residency.check_integrity()
    spoil(residency)
    with pytest.raises(AssertionError):
        residency.check_integrity()
