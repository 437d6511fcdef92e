"""Two streams and a host in every order that they allow: what an explorer runs ``StepMover`` and ``Staging`` against.

What they submit becomes micro-steps: a kernel's block reads its pointer, then each byte of what it points at; a copy
writes byte after byte. Before a kernel, its layer admits what it misses to slots on offer, and its stream copies these
bytes. The host runs ahead of both streams as far as it likes.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, UNUSED

from vllm_spac.cache.link import Moved
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.device.moves import StepMover
from vllm_spac.execution.device.slot_offers import Offering
from vllm_spac.execution.exchange import Stream
from vllm_spac.recording.metrics import Counters


class Foreign(AssertionError):
    """A kernel read bytes that are not of the expert that it asked for."""


class ModelStream(Stream):
    """A queue of micro-steps: of moves, bytes, ``reach``, ``wait``, offers, admissions, kernels and reports."""

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


class ModelMemory:
    """Micro-steps of a move."""

    def __init__(self, width: int) -> None:
        self._width = width

    def leave(self, keys, slots):
        return [("leave", key, slot) for key, slot in zip(keys, slots, strict=True)]

    def enter(self, keys, slots):
        return [("enter", key, slot) for key, slot in zip(keys, slots, strict=True)]

    def copy(self, key, slot):
        return [("byte", slot, place, key) for place in range(self._width)]


@dataclass
class Scenario:
    """Steps of ``kernels``, each a list of launches, each with a block for each key.

    A launch first admits the keys that it misses. Before a step the host moves the keys that are named for it.
    """

    keys: int
    slots: int
    steps: list[list[list[int]]]
    names: list[list[int]]
    most: int = 1  # moves at once, and slots that are withheld
    width: int = 2  # bytes of an expert
    drafts: tuple[tuple[int, ...], ...] = ()  # of each step: keys that drafts after it name


class World:
    """Host, compute stream and copy stream; ``actions`` are what may happen next, ``act`` lets one happen."""

    def __init__(
        self,
        scenario: Scenario,
        make_mover=StepMover,
        compute=ModelStream,
        copying=ModelStream,
        memory=ModelMemory,
        make_offering=Offering,
        joins: bool = True,
    ):
        self.scenario, self.step = scenario, 0
        self.joins, self.arrives = joins, None  # when what drafts were given is there
        reached, names = set(), []
        self.reached = reached
        self.compute, self.copy = compute(reached, names), copying(reached, names)
        self.memory = memory(scenario.width)
        self.offering = make_offering(scenario.keys, scenario.keys, scenario.slots, LRU(), Counters())
        self.offering.overtaken = self._overtaken
        residency = self.offering.residency
        for key in range(scenario.slots):
            residency.prepare([key])
            residency.loaded(key)
            residency.release([key])
        self.mover = make_mover(residency, self.memory, self.compute, self.copy, Moved("host", 1))
        self.reports: list[tuple] = []  # not taken yet: event, what the stream wrote, slots on offer
        self.moved: tuple[int, ...] = ()  # who moved in so far
        self.took = False  # the host has taken reports, for the step that begins
        # On the device.
        self.table, self.owner = residency.slot_of.tolist(), residency.owner.tolist()
        self.bytes = [[key] * scenario.width for key in self.owner]
        self.offers: list[tuple] = []  # (slot, owner), those that are left
        self.left: list[tuple] = []  # to drafts
        self.worthless: tuple = ()  # experts that take no slot
        self.sources: dict[int, int] = {}  # of the step
        self.blocks: list[list] = []  # of the running kernel: [key, bytes read, slot]

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
            self._join()
            self._take()
            return
        self._move()
        offered = self.offering.offer(partial(self.mover.withhold, count=self.scenario.most))
        worthless = tuple(np.flatnonzero(offered.used == -np.inf).tolist())
        offers = tuple(zip(offered.slots.tolist(), offered.owners.tolist(), strict=True))
        self.compute.queue.append(("offers", offers, worthless))
        for launch in self.scenario.steps[self.step]:
            self.compute.queue += [("admit", *launch), ("kernel", *launch)]
        self._end(offered.slots)

    def _end(self, offered: np.ndarray) -> None:
        told: list = []
        self.compute.queue.append(("report", told))
        self.reports.append((self.compute.record(), told, offered))
        self.mover.launched()
        named = self.scenario.drafts[self.step] if self.scenario.drafts else ()
        if named:
            self.copy.wait(self.compute.record())
            self.copy.queue.append(("draft", *named))
            self.arrives = self.copy.record(), offered
        self.step += 1

    def _join(self) -> None:
        """As ``DraftLookahead.begin``."""
        if self.arrives is None:
            return
        arrives, offered = self.arrives
        self.arrives, told = None, []
        if self.joins:
            self.compute.wait(arrives)
        self.compute.queue.append(("report", told))
        self.reports.append((self.compute.record(), told, offered))
        self.mover.launched()

    def _take(self) -> None:
        while self.reports and self.reports[0][0].done():
            _, told, offered = self.reports.pop(0)
            sources, owner = map(np.array, told)
            counts = (sources != UNUSED).astype(np.int64)
            between = not counts.any()
            given = {"generating": None if between else counts, "offered": offered, "between": between}
            self.offering.learn(counts, sources, owner, **given)
            self.mover.reported()

    def _move(self) -> None:
        residency = self.offering.residency
        for key in self.mover.reap():
            residency.loaded(key)
        missing = [key for key in self.scenario.names[self.step] if residency.slot_of[key] == NOWHERE]
        if missing := missing[: self.scenario.most - self.mover.reading]:
            loads = residency.admit_unless(missing, ()).loads
            if loads:
                self.mover.fetch(loads)
                self.moved += tuple(key for key, _ in loads)

    def _overtaken(self, keys: list[int]) -> None:
        self.mover.void(keys)
        for key in keys:
            self.offering.residency.failed(key)

    # -- the device --------------------------------------------------------------------------------------------

    def _run(self, step: tuple) -> None:
        if step[0] == "leave":
            self.table[step[1]] = self.owner[step[2]] = NOWHERE
        elif step[0] == "enter":
            self.table[step[1]], self.owner[step[2]] = step[2], step[1]
        elif step[0] == "byte":
            self.bytes[step[1]][step[2]] = step[3]
        elif step[0] == "reach":
            self.reached.add(step[1])
        elif step[0] == "offers":
            self.offers, self.worthless, self.sources = list(step[1]), step[2], {}
        elif step[0] == "admit":
            self._admit(step[1:], self.offers, self.compute)
        elif step[0] == "draft":
            self._admit(step[1:], self.left, self.copy)
            self.sources = {}
        elif step[0] == "kernel":
            self.blocks = [[key, 0, None] for key in step[1:]]
        elif step[0] == "report":
            sources = [self.sources.get(key, UNUSED) for key in range(self.scenario.keys)]
            step[1].extend([sources, list(self.owner)])
            self.left, self.offers, self.sources = self.offers, [], {}

    def _admit(self, keys: tuple, offers: list[tuple], stream: ModelStream) -> None:
        """As the kernel ``admit``, then ``fetch``, whose bytes are the stream's next steps."""
        in_slots = {key for key in keys if self.table[key] != NOWHERE}
        self.sources |= {key: HIT if key in in_slots else STREAMED for key in keys}
        for key in keys:
            if key in in_slots or key in self.worthless:
                continue
            while offers:
                slot, old = offers.pop(0)
                if self.owner[slot] == old and old not in self.sources:
                    self.owner[slot], self.table[old], self.table[key] = key, NOWHERE, slot
                    self.sources[key] = ADMITTED
                    behind = stream.next + 1
                    stream.queue[behind:behind] = [("byte", slot, at, key) for at in range(self.scenario.width)]
                    break

    def _read(self, index: int) -> None:
        block = self.blocks[index]
        key, read, slot = block
        if slot is None:
            block[2] = self.table[key]
        else:
            if slot != NOWHERE and self.bytes[slot][read] != key:
                raise Foreign(f"a kernel asked for {key} and read {self.bytes[slot]}")
            block[1] += 1
        if block[1] == self.scenario.width or block[2] == NOWHERE:  # a host copy is never written
            del self.blocks[index]

    # -- the end -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everything that was begun is over, and the device is as the host believes."""
        assert not self.actions()
        assert all(stream.next == len(stream.queue) for stream in (self.compute, self.copy)), "the streams are stuck"
        self._join()
        while self.actions():
            self.act(self.actions()[0])
        self._take()
        for key in self.mover.reap():
            self.offering.residency.loaded(key)
        self.mover.check_integrity()
        while self.actions():
            self.act(self.actions()[0])
        residency = self.offering.residency
        assert self.mover.reading == 0 and not self.reports
        assert self.owner == residency.owner.tolist() and self.table == residency.slot_of.tolist()
        for key, slot in enumerate(self.table):
            assert slot == NOWHERE or self.bytes[slot] == [key] * self.scenario.width

    def key(self) -> tuple:
        """Everything that the future depends on."""
        residency, mover = self.offering.residency, self.mover
        ahead = [repr(stream.queue[stream.next :]) for stream in (self.compute, self.copy)]
        return (
            *ahead,
            self.step,
            self.took,
            None if self.arrives is None else (self.arrives[0].name, self.arrives[1].tolist()),
            self.moved,
            repr(
                (
                    self.table,
                    self.owner,
                    self.bytes,
                    self.offers,
                    self.left,
                    self.worthless,
                    self.sources,
                    sorted(map(str, self.blocks)),
                )
            ),
            frozenset(self.reached),
            repr([(event.name, told, offered.tolist()) for event, told, offered in self.reports]),
            residency.owner.tobytes(),
            residency.state.tobytes(),
            tuple(residency._free),
            tuple(residency.policy._order),
            repr((mover._mine, mover._withheld, mover._launched, mover._reported)),
            tuple((m.key, m.slot) for m in mover._moving.values()),
            tuple(
                (tuple((m.key, m.slot, mover._moving.get(m.key) is m) for m in c.moves), c.copied.name, c.launched)
                for c in mover._copying
            ),
        )


def explore(world: World) -> tuple[int, int, set[tuple[int, ...]]]:
    """Every interleaving from here; returns how many, the number of different states, and who moved in at the ends."""
    ways: dict[tuple, int] = {}
    ends: set[tuple[int, ...]] = set()

    def visit(world: World) -> int:
        known = world.key()
        if known not in ways:
            world.mover.check_integrity()
            actions, here = world.actions(), pickle.dumps(world, pickle.HIGHEST_PROTOCOL)  # faster than ``deepcopy``
            if not actions:
                world.finish()
                ends.add(world.moved)
            ways[known] = sum(visit(after(here, action)) for action in actions) or 1
        return ways[known]

    return visit(world), len(ways), ends


def after(world: bytes, action: tuple) -> World:
    copied = pickle.loads(world)
    copied.act(action)
    return copied


class NoWait(ModelStream):
    """A bug: it begins before the event."""

    def wait(self, event):
        pass


def run_randomly(world: World, rng: random.Random) -> World:
    """One interleaving; the actors' chances differ from run to run, so that each of them lags sometimes."""
    chance = {"host": rng.random() ** 2, "copy": rng.random() ** 2, "compute": rng.random(), "block": rng.random()}
    while actions := world.actions():
        world.act(rng.choices(actions, [chance[action[0]] + 1e-3 for action in actions])[0])
    world.finish()
    return world
