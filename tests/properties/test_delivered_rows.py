"""Rows of host memory in every order of the two sides: what a layer reads is its expert, or the step has an error.

The host's part is the product's own (``ExpertDelivery``), the device is a queue of single operations. The host begins
steps ahead of it, a thread answers at any time, and an event is reached when the device comes to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from interleavings import ModelEvent
from memory_store import MemoryStore
from vllm_spac.kernels.types import STREAMED, UNUSED

from vllm_spac import components
from vllm_spac.cache.host_tier import HostTier
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.cache.transfers import HostRows
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.execution.exchange import Stream
from vllm_spac.execution.expert_delivery import ExpertDelivery
from vllm_spac.storage.base import allocate
from vllm_spac.system.host_blocks import HostBlock

LAYERS, EXPERTS = 2, 3
SHAPE = MoEShape(("a", "b"), EXPERTS, 1, {"w": TensorSpec((1,), torch.float32)})


class Disk(MemoryStore):
    addressable = False

    def in_reach(self, key: int) -> bool:
        return False

    def staging(self) -> dict[str, torch.Tensor]:
        return self._places

    def read(self, key: int, into: Any) -> int:
        self.failing -= 1
        if self.failing == 0:
            raise StoreError("spac: bad sector")
        into["w"].fill_(float(key))
        return 4


class Now:
    """Reads in the calling thread."""

    def submit(self, work: Callable, *arguments: Any) -> Future:
        done: Future = Future()
        try:
            done.set_result(work(*arguments))
        except StoreError as error:
            done.set_exception(error)
        return done

    def shutdown(self, **options: Any) -> None: ...


class Queue(Stream):
    """What the device will do, one operation after another."""

    def __init__(self) -> None:
        self.work: list[tuple] = []
        self.reached: set[int] = set()
        self.names = 0

    def submit(self, work: Callable, *arguments: Any) -> None:
        self.work.append((work, *arguments))

    def record(self) -> ModelEvent:
        self.names += 1
        self.work.append((self.reached.add, self.names))
        return ModelEvent(self.names, self.reached)

    def wait(self, event: ModelEvent) -> None: ...


class Sides:
    """Host, thread and device; ``steps``: of each, the experts of its layers."""

    def __init__(self, steps: list[list[list[int]]], rows: int, failing: int, monkeypatch: Any) -> None:
        self.steps, self.failing = steps, failing
        store = Disk(SHAPE, "")
        store._places, store.failing = allocate(SHAPE.tensors, EXPERTS, "cpu"), failing
        tier = HostTier(SHAPE.total, rows, 0, components.build("policies", "lru"))
        self.rows = HostRows(tier, HostBlock(SHAPE.tensors, rows, pin=False))
        memory = SimpleNamespace(device=torch.device("cpu"), sent=lambda tensor: tensor)
        self.queue = Queue()
        with monkeypatch.context() as patch:
            patch.setattr(ExpertDelivery, "_serve", lambda self: None)  # the walk says when it looks
            self.delivery = ExpertDelivery(store, 1, memory, self.queue, self.rows)
        self.delivery._readers.shutdown()
        self.delivery._readers = Now()
        self.ran: list[list[int]] = []  # steps whose report the host has not applied
        self.begun, self.error = 0, None
        self.at = {key: 0 for key in range(SHAPE.total)}  # what ``hosts`` of the kernels has

    def able(self) -> list[Callable[[], None]]:
        orders = self.delivery.mail[0]
        found = [self.begin] if self.begun < len(self.steps) and not self.error else []
        if int(orders.asked) != int(orders.answered) and not int(orders.ended):
            found.append(self.answer)
        if self.queue.work and not (self.queue.work[0][0] == self.wait and not self.is_answered()):
            found.append(self.run)
        return found

    def begin(self) -> None:
        for used in self.ran:
            counts = np.zeros(SHAPE.total, dtype=np.int64)
            counts[used] = 1
            self.delivery.observe(counts, np.where(counts, STREAMED, UNUSED))
        self.ran.clear()
        self.delivery.begin(np.full(SHAPE.total, NOWHERE))
        for keys in (step := self.steps[self.begun]):
            self.queue.work += [(self.order, keys), (self.wait,), (self.note,)]
            self.queue.work += [operation for key in keys for operation in ((self.look, key), (self.read, key))]
        self.queue.work.append((self.ran.append, [key for keys in step for key in keys]))
        self.begun += 1

    def answer(self) -> None:
        try:
            self.delivery._answer(int(self.delivery.mail[0].asked))
        except StoreError as error:
            self.delivery._end(error)

    def run(self) -> None:
        work, *arguments = self.queue.work.pop(0)
        work(*arguments)

    # -- the device, as ``wait_for_experts`` -------------------------------------------------------------------

    def order(self, keys: list[int]) -> None:
        orders, reach = self.delivery.mail
        self.wanted = [key for key in keys if int(reach.place_of[key]) < 0]
        if self.wanted:
            orders.keys[: len(self.wanted)] = torch.tensor(self.wanted)
            orders.ordered[0] = len(self.wanted)
            orders.asked[0] += 1

    def is_answered(self) -> bool:
        orders = self.delivery.mail[0]
        return int(orders.asked) == int(orders.answered) or bool(int(orders.ended))

    def wait(self) -> None:
        orders = self.delivery.mail[0]
        self.arrived = int(orders.asked) == int(orders.answered)
        if not self.arrived:
            assert self.delivery._failure is not None, "a layer went on before anyone knew"
            self.error = self.delivery._failure

    def note(self) -> None:
        orders, reach = self.delivery.mail
        for turn, key in enumerate(self.wanted):
            given = int(orders.places[turn]) if self.arrived else -1
            reach.place_of[key] = max(-1, given)
            self.at[key] = max(given, -1 - given)

    def look(self, key: int) -> None:
        self.address = self.at[key]

    def read(self, key: int) -> None:
        found = self.delivery._slot(self.address)["w"]
        assert self.error or float(found) == key, f"a layer that wanted {key} read {float(found)}"

    def check(self) -> None:
        """All has run."""
        delivery, tier = self.delivery, self.rows.tier
        if self.error:
            with pytest.raises(StoreError, match="bad sector"):
                delivery.check()
            return
        delivery.check()
        delivery._rows.insert()
        delivery._release()
        tier.check_integrity()
        assert not delivery._leaving and not delivery._failure
        places = np.where(tier.row_of == NOWHERE, -1, EXPERTS + tier.row_of)
        assert (delivery.mail[1].place_of.numpy() == places).all(), "host and device differ"


def walk(seed: int, monkeypatch: Any, rows: int, failing: int = 0, bug: Callable[[Sides], None] | None = None) -> int:
    """Runs some steps in one order of operations; returns how many rows changed their expert."""
    chance = random.Random(seed)
    steps = [
        [sorted(chance.sample(range(layer * EXPERTS, (layer + 1) * EXPERTS), 2)) for layer in range(LAYERS)]
        for _ in range(6)
    ]
    sides = Sides(steps, rows, failing, monkeypatch)
    if bug is not None:
        bug(sides)
    weights = [chance.random() ** 3 + 0.01 for _ in range(3)]
    while able := sides.able():
        likely = [weights[("begin", "answer", "run").index(action.__name__)] for action in able]
        chance.choices(able, likely)[0]()
    assert sides.begun == len(steps) and not sides.queue.work or sides.error, "it hangs"
    sides.check()
    return sides.delivery._rows._evicted


@pytest.mark.parametrize("rows", [1, 2, 4, LAYERS * EXPERTS])
def test_layers_read_their_experts_in_any_order_of_operations(rows: int, monkeypatch) -> None:
    evicted = sum(walk(seed, monkeypatch, rows) for seed in range(150))
    assert (evicted > 100) == (rows < LAYERS * EXPERTS)


def test_a_failed_read_is_known_before_a_layer_goes_on(monkeypatch) -> None:
    for seed in range(150):
        walk(seed, monkeypatch, 2, failing=1 + seed % 9)


class Reached:
    def done(self) -> bool:
        return True


class Early(list):
    """Rows are free when they are evicted, not when nobody reads them."""

    def append(self, item: tuple) -> None:
        super().append((Reached(), item[1]))

    def popleft(self) -> tuple:
        return self.pop(0)


def freed_at_once(sides: Sides) -> None:
    sides.delivery._leaving = Early()


def unwritten(sides: Sides) -> None:
    submit = sides.queue.submit
    sides.queue.submit = lambda work, *arguments: submit(lambda *_: None)


def unordered(sides: Sides) -> None:
    sides.queue.submit = lambda work, *arguments: work(*arguments)


def event_first(sides: Sides) -> None:
    record = sides.queue.record

    def recorded() -> ModelEvent:
        event = record()
        sides.queue.work[-2:] = sides.queue.work[:-3:-1]
        sides.queue.work.insert(0, sides.queue.work.pop(-2))
        return event

    sides.queue.record = recorded


class Given:
    """The numbers of places, stored as a bug has them."""

    def __init__(self, places: np.ndarray) -> None:
        self.places = places

    def __setitem__(self, at: Any, given: list[int]) -> None:
        self.places[at] = [max(place, -1 - place) for place in given]


def kept_in_passing(sides: Sides) -> None:
    sides.delivery._given = Given(sides.delivery._given)


def taken_twice(sides: Sides) -> None:
    rows, place = sides.delivery._rows, sides.delivery._rows.place

    def placed(key: int) -> int | None:
        if (row := place(key)) is not None:
            rows.tier._free.append(row)
        return row

    rows.place = placed


def untold(sides: Sides) -> None:
    sides.delivery._rows._kept = type("Deaf", (list,), {"append": lambda self, item: None})()


def late_failure(sides: Sides) -> None:
    def end(error: BaseException) -> None:
        sides.delivery.mail[0].ended[0] = 1

    sides.delivery._end = end


BUGS = [freed_at_once, unwritten, unordered, event_first, kept_in_passing, taken_twice, untold, late_failure]


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_is_found(bug: Callable[[Sides], None], monkeypatch) -> None:
    with pytest.raises(AssertionError):
        for seed in range(400):
            walk(seed, monkeypatch, 1 + seed % 3, failing=seed % 9 if bug is late_failure else 0, bug=bug)
