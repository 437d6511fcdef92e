"""Two streams and a host in every order that they allow: what an explorer runs ``ReportAccount`` and loans against.

What they submit becomes micro-steps: a kernel's block reads its pointer, then each byte of what it points at; a copy
writes byte after byte. Before a kernel, its layer admits what it misses to slots on offer. The first block of such an
expert copies it there byte after byte, and then reads it; other blocks of it read it in host memory. After a step the
copy stream puts slots in order, by what the step has written. The host runs ahead of both streams as far as it likes.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import numpy as np
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, UNUSED

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.execution.device.admission_reports import ReportAccount
from vllm_spac.execution.exchange import Stream
from vllm_spac.recording.metrics import Counters


class Foreign(AssertionError):
    """A kernel read bytes that are not of the expert that it asked for."""


class ModelStream(Stream):
    """A queue of micro-steps: of bytes, ``reach``, ``wait``, offers, admissions, kernels and reports."""

    def __init__(self, reached: set[int], names: list[int]) -> None:
        self.queue: list[tuple] = []
        self.next = 0
        self.reached, self._names = reached, names

    def submit(self, work, *arguments) -> None:
        self.queue.extend(work(*arguments))

    def record(self) -> ModelEvent:
        self._names.append(len(self._names))
        self.queue.append(("reach", self._names[-1]))
        return ModelEvent(self._names[-1], self.reached)

    def wait(self, event: ModelEvent) -> None:
        self.queue.append(("wait", event.name))


@dataclass
class ModelEvent:
    name: int
    reached: set[int]

    def done(self) -> bool:
        return self.name in self.reached


@dataclass
class Scenario:
    """Steps of ``kernels``, each a list of launches, each with a block for each key, which may occur again.

    A launch first admits the keys that it misses.
    """

    keys: int
    slots: int
    steps: list[list[list[int]]]
    width: int = 2  # bytes of an expert


class World:
    """Host, compute stream and copy stream; ``actions`` are what may happen next, ``act`` lets one happen."""

    def __init__(self, scenario: Scenario, compute=ModelStream, copying=ModelStream, account=ReportAccount):
        self.scenario, self.step = scenario, 0
        reached, names = set(), []
        self.reached = reached
        self.compute, self.copy = compute(reached, names), copying(reached, names)
        self.account = account(scenario.keys, scenario.slots, Counters())
        residency = self.account.residency
        residency.update_owners(np.arange(scenario.slots), np.arange(scenario.slots))
        self.updated: ModelEvent | None = None  # when slots are in order, of the step before
        self.reports: list[tuple] = []  # not taken yet: event, and what the stream wrote
        self.took = False  # the host has taken reports, for the step that begins
        self.given = 0  # slots, in layers
        # On the device.
        self.table, self.owner = residency.slot_of.tolist(), residency.owner.tolist()
        self.bytes = [[key] * scenario.width for key in self.owner]
        self.taken: tuple = (), ()  # of a step: used keys, owners of slots at its end
        self.recent = list(self.owner)  # keys that have slots, the one used longest ago first
        self.order = list(range(scenario.slots))  # of slots, the next victim first
        self.left = list(enumerate(self.owner))  # (slot, owner), those on offer when the next step begins
        self.offers: list[tuple] = []  # those that are left in a step
        self.sources: dict[int, int] = {}  # of the step
        self.blocks: list[list] = []  # of the running kernel: [key, bytes copied, bytes read, slot, the key's first]

    def actions(self) -> list[tuple]:
        found: list[tuple] = [("block", index) for index in range(len(self.blocks))]
        for name in ("compute", "copy"):
            stream = getattr(self, name)
            if stream.next < len(stream.queue) and not (name == "compute" and self.blocks):
                step = stream.queue[stream.next]
                if step[0] != "wait" or step[1] in self.reached:
                    found.append((name,))
        if self.step < len(self.scenario.steps):
            found.append(("host",))
        return found

    def act(self, action: tuple) -> None:
        if action[0] == "host":
            self._host()
        elif action[0] == "block":
            self._read(action[1])
        else:
            stream = getattr(self, action[0])
            self._run(stream.queue[stream.next])
            stream.next += 1

    # -- the host, as ``Admission`` has it -------------------------------------------------------------------

    def _host(self) -> None:
        """In two parts: streams go on while the host looks at one event and then at another."""
        self.took = not self.took
        if self.took:
            self._take()
            return
        self._offer()
        launches = self.scenario.steps[self.step]
        for launch in launches:
            self.compute.queue += [("admit", *launch), ("kernel", *launch)]
        self._end()

    def _offer(self) -> None:
        """As ``OfferUpdates.begin``."""
        if self.updated is not None:
            self.compute.wait(self.updated)
        self.compute.queue.append(("offers",))

    def _end(self) -> None:
        self._report()
        self.compute.queue.append(("taken",))
        self.copy.wait(self.compute.record())
        self.copy.queue.append(("update",))
        self.updated = self.copy.record()
        self.step += 1

    def _report(self) -> None:
        told: list = []
        self.compute.queue.append(("report", told))
        self.reports.append((self.compute.record(), told))

    def _take(self) -> None:
        while self.reports and self.reports[0][0].done():
            _, told = self.reports.pop(0)
            sources, owner = map(np.array, told)
            counts = (sources != UNUSED).astype(np.int64)
            self.account.add(counts, sources, owner)

    # -- the device --------------------------------------------------------------------------------------------

    def _run(self, step: tuple) -> None:
        if step[0] == "byte":
            self.bytes[step[1]][step[2]] = step[3]
        elif step[0] == "reach":
            self.reached.add(step[1])
        elif step[0] == "offers":
            self.offers, self.sources = list(self.left), {}
        elif step[0] == "taken":
            self.taken, self.sources = (tuple(self.sources), tuple(self.owner)), {}
        elif step[0] == "update":
            self._update(*self.taken)
        elif step[0] == "admit":
            self._admit(step[1:])
        elif step[0] == "kernel":
            self.begin_kernel(step[1:])
        elif step[0] == "report":
            sources = [self.sources.get(key, UNUSED) for key in range(self.scenario.keys)]
            step[1].extend([sources, list(self.owner)])
            self.offers = []

    def _update(self, used: tuple, owner: tuple) -> None:
        """As ``SlotOffers.update``, with ``lru``."""
        stay = [key for key in self.recent if key in owner and key not in used]
        self.recent = stay + sorted(set(owner) - set(stay))
        self.order = [owner.index(key) for key in self.recent]
        self.left = list(zip(self.order, self.recent, strict=True))

    def begin_kernel(self, keys: tuple) -> None:
        self.blocks = [[key, 0, 0, None, key not in keys[:at]] for at, key in enumerate(keys)]

    def _admit(self, keys: tuple) -> None:
        """As the kernel ``admit`` in a layer, whose own kernel copies."""
        in_slots = {key for key in keys if self.table[key] != NOWHERE}
        self.sources |= {key: HIT if key in in_slots else STREAMED for key in keys}
        for key in dict.fromkeys(keys):
            if key not in in_slots and self._take_slot(key, self.offers, set(self.sources)) != NOWHERE:
                self.sources[key] = ADMITTED
                self.given += 1

    def _take_slot(self, key: int, offers: list[tuple], used: set[int]) -> int:
        """Gives ``key`` the first slot on offer whose owner is not ``used``; returns it, or NOWHERE."""
        while offers:
            slot, old = offers.pop(0)
            if self.owner[slot] == old and old not in used:
                self.owner[slot], self.table[old], self.table[key] = key, NOWHERE, slot
                return slot
        return NOWHERE

    def _read(self, index: int) -> None:
        block = self.blocks[index]
        key, copied, read, slot, leads = block
        fills = self.sources.get(key) == ADMITTED
        if slot is None:
            block[3] = self.table[key] if leads or not fills else NOWHERE
        elif fills and copied < self.scenario.width:
            self.bytes[slot][copied] = key
            block[1] += 1
        else:
            if self.bytes[slot][read] != key:
                raise Foreign(f"a kernel asked for {key} and read {self.bytes[slot]}")
            block[2] += 1
        if block[2] == self.scenario.width or block[3] == NOWHERE:  # a host copy is never written
            del self.blocks[index]

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything that was begun is over, and the device is as the host believes."""
        assert not self.actions()
        assert all(stream.next == len(stream.queue) for stream in (self.compute, self.copy)), "the streams are stuck"
        self._take()
        residency = self.account.residency
        residency.check_integrity()
        assert not self.reports
        assert self.owner == residency.owner.tolist() and self.table == residency.slot_of.tolist()
        for key, slot in enumerate(self.table):
            assert slot == NOWHERE or self.bytes[slot] == [key] * self.scenario.width

    def key(self) -> tuple:
        """Everything that the future depends on."""
        residency = self.account.residency
        ahead = [repr(stream.queue[stream.next :]) for stream in (self.compute, self.copy)]
        return (
            *ahead,
            self.step,
            self.took,
            None if self.updated is None else self.updated.name,
            repr((self.table, self.owner, self.bytes, self.offers, self.left, self.sources, self.taken, self.recent)),
            repr(sorted(map(str, self.blocks))),
            frozenset(self.reached),
            repr([(event.name, told) for event, told in self.reports]),
            residency.owner.tobytes(),
        )


def explore(world: World) -> tuple[int, int, set[tuple[int, ...]]]:
    """Every interleaving from here; returns how many, the number of different states, and who has slots at the ends."""
    ways: dict[tuple, int] = {}
    ends: set[tuple[int, ...]] = set()

    def visit(world: World) -> int:
        known = world.key()
        if known not in ways:
            world.account.residency.check_integrity()
            actions, here = world.actions(), pickle.dumps(world, pickle.HIGHEST_PROTOCOL)  # faster than ``deepcopy``
            if not actions:
                world.finish()
                ends.add(tuple(world.owner))
            ways[known] = sum(visit(after(here, action)) for action in actions) or 1
        return ways[known]

    return visit(world), len(ways), ends


def after(world: bytes, action: tuple) -> World:
    copied = pickle.loads(world)
    copied.act(action)
    return copied


def run_randomly(world: World, rng: random.Random) -> World:
    """One interleaving; the actors' chances differ from run to run, so that each of them lags sometimes."""
    chance = {"host": rng.random() ** 2, "copy": rng.random() ** 2, "compute": rng.random(), "block": rng.random()}
    while actions := world.actions():
        world.act(rng.choices(actions, [chance[action[0]] + 1e-3 for action in actions])[0])
    world.finish()
    return world
