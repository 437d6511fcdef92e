"""Two streams and a host in every order that they allow: what an explorer runs ``StepMover`` and ``Staging`` against.

What they submit becomes micro-steps: a kernel's block reads its pointer, then each byte of what it points at; a copy
writes byte after byte. The host runs ahead of both streams as far as it likes.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass

import numpy as np

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.device.moves import Pointers, StepMover
from vllm_spac.execution.exchange import Stream


class Foreign(AssertionError):
    """A kernel read bytes that are not of the expert that it asked for."""


class ModelStream(Stream):
    """A queue of micro-steps: ``point``, ``byte``, ``reach``, ``wait``, and kernels."""

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
    """Micro-steps of a pointer write and of a copy."""

    def __init__(self, width: int) -> None:
        self._width = width

    def point(self, keys, slots):
        return [("point", key, slot) for key, slot in zip(keys, slots, strict=True)]

    def copy(self, key, slot):
        return [("byte", slot, place, key) for place in range(self._width)]


@dataclass
class Scenario:
    """Steps of ``kernels``, each a list of launches, each with a block for each key; ``counts`` follow from them."""

    keys: int
    slots: int
    steps: list[list[list[int]]]
    most: int = 1
    width: int = 2  # bytes of an expert
    replayed: bool = False  # the launches of a step are a graph's: they may run at once


class World:
    """Host, compute stream and copy stream; ``actions`` are what may happen next, ``act`` lets one happen."""

    def __init__(
        self, scenario: Scenario, make_mover=StepMover, compute=ModelStream, copying=ModelStream, memory=ModelMemory
    ):
        self.scenario, self.step = scenario, 0
        reached, names = set(), []
        self.reached = reached
        self.compute, self.copy = compute(reached, names), copying(reached, names)
        self.memory = memory(scenario.width)
        pointers = Pointers(scenario.keys, scenario.slots, LRU())
        self.table = [NOWHERE] * scenario.keys
        self.bytes = [[key] * scenario.width for key in range(scenario.slots)]
        pointers.arrived([pointers.placed(key) for key in range(scenario.slots)])
        self.table[: scenario.slots] = pointers.at[: scenario.slots].tolist()
        self.mover = make_mover(pointers, self.memory, self.compute, self.copy)
        self.blocks: list[list] = []  # of the running kernel: [key, bytes read, slot]
        self.moved: tuple[int, ...] = ()  # who moved in so far

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

    def _host(self) -> None:
        """``begin_step``, as the pool has it, and the launches."""
        self._host_moves()
        launches = self.scenario.steps[self.step]
        if self.scenario.replayed:
            launches = [[key for launch in launches for key in launch]]
        self.compute.queue.extend(("kernel", *launch) for launch in launches)
        self.step += 1

    def _host_moves(self) -> None:
        """Counts come as early as can be, and earlier."""
        self.mover.arrive()
        if self.step:
            counts = np.zeros(self.scenario.keys, dtype=np.int64)
            np.add.at(counts, [key for launch in self.scenario.steps[self.step - 1] for key in launch], 1)
            self.mover.pointers.observe(counts)
            moves = self.mover.pointers.choose(counts, self.scenario.most)
            self.mover.begin(moves)
            self.moved += tuple(move.key for move in moves)

    def _run(self, step: tuple) -> None:
        if step[0] == "point":
            self.table[step[1]] = step[2]
        elif step[0] == "byte":
            self.bytes[step[1]][step[2]] = step[3]
        elif step[0] == "reach":
            self.reached.add(step[1])
        elif step[0] == "kernel":
            self.blocks = [[key, 0, None] for key in step[1:]]

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

    def finish(self) -> None:
        """Everything that was begun is over, and the table says what the state machine believes."""
        assert not self.actions()
        assert all(stream.next == len(stream.queue) for stream in (self.compute, self.copy)), "the streams are stuck"
        self.mover.arrive()
        self.mover.pointers.check_integrity()
        while self.actions():
            self.act(self.actions()[0])
        assert self.table == self.mover.pointers.at.tolist() and self.mover.pointers.moving == 0
        for key, slot in enumerate(self.table):
            assert slot == NOWHERE or self.bytes[slot] == [key] * self.scenario.width

    def key(self) -> tuple:
        """Everything that the future depends on."""
        residency = self.mover.pointers.residency
        ahead = [tuple(stream.queue[stream.next :]) for stream in (self.compute, self.copy)]
        return (
            *ahead,
            self.step,
            self.moved,
            tuple(self.table),
            tuple(map(tuple, self.bytes)),
            tuple(sorted(map(str, self.blocks))),
            frozenset(self.reached),
            residency.owner.tobytes(),
            residency.state.tobytes(),
            tuple(residency.policy._order),
            self.mover.pointers._next,
            tuple((tuple(moves), event.name) for moves, event in self.mover._copying),
        )


def explore(world: World) -> tuple[int, int, set[tuple[int, ...]]]:
    """Every interleaving from here; returns how many, the number of different states, and who moved in at the ends."""
    ways: dict[tuple, int] = {}
    ends: set[tuple[int, ...]] = set()

    def visit(world: World) -> int:
        known = world.key()
        if known not in ways:
            world.mover.pointers.check_integrity()
            actions, here = world.actions(), pickle.dumps(world)  # read again faster than ``deepcopy`` copies
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


def run_randomly(world: World, rng: random.Random) -> None:
    """One interleaving; the actors' chances differ from run to run, so that each of them lags sometimes."""
    chance = {"host": rng.random() ** 2, "copy": rng.random() ** 2, "compute": rng.random(), "block": rng.random()}
    while actions := world.actions():
        world.act(rng.choices(actions, [chance[action[0]] + 1e-3 for action in actions])[0])
    world.finish()
