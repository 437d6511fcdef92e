"""Pointers that move under running kernels: a slot that is read while it is written is a wrong token that no later
check would find.

The code that serves, ``Mover`` over ``Pointers``, runs against streams of a model: what it submits becomes micro-steps
(a kernel's block reads its pointer, then each byte of what it points at; a copy writes byte after byte), which an
explorer takes in every order that streams and events allow, and in random orders where there are too many. The host
runs ahead of both streams as far as it likes. Then the same with real threads and real bytes.
"""

from __future__ import annotations

import copy
import ctypes
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.moves import ExpertMemory, Mover
from vllm_spac.pointers import Pointers
from vllm_spac.policies.lru import LRU
from vllm_spac.residency import NOWHERE
from vllm_spac.streams import Stream, ThreadStream
from vllm_spac.tiers.memory import MemoryStore

# --- the model -----------------------------------------------------------------------------------------------------


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


class World:
    """Host, compute stream and copy stream; ``actions`` are what may happen next, ``act`` lets one happen."""

    def __init__(
        self, scenario: Scenario, make_mover=Mover, compute=ModelStream, copying=ModelStream, memory=ModelMemory
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
        """``begin_step``, as the pool has it, and the launches. Counts come as early as can be, and earlier."""
        self.mover.arrive()
        if self.step:
            counts = np.zeros(self.scenario.keys, dtype=np.int64)
            np.add.at(counts, [key for launch in self.scenario.steps[self.step - 1] for key in launch], 1)
            self.mover.pointers.observe(counts)
            moves = self.mover.pointers.choose(counts, self.scenario.most)
            self.mover.begin(moves)
            self.moved += tuple(move.key for move in moves)
        self.compute.queue.extend(("kernel", *launch) for launch in self.scenario.steps[self.step])
        self.step += 1

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
            actions = world.actions()
            if not actions:
                world.finish()
                ends.add(world.moved)
            ways[known] = sum(visit(after(world, action)) for action in actions) or 1
        return ways[known]

    return visit(world), len(ways), ends


def after(world: World, action: tuple) -> World:
    copied = copy.deepcopy(world)
    copied.act(action)
    return copied


# Three experts in turn through one slot, the first of which comes back; every kernel's experts are those that move.
CHAIN = Scenario(keys=3, slots=1, steps=[[[0], [1]], [[0, 1]], [[1], [2]], [[2], [2, 0]], [[0], [0, 1]], [[0, 2], [1]]])
# Two moves at once beside an expert that stays, and back.
PAIR = Scenario(keys=4, slots=2, most=2, steps=[[[0, 2], [3]], [[1], [2, 0]], [[0, 1], [3, 1]], [[2], [1]], [[3, 0]]])


@pytest.mark.parametrize(("scenario", "chain"), [(CHAIN, (1, 2, 0)), (PAIR, (2, 3, 0, 1))], ids=["chain", "pair"])
def test_no_interleaving_of_a_small_model_reads_a_slot_that_is_written(scenario, chain):
    interleavings, states, ends = explore(World(scenario))
    print(f"{interleavings:.3g} interleavings, {states} states, moves {sorted(ends)}")
    assert any(end[: len(chain)] == chain for end in ends), "some interleaving must take the whole chain"
    assert len(ends) > 3 and interleavings > 10**9


# --- what the explorer must find ------------------------------------------------------------------------------------


class NotHome(ModelMemory):
    """Step 1 is left out."""

    def point(self, keys, slots):
        return [step for step in super().point(keys, slots) if step[2] != NOWHERE]


class NoWait(ModelStream):
    """Step 2 is left out."""

    def wait(self, event):
        pass


class Early(ModelStream):
    """Step 2 waits for an event that was recorded before the last kernel, not after it."""

    def record(self):
        event = super().record()
        kernels = [at for at in range(self.next, len(self.queue)) if self.queue[at][0] == "kernel"]
        if kernels:
            self.queue.insert(kernels[-1], self.queue.pop())
        return event


class Hasty(Mover):
    """Steps 3 and 4 are swapped: the table says that e_new is there before its bytes are."""

    def begin(self, moves):
        super().begin(moves)
        self._compute.submit(self._memory.point, [m.key for m in moves], [m.slot for m in moves])


class AllOnCopyStream(Mover):
    """Pointers are written by the copy stream, with the event after the last use that the host has submitted."""

    def begin(self, moves):
        if moves:
            used = self._compute.record()
            self._copy.submit(self._memory.point, [m.victim for m in moves], [NOWHERE] * len(moves))
            self._copy.wait(used)
            for move in moves:
                self._copy.submit(self._memory.copy, move.key, move.slot)
            self._copying.append((list(moves), self._copy.record()))


class ReturnedOnCopyStream(Mover):
    """Step 4 is right, but runs on the copy stream without being ordered behind what the compute stream does next."""

    def arrive(self):
        arrived = []
        while self._copying and self._copying[0][1].done():
            arrived += self._copying.popleft()[0]
        self.pointers.arrived(arrived)
        self._copy.submit(self._memory.point, [m.key for m in arrived], [m.slot for m in arrived])
        return arrived


BUGS = {
    "step 1 left out": {"memory": NotHome},
    "step 2 left out": {"copying": NoWait},
    "steps 3 and 4 swapped": {"make_mover": Hasty},
    "event recorded too early": {"compute": Early},
    "step 1 on the copy stream": {"make_mover": AllOnCopyStream},
    "step 4 on the copy stream": {"make_mover": ReturnedOnCopyStream},
}


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_of_the_protocol_is_found(bug):
    with pytest.raises(AssertionError) as found:
        for scenario in (CHAIN, PAIR):
            explore(World(scenario, **BUGS[bug]))
    assert isinstance(found.value, Foreign), found.value


# --- large models, random orders -------------------------------------------------------------------------------------


def large(rng: random.Random) -> Scenario:
    """12 experts in 5 slots, 6 steps of two launches of up to 4 blocks, up to 3 moves in flight, 3 bytes."""
    steps = [[rng.sample(range(12), rng.randint(1, 4)) for _ in range(2)] for _ in range(6)]
    return Scenario(keys=12, slots=5, steps=steps, most=rng.randint(1, 3), width=3)


def run_randomly(rng: random.Random, **bug) -> None:
    """One interleaving; the actors' chances differ from run to run, so that each of them lags sometimes."""
    world = World(large(rng), **bug)
    chance = {"host": rng.random() ** 2, "copy": rng.random() ** 2, "compute": rng.random(), "block": rng.random()}
    while actions := world.actions():
        world.act(rng.choices(actions, [chance[action[0]] + 1e-3 for action in actions])[0])
    world.finish()


SEEDS = [range(4_000)] + [
    pytest.param(range(start, start + 125_000), marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for start in range(0, 1_000_000, 125_000)
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_interleavings_of_a_large_model(seeds):
    """A million of them with those that are marked."""
    for seed in seeds:
        run_randomly(random.Random(seed))


@pytest.mark.parametrize("bug", BUGS)
def test_random_interleavings_find_the_bugs_too(bug):
    with pytest.raises(AssertionError):
        for seed in range(2_000):
            run_randomly(random.Random(seed), **BUGS[bug])


# --- real threads, real bytes ----------------------------------------------------------------------------------------

EXPERTS, SLOTS, WORDS = 10, 3, 1 << 15
SPECS = {"w13_weight": TensorSpec((WORDS,), torch.float32), "w2_weight": TensorSpec((WORDS // 2,), torch.float32)}


class Reader:
    """Kernels of several threads each, which read the table once and what it points at again and again."""

    def __init__(self, memory: ExpertMemory) -> None:
        self.table = memory.table
        self.wrong: list[str] = []

    def kernel(self, keys: list[int]) -> None:
        blocks = [threading.Thread(target=self.block, args=(key,)) for key in keys]
        for block in blocks:
            block.start()
        for block in blocks:
            block.join()

    def block(self, key: int) -> None:
        for name, spec in SPECS.items():
            address = int(self.table[name][key])
            here = np.frombuffer((ctypes.c_byte * spec.nbytes).from_address(address), dtype=np.float32)
            for _ in range(4):
                seen = here.copy()
                if not (seen == key).all():
                    self.wrong.append(f"{name} of {key}: {np.unique(seen)}")


def test_threads_never_read_poison_or_another_expert():
    """Expert e is e everywhere. Slots are filled with NaN before each copy; both streams are threads."""
    store = MemoryStore(MoEShape(("layer",), EXPERTS, 2, SPECS), "threads")
    for key in range(EXPERTS):
        store.put(key, {name: torch.full(spec.shape, float(key)) for name, spec in SPECS.items()})
    slots = {name: torch.full((SLOTS, *spec.shape), float("nan")) for name, spec in SPECS.items()}
    memory = ExpertMemory(store, slots, EXPERTS, poison=True)
    pointers, reader, rng = Pointers(EXPERTS, SLOTS, LRU()), Reader(memory), random.Random(0)
    compute, copying = ThreadStream("compute"), ThreadStream("copy")
    mover = Mover(pointers, memory, compute, copying)
    arrived, last = 0, None
    for _ in range(150):
        arrived += len(mover.arrive())
        if last is not None:
            counts = np.bincount(last, minlength=EXPERTS)
            pointers.observe(counts)
            mover.begin(pointers.choose(counts, most=2))
        pointers.check_integrity()
        last = rng.sample(range(EXPERTS), 3)
        compute.submit(reader.kernel, last)
        if rng.random() < 0.5:  # the host runs ahead, but not always
            launched = compute.record()
            compute.submit(reader.kernel, rng.sample(range(EXPERTS), 2))
            launched.wait()
    mover.close()
    arrived += len(mover.arrive())
    compute.close()
    assert not reader.wrong, reader.wrong[:3]
    assert arrived > 20, "hardly anything moved, so hardly anything was tested"
    assert pointers.moving == 0


def test_what_a_stream_fails_with_is_told_to_whoever_asks_for_its_events():
    stream, other = ThreadStream("failing"), ThreadStream("behind")
    ran: list[str] = []

    def fail():
        raise ValueError("no such address")

    stream.submit(fail)
    stream.submit(ran.append, "after the failure")
    event = stream.record()
    other.wait(event)
    other.submit(ran.append, "behind the failure")
    behind = other.record()
    for failed in (event, behind):
        with pytest.raises(ValueError, match="no such address"):
            failed.wait()
        with pytest.raises(ValueError, match="no such address"):
            failed.done()
    stream.close()
    other.close()
    assert ran == []
