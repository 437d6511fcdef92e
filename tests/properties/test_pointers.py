"""Pointers that move under running kernels: a slot that is read while it is written is a wrong token that no later
check would find.

The serving code, ``StepMover`` over ``Pointers``, runs against streams of a model: what it submits becomes micro-steps
(a kernel's block reads its pointer, then each byte of what it points at; a copy writes byte after byte), which an
explorer takes in every order that streams and events allow, and in random orders where there are too many. The host
runs ahead of both streams as far as it likes. Then the same with real threads and real bytes.

A step that is one replay of a CUDA graph is one submission: all its blocks may run at once, in stream order after
the pointers' writes.
"""

from __future__ import annotations

import ctypes
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from interleavings import Foreign, ModelMemory, ModelStream, NoWait, Scenario, World, explore, run_randomly
from poison import spoil

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.address_table import AddressTable
from vllm_spac.execution.device.moves import Pointers, StepMover
from vllm_spac.execution.exchange import ThreadStream
from vllm_spac.storage.memory import MemoryStore

# Three experts in turn through one slot, the first of which comes back; every kernel's experts are those that move.
CHAIN = Scenario(keys=3, slots=1, steps=[[[0], [1]], [[0, 1]], [[1], [2]], [[2], [2, 0]], [[0], [0, 1]], [[0, 2], [1]]])
# Two moves at once beside an expert that stays, and back.
PAIR = Scenario(keys=4, slots=2, most=2, steps=[[[0, 2], [3]], [[1], [2, 0]], [[0, 1], [3, 1]], [[2], [1]], [[3, 0]]])


@pytest.mark.parametrize(
    ("scenario", "chain"),
    [(CHAIN, (1, 2, 0)), (PAIR, (2, 3, 0, 1)), (replace(CHAIN, replayed=True), (1, 2, 0))],
    ids=["chain", "pair", "chain, replayed"],
)
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


class Early(ModelStream):
    """Step 2 waits for an event that was recorded before the last kernel, not after it."""

    def record(self):
        event = super().record()
        kernels = [at for at in range(self.next, len(self.queue)) if self.queue[at][0] == "kernel"]
        if kernels:
            self.queue.insert(kernels[-1], self.queue.pop())
        return event


class Hasty(StepMover):
    """Steps 3 and 4 are swapped: the table says that e_new is there before its bytes are."""

    def begin(self, moves):
        super().begin(moves)
        self._compute.submit(self._memory.point, [m.key for m in moves], [m.slot for m in moves])


class AllOnCopyStream(StepMover):
    """Pointers are written by the copy stream, with the event after the last use that the host has submitted."""

    def begin(self, moves):
        if moves:
            used = self._compute.record()
            self._copy.submit(self._memory.point, [m.victim for m in moves], [NOWHERE] * len(moves))
            self._copy.wait(used)
            for move in moves:
                self._copy.submit(self._memory.copy, move.key, move.slot)
            self._copying.append((list(moves), self._copy.record()))


class ReturnedOnCopyStream(StepMover):
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
    """12 experts in 5 slots, 6 steps of two launches of up to 4 blocks, or their replays, up to 3 moves, 3 bytes."""
    steps = [[rng.sample(range(12), rng.randint(1, 4)) for _ in range(2)] for _ in range(6)]
    return Scenario(keys=12, slots=5, steps=steps, most=rng.randint(1, 3), width=3, replayed=rng.random() < 0.5)


def run(seed: int, **bug) -> None:
    rng = random.Random(seed)
    run_randomly(World(large(rng), **bug), rng)


SEEDS = [range(4_000)] + [
    pytest.param(range(start, start + 125_000), marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for start in range(0, 1_000_000, 125_000)
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_interleavings_of_a_large_model(seeds):
    """A million of them with those that are marked."""
    for seed in seeds:
        run(seed)


@pytest.mark.parametrize("bug", BUGS)
def test_random_interleavings_find_the_bugs_too(bug):
    with pytest.raises(AssertionError):
        for seed in range(2_000):
            run(seed, **BUGS[bug])


# --- real threads, real bytes ----------------------------------------------------------------------------------------

EXPERTS, SLOTS, WORDS = 10, 3, 1 << 15
SPECS = {"w13_weight": TensorSpec((WORDS,), torch.float32), "w2_weight": TensorSpec((WORDS // 2,), torch.float32)}


class Reader:
    """Kernels of several threads each, which read the table once and what it points at again and again."""

    def __init__(self, memory: AddressTable) -> None:
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


class Poisoned(AddressTable):
    """Slots are NaN before each copy."""

    def copy(self, key: int, slot: int) -> None:
        for tensor in self._slots.values():
            spoil(tensor[slot])
        super().copy(key, slot)


def test_threads_never_read_poison_or_another_expert():
    """Expert e is e everywhere. Slots are filled with NaN before each copy; both streams are threads."""
    store = MemoryStore(MoEShape(("layer",), EXPERTS, 2, SPECS), "threads")
    for key in range(EXPERTS):
        store.put(key, {name: torch.full(spec.shape, float(key)) for name, spec in SPECS.items()})
    slots = {name: torch.full((SLOTS, *spec.shape), float("nan")) for name, spec in SPECS.items()}
    memory = Poisoned(store, slots, EXPERTS)
    pointers, reader, rng = Pointers(EXPERTS, SLOTS, LRU()), Reader(memory), random.Random(0)
    compute, copying = ThreadStream("compute"), ThreadStream("copy")
    mover = StepMover(pointers, memory, compute, copying)
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
