"""The loader's bookkeeping under any order of events: residency, queue and prefetcher are the real ones, and reads
ahead
begin, end, fail and are dropped under control of the test. A million transitions in `make test-full`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from vllm_spac import components
from vllm_spac.cache.link import Moved
from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Placement, Residency, SlotState
from vllm_spac.errors import StoreError
from vllm_spac.recording.metrics import Counters

BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # the machine may be, and that is no failure
LAYERS, EXPERTS, TOP = 3, 6, 4
KEYS = LAYERS * EXPERTS
TORN = -1
POLICIES = [name for name in components.names("policies") if not components.find("policies", name).offline]


class Ahead:
    """Stands in for ``Background``: reads begin and end on command. ``content`` is what each slot holds."""

    def __init__(self, content: list[int]) -> None:
        self.content = content
        self.slot: dict[int, int] = {}
        self.begun: dict[int, Moved | BaseException | None] = {}  # None while it is being read
        self.failing: set[int] = set()
        self.interrupt = self.closed = False

    @property
    def keys(self):
        return self.slot.keys()

    def fetch(self, loads) -> None:
        for key, slot in loads:
            assert key not in self.slot and slot not in self.slot.values()
            self.slot[key] = slot
            if self.closed:
                self.begun[key] = StoreError("dropped")

    def cancel(self, keys) -> list[int]:
        gone = [key for key in keys if key not in self.begun]
        for key in gone:
            del self.slot[key]
        return gone

    def take_finished(self) -> dict:
        return {key: self._tell(key) for key in list(self.slot) if self.begun.get(key) is not None}

    def wait(self, keys) -> dict:
        assert set(keys) <= self.begun.keys(), "waits for what nobody reads"
        if self.interrupt:
            raise KeyboardInterrupt
        for key in keys:
            self.end(key)
        return {key: self._tell(key) for key in keys}

    def begin(self, key: int) -> None:
        self.begun.setdefault(key, None)
        if self.begun[key] is None:
            self.content[self.slot[key]] = TORN

    def end(self, key: int) -> None:
        if self.begun[key] is None:
            bad = key in self.failing
            self.content[self.slot[key]] = TORN if bad else key
            self.begun[key] = StoreError(f"{key} is gone") if bad else Moved("double", 1)

    def _tell(self, key: int) -> Moved | BaseException:
        del self.slot[key]
        return self.begun.pop(key)


class Transfers:
    clock = staticmethod(time.monotonic)

    def __init__(self, slots: int) -> None:
        self.content = [TORN] * slots
        self.ahead = Ahead(self.content)
        self.failing: set[int] = set()
        self.interrupt = False

    def load(self, loads, counters) -> dict[int, Exception]:
        failed = {}
        for number, (key, slot) in enumerate(loads):
            assert slot not in self.ahead.slot.values(), "two reads into one slot"
            if self.interrupt and number == len(loads) // 2:
                raise KeyboardInterrupt
            bad = key in self.failing or self.ahead.closed
            self.content[slot] = TORN if bad else key
            if bad:
                failed[key] = StoreError(f"{key} is gone")
            elif counters is not None:
                counters.loads += 1
                counters.count_bytes("double", 1)
        return failed

    def begin_layer(self, layer: range) -> None: ...

    def observe(self, counts: np.ndarray) -> None: ...

    def observe_prompt(self, rows: np.ndarray) -> None: ...

    def close(self) -> None:
        for key in list(self.ahead.slot):
            self.ahead.begun.setdefault(key, StoreError("dropped"))
            self.ahead.end(key)
        self.ahead.closed = True


class Watched(Residency):
    def admit(self, key: int, scores: np.ndarray) -> Placement | None:
        frozen, free = self._frozen(), (self.state == SlotState.FREE).any()
        worse = [k for k in self.owner.tolist() if k != NOWHERE and k not in frozen and scores[k] < scores[key]]
        placement = super().admit(key, scores)
        assert (placement is None) == (not free and not worse)
        assert placement is None or set(placement.victims) <= set([] if free else worse), "a better one went"
        return placement


class World:
    """One loader, and what must be true of it. Every method is a transition."""

    transitions = 0

    def __init__(self, policy: str, slots: int, knobs: PrefetchSettings, poison: bool = False) -> None:
        self.slots, self.knobs = slots, knobs
        self.counters = Counters()
        self.residency = Watched(KEYS, slots, components.build("policies", policy))
        self.transfers = Transfers(slots)
        self.ahead = self.transfers.ahead
        self.loader = ExpertLoader(self.residency, self.transfers, self.counters, EXPERTS, knobs)
        if poison:
            account = self.loader.prefetcher.account
            account.add_placement = partial(self.poisoned, account.add_placement)
        self.held: list[list[int]] = []
        self.in_use: list[int] = []

    def poisoned(self, placed: Callable[[Placement], None], placement: Placement) -> None:
        """Slots are torn until they are loaded."""
        placed(placement)
        for _, slot in placement.loads:
            self.transfers.content[slot] = TORN

    def use(self, layer: int, experts: list[int]) -> None:
        if self.held or not experts:
            return
        keys = [layer * EXPERTS + expert for expert in experts]
        arrived = {key for key, result in self.ahead.begun.items() if isinstance(result, Moved)}
        there = all(self.is_ready(key) or key in arrived for key in keys)
        assert self.loader.use(np.array(keys)) == there
        self.in_use = keys if there else []

    def hold(self, layer: int, experts: list[int], failing: set[int], interrupt: str = "") -> None:
        pinned = {key for keys in self.held for key in keys}
        keys = [layer * EXPERTS + expert for expert in experts if layer * EXPERTS + expert not in pinned]
        needed = {key for key in keys if not self.is_ready(key)}
        self.in_use = []
        self.transfers.failing, self.ahead.failing = failing, failing
        self.transfers.interrupt, self.ahead.interrupt = interrupt == "load", interrupt == "wait"
        try:
            missed = self.loader.hold(keys, self.counters)
        except LookupError:
            assert len(pinned) + len(keys) > self.slots, "a forward fails for slots that nobody needs"
        except StoreError as error:
            assert self.ahead.closed or any(f"{key} is gone" in str(error) for key in needed & failing), "without cause"
        except KeyboardInterrupt:
            assert interrupt
        else:
            assert len(pinned) + len(keys) <= self.slots
            assert set(missed) <= needed and len(set(missed)) == len(missed)
            assert not failing & set(missed) or all(self.is_ready(key) for key in keys)
            self.held.append(keys)
        self.transfers.failing = self.ahead.failing = set()
        self.transfers.interrupt = self.ahead.interrupt = False

    def release(self, number: int) -> None:
        if self.held:
            self.loader.residency.release(self.held.pop(number % len(self.held)))

    def end_step(self, counts: np.ndarray | None) -> None:
        self.in_use = []
        if not self.ahead.closed:
            self.loader.end_step(counts)

    def begin(self, number: int) -> None:
        waiting = [key for key in self.ahead.keys if key not in self.ahead.begun]
        if waiting:
            self.ahead.begin(waiting[number % len(waiting)])

    def end(self, number: int, fails: bool) -> None:
        reading = [key for key, result in self.ahead.begun.items() if result is None]
        if reading:
            key = reading[number % len(reading)]
            self.ahead.failing = {key} if fails else set()
            self.ahead.end(key)

    def close(self) -> None:
        self.loader.close()

    def random(self, rng: random.Random) -> None:
        """Any transition but the last."""
        kind = rng.choices(["use", "hold", "release", "end_step", "begin", "end"], [6, 4, 4, 2, 4, 4])[0]
        if kind == "use":
            layer = rng.randrange(LAYERS)
            ready = [e for e in range(EXPERTS) if self.is_ready(layer * EXPERTS + e)] if rng.random() < 0.8 else []
            self.use(layer, rng.sample(ready or range(EXPERTS), rng.randint(0, min(TOP, len(ready) or TOP))))
        elif kind == "hold":
            experts = rng.sample(range(EXPERTS), rng.randint(0, TOP))
            failing = set(rng.sample(range(KEYS), 3)) if rng.random() < 0.1 else set()
            self.hold(rng.randrange(LAYERS), experts, failing, rng.choices(["", "load", "wait"], [20, 1, 1])[0])
        elif kind == "release":
            self.release(rng.randrange(8))
        elif kind == "end_step":
            counts = [rng.choice((0, 0, 1, 5, 9)) for _ in range(KEYS)]
            self.end_step(None if rng.random() < 0.1 else np.array(counts))
        elif kind == "begin":
            self.begin(rng.randrange(8))
        else:
            self.end(rng.randrange(8), rng.random() < 0.1)
        self.check()

    def is_ready(self, key: int) -> bool:
        slot = self.residency.slot_of[key]
        return slot != NOWHERE and self.residency.state[slot] == SlotState.READY

    def check(self) -> None:
        World.transitions += 1
        residency, counters = self.residency, self.counters
        residency.check_integrity()
        for slot, (key, state) in enumerate(zip(residency.owner.tolist(), residency.state.tolist(), strict=True)):
            assert state != SlotState.READY or self.transfers.content[slot] == key, "a slot holds something else"
        assert residency._loading == set(self.ahead.keys), "a load that nobody reads, or a read that nobody awaits"
        assert all(residency.slot_of[key] == slot for key, slot in self.ahead.slot.items())
        assert residency._pinned == {key for keys in self.held for key in keys}
        assert all(self.is_ready(key) for key in [*residency._pinned, *self.in_use])
        assert len(self.ahead.keys) <= self.knobs.depth
        unused = self.loader.prefetcher.account.unused
        assert all(self.is_ready(key) for key in unused)
        assert counters.prefetches == counters.prefetch_hits + counters.prefetch_wasted + len(unused)
        assert counters.prefetches == counters.bytes.get("double ahead", 0)
        assert counters.prefetch_late <= counters.prefetches and counters.loads == counters.bytes.get("double", 0)


class Machine(RuleBasedStateMachine):
    """``burst`` transitions at once are cheaper for hypothesis; those that it makes itself shrink better."""

    burst = 0

    @initialize(
        policy=st.sampled_from(POLICIES),
        slots=st.integers(TOP, KEYS - 1),
        depth=st.integers(1, KEYS),
        threshold=st.integers(1, 2),
        extra=st.sampled_from([None, 0.1, 0.5]),
        poison=st.booleans(),
    )
    def start(self, policy: str, slots: int, depth: int, threshold: int, extra: float | None, poison: bool) -> None:
        knobs = PrefetchSettings(
            prefetch="utility", depth=depth, threshold=threshold, options={"gamma": 2}, extra=extra
        )
        self.start_world = lambda: setattr(self, "world", World(policy, slots, knobs, poison))
        self.start_world()
        self.world.check()

    @rule(
        layer=st.integers(0, LAYERS - 1),
        experts=st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=TOP),
        failing=st.one_of(st.just(set()), st.sets(st.integers(0, KEYS - 1), max_size=4)),
        interrupt=st.sampled_from(["", "", "", "", "load", "wait"]),
    )
    def hold(self, layer: int, experts: list[int], failing: set[int], interrupt: str) -> None:
        self.world.hold(layer, experts, failing, interrupt)
        self.world.check()

    @rule(layer=st.integers(0, LAYERS - 1), experts=st.lists(st.integers(0, EXPERTS - 1), unique=True, max_size=TOP))
    def use(self, layer: int, experts: list[int]) -> None:
        self.world.use(layer, experts)
        self.world.check()

    @rule(number=st.integers(0, 7))
    def release(self, number: int) -> None:
        self.world.release(number)
        self.world.check()

    @rule(counts=st.one_of(st.none(), st.lists(st.integers(-1, 9), min_size=KEYS, max_size=KEYS).map(np.array)))
    def end_step(self, counts: np.ndarray | None) -> None:
        self.world.end_step(counts)
        self.world.check()

    @rule(number=st.integers(0, 7))
    def begin(self, number: int) -> None:
        self.world.begin(number)
        self.world.check()

    @rule(number=st.integers(0, 7), fails=st.booleans())
    def end(self, number: int, fails: bool) -> None:
        self.world.end(number, fails)
        self.world.check()

    @rule(seed=st.integers(0, 2**32))
    def close(self, seed: int) -> None:
        """In the middle of whatever it is: what is asked for then is there or fails, and nothing hangs."""
        self.world.close()
        rng = random.Random(seed)
        for _ in range(10):
            self.world.random(rng)
        self.start_world()

    @rule(seed=st.integers(0, 2**32))
    def many(self, seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(self.burst):
            self.world.random(rng)


def drive(transitions: int, burst: int, examples: int) -> None:
    """Run the machine until there were so many."""
    machine, end = type("Driven", (Machine,), {"burst": burst}), World.transitions + transitions
    machine.TestCase.settings = settings(max_examples=examples, stateful_step_count=40, **BUSY)
    while World.transitions < end:
        machine.TestCase("runTest").runTest()


def test_any_order_of_events() -> None:
    drive(20_000, burst=60, examples=60)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_million_transitions() -> None:
    drive(1_000_000, burst=400, examples=250)
