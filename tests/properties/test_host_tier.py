"""Host memory between slots and store: whatever loads do, a row and a slot have the bytes that the tier says."""

from __future__ import annotations

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_spac import components
from vllm_spac.cache.host_tier import INCLUSIVE_FROM, HostMove, HostTier
from vllm_spac.cache.residency import NOWHERE

KEYS, SLOTS = 24, 3
TORN = -2


class World(RuleBasedStateMachine):
    """Slots and rows as lists of the experts whose bytes they have; loads begin, end, fail or are cancelled."""

    @initialize(
        policy=st.sampled_from(("lru", "reuse", "layer_lru")),
        rows=st.sampled_from((1, 2, 5, 12, 20, KEYS - SLOTS, KEYS - 1, KEYS)),
    )
    def start(self, policy: str, rows: int) -> None:
        self.tier = HostTier(KEYS, rows, SLOTS, components.build("policies", policy))
        self.slots = [NOWHERE] * SLOTS
        self.rows = [NOWHERE] * rows
        self.flying: dict[int, HostMove] = {}

    def begin(self, key: int, slot: int) -> HostMove | None:
        busy = {move.slot for move in self.flying.values()}
        if slot in busy or key in self.flying or key in self.slots:
            return None
        return self.tier.plan(key, slot)

    def perform(self, move: HostMove, fails: str) -> None:
        """``fails``: nowhere, before anything was copied, or while it was read."""
        saved = False
        if fails == "first":
            self.slots[move.slot] = TORN
            if move.row is not None:
                self.rows[move.row] = TORN
            self.tier.finish(move, read=False, saved=False)
            return
        if move.saved is not None:
            assert self.slots[move.slot] == move.saved, "another expert's bytes are saved"
            self.rows[move.row], saved = move.saved, True
        if fails == "read":
            self.slots[move.slot] = TORN
            self.tier.finish(move, read=False, saved=saved)
            return
        if move.source is not None:
            assert self.rows[move.source] == move.key, "another expert's bytes are loaded"
        self.slots = [NOWHERE if held == move.key else held for held in self.slots]
        self.slots[move.slot] = move.key
        if move.row is not None and move.saved is None:
            self.rows[move.row], saved = move.key, True
        self.tier.finish(move, read=True, saved=saved)

    @rule(
        key=st.integers(0, KEYS - 1),
        slot=st.integers(0, SLOTS - 1),
        fails=st.sampled_from(("", "", "", "first", "read")),
    )
    def load(self, key: int, slot: int, fails: str) -> None:
        if (move := self.begin(key, slot)) is not None:
            self.perform(move, fails)

    @rule(key=st.integers(0, KEYS - 1), slot=st.integers(0, SLOTS - 1))
    def fetch(self, key: int, slot: int) -> None:
        if (move := self.begin(key, slot)) is not None:
            self.flying[key] = move

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), fails=st.sampled_from(("", "", "first", "read")))
    def arrive(self, data: st.DataObject, fails: str) -> None:
        self.perform(self.flying.pop(data.draw(st.sampled_from(sorted(self.flying)))), fails)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.tier.cancel(self.flying.pop(data.draw(st.sampled_from(sorted(self.flying)))))

    @rule(layer=st.integers(0, 2))
    def begin_layer(self, layer: int) -> None:
        self.tier.policy.begin_layer(range(8 * layer, 8 * layer + 8))

    @rule(counts=st.lists(st.integers(-1, 3), min_size=KEYS, max_size=KEYS))
    def observe(self, counts: list[int]) -> None:
        self.tier.policy.observe(np.array(counts))

    @invariant()
    def rows_have_what_the_tier_says(self) -> None:
        for key in np.flatnonzero(self.tier.row_of != NOWHERE).tolist():
            assert self.rows[self.tier.row_of[key]] == key
        for slot, key in enumerate(self.tier._content.tolist()):
            assert key == NOWHERE or self.slots[slot] == key
        if not self.flying:
            self.tier.check_integrity()


TestHostTier = World.TestCase
TestHostTier.settings = settings(max_examples=examples(300), stateful_step_count=40, deadline=None)


def tier(rows: int, slots: int = SLOTS, policy: str = "lru") -> HostTier:
    return HostTier(KEYS, rows, slots, components.build("policies", policy))


def load(tier: HostTier, key: int, slot: int) -> HostMove:
    move = tier.plan(key, slot)
    tier.finish(move, read=True, saved=move.row is not None)
    return move


def test_an_expert_that_loses_its_slot_is_copied_to_a_row_and_comes_back_from_it() -> None:
    small = tier(rows=2)
    assert load(small, 7, 0) == HostMove(7, 0)
    assert load(small, 8, 0) == HostMove(8, 0, None, 7, 0)
    back = load(small, 7, 0)
    assert back.source == 0 and back.saved == 8 and small.held == 1, "7 left its row when it got its slot"
    small.check_integrity()


def test_with_many_rows_an_expert_keeps_its_row() -> None:
    large = tier(rows=INCLUSIVE_FROM * SLOTS)
    assert large.inclusive and load(large, 7, 0) == HostMove(7, 0, None, None, 0)
    assert load(large, 8, 0).saved is None, "7 has a row already"
    assert load(large, 7, 1) == HostMove(7, 1, source=0) and large.held == 2


@pytest.mark.parametrize("rows", [4, 12])
@given(keys=st.lists(st.integers(0, KEYS - 1), max_size=80))
@settings(max_examples=examples(50), deadline=None)
def test_slots_and_rows_together_are_one_cache(rows: int, keys: list[int]) -> None:
    """With one slot and LRU, exclusive rows hold the last different experts before the one in the slot.

    One less after an exchange of full rows: the expert that leaves the slot needs a row while the other's is read.
    """
    one, recent = tier(rows, slots=1), []
    one.inclusive = False
    for key in keys:
        if recent and recent[-1] == key:
            continue
        move = load(one, key, 0)
        found = move.source is not None
        assert found or key not in recent[-rows:-1]
        assert not found or key in recent[-1 - rows : -1]
        recent = [other for other in recent if other != key] + [key]
