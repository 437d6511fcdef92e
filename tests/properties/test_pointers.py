"""Slots that change hands under running kernels: a slot that is read while it is written is a wrong token that no later
check would find.

The serving code, ``StepMover`` and ``Offering``, runs against streams of a model: what it submits becomes micro-steps
(a kernel's block reads its pointer, then each byte of what it points at; a copy writes byte after byte), which an
explorer takes in every order that streams and events allow, and in random orders where there are too many. Layers admit
what they miss, the host moves experts meanwhile, and runs ahead of both streams as far as it likes. Then the same with
real threads and real bytes.

A step that is one replay of a CUDA graph is one submission: here, all launches of a step are.
"""

from __future__ import annotations

import ctypes
import random
import threading

import numpy as np
import pytest
import torch
from interleavings import ModelMemory, ModelStream, NoWait, Scenario, World, explore, run_randomly
from poison import spoil
from vllm_spac.kernels.types import Experts

from vllm_spac.cache.link import Moved
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.address_table import AddressTable
from vllm_spac.execution.device.admission import DeviceTable
from vllm_spac.execution.device.moves import StepMover
from vllm_spac.execution.device.slot_offers import Offering
from vllm_spac.execution.exchange import ThreadStream
from vllm_spac.storage.memory import MemoryStore

# Two slots of three experts: what the host moves, a layer may miss before, meanwhile and after.
SMALL = Scenario(keys=3, slots=2, width=1, steps=[[[0]], [[0, 2]], [[2, 1]], [[0, 2]]], names=[[], [2], [2], [1]])


def test_no_interleaving_of_a_small_model_reads_a_slot_that_is_written():
    interleavings, states, ends = explore(World(SMALL))
    print(f"{interleavings:.3g} interleavings, {states} states, moves {sorted(ends)}")
    assert {(), (2,), (2, 1)} <= ends and interleavings > 10**9


# --- what the explorer must find ------------------------------------------------------------------------------------


class NotHome(ModelMemory):
    """Step 1 is left out."""

    def leave(self, keys, slots):
        return []


class Early(ModelStream):
    """Step 2 waits for an event that was recorded before the last kernel, not after it."""

    def record(self):
        event = super().record()
        kernels = [at for at in range(self.next, len(self.queue)) if self.queue[at][0] == "kernel"]
        if kernels and self.queue[-2][0] != "report":
            self.queue.insert(kernels[-1], self.queue.pop())
        return event


class Hasty(StepMover):
    """Steps 3 and 4 are swapped: the table says that e_new is there before its bytes are."""

    def fetch(self, loads):
        super().fetch(loads)
        self._compute.submit(self._memory.enter, *zip(*loads, strict=True))


class AllOnCopyStream(StepMover):
    """Pointers are written by the copy stream, with the event after the last use that the host has submitted."""

    def fetch(self, loads):
        used, compute, self._compute = self._compute.record(), self._compute, self._copy
        super().fetch(loads)
        self._compute = compute
        self._copy.wait(used)


class EnteredOnCopyStream(StepMover):
    """Step 4 is right, but runs on the copy stream without being ordered behind what the compute stream does next."""

    def reap(self):
        compute, self._compute = self._compute, self._copy
        try:
            return super().reap()
        finally:
            self._compute = compute


class Unreported(StepMover):
    """A slot is the host's as soon as it is not offered, whatever the steps before may have done with it."""

    def withhold(self, slots, count):
        closed = super().withhold(slots, count)
        self._mine |= {slot: int(self._residency.owner[slot]) for slot in self._withheld}
        self._withheld.clear()
        return closed


class OfferedToo(StepMover):
    """The host's slots are on offer, too."""

    def withhold(self, slots, count):
        super().withhold(slots, count)
        return ()


class Unstamped(StepMover):
    """Step 4 waits for the bytes alone: a step before may have given the expert a slot."""

    def fetch(self, loads):
        launched, self._launched = self._launched, 0
        super().fetch(loads)
        self._launched = launched


class NeverVoid(StepMover):
    """A move goes on after a step has given its expert another slot."""

    def void(self, keys):
        pass


class Welcome(Offering):
    """An expert that is on the way may be given a slot by layers, too."""

    def offer(self, withhold=None):
        offered = super().offer(withhold)
        return offered._replace(used=np.full_like(offered.used, np.inf))


class BelievesAll(Offering):
    """Reports are believed about all slots, also about those that the host has moved into since."""

    def learn(self, *args, offered, **options):
        return super().learn(*args, offered=None, **options)


BUGS = {
    "step 1 left out": {"memory": NotHome},
    "step 2 left out": {"copying": NoWait},
    "steps 3 and 4 swapped": {"make_mover": Hasty},
    "event recorded too early": {"compute": Early},
    "step 1 on the copy stream": {"make_mover": AllOnCopyStream},
    "step 4 on the copy stream": {"make_mover": EnteredOnCopyStream},
    "moved into before reports": {"make_mover": Unreported},
    "moved into and offered": {"make_mover": OfferedToo},
    "arrived before reports": {"make_mover": Unstamped},
    "never void": {"make_mover": NeverVoid},
    "admitted on the way": {"make_offering": Welcome},
    "reports about all slots": {"make_offering": BelievesAll},
    "drafts not awaited": {"joins": False},
}


# --- larger models, random orders ------------------------------------------------------------------------------------


def large(rng: random.Random) -> Scenario:
    """3 to 8 experts in fewer slots, 8 steps of 1 or 2 launches of up to 3 blocks, up to 3 moves, 3 bytes, drafts."""
    keys = rng.randint(3, 8)
    steps = [[rng.sample(range(keys), rng.randint(1, 3)) for _ in range(rng.randint(1, 2))] for _ in range(8)]
    wanted = rng.sample(range(keys), rng.randint(1, 3))
    names = [wanted if rng.random() < 0.7 else rng.sample(range(keys), 2) for _ in steps]
    drafts = tuple(tuple(rng.sample(range(keys), 2)) if rng.random() < 0.5 else () for _ in steps)
    sizes = {"most": rng.randint(1, 3), "width": rng.randint(1, 3), "drafts": drafts if rng.random() < 0.5 else ()}
    return Scenario(keys, rng.randint(2, keys - 1), steps, names, **sizes)


# The host moves an expert again and again, which a step that it does not know of yet may have admitted.
RACE = Scenario(keys=3, slots=2, width=1, steps=[[[0]], [[2]], [[2]], [[0]]], names=[[], [2], [2], [2]])


def run(seed: int, **bug) -> World:
    rng = random.Random(seed)
    return run_randomly(World(large(rng), **bug), rng)


SEEDS = [range(250)] + [
    pytest.param(range(start, start + 25_000), marks=[pytest.mark.full, pytest.mark.timeout(1800)])
    for start in range(0, 100_000, 25_000)
]


@pytest.mark.parametrize("seeds", SEEDS, ids=str)
def test_random_interleavings_of_a_large_model(seeds):
    """A hundred thousand of them with those that are marked."""
    moved = sum(len(run(seed).moved) for seed in seeds)
    assert moved > len(seeds) / 2, "hardly anything moved, so hardly anything was tested"


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_of_the_rules_is_found(bug):
    with pytest.raises(AssertionError):
        for seed in range(60):
            run(seed, **BUGS[bug])
        for seed in range(2_000):
            run_randomly(World(RACE, **BUGS[bug]), random.Random(seed))


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
    residency, reader, rng = Residency(EXPERTS, SLOTS, LRU()), Reader(memory), random.Random(0)
    owner = torch.full((SLOTS,), NOWHERE, dtype=torch.int32)
    places = torch.from_numpy(memory.slot_addresses)
    experts = Experts(torch.full((EXPERTS,), NOWHERE, dtype=torch.int32), owner, memory.addresses, memory.hosts, places)
    compute, copying = ThreadStream("compute"), ThreadStream("copy")
    mover = StepMover(residency, DeviceTable(memory, experts), compute, copying, Moved("host", 1))
    mover._mine.update(dict.fromkeys(range(SLOTS), NOWHERE))  # nothing is on offer: all slots are the host's
    arrived = 0

    def arrive() -> int:
        there = mover.reap()
        for key in there:
            residency.loaded(key)
        return len(there)

    for _ in range(150):
        arrived += arrive()
        missing = [key for key in rng.sample(range(EXPERTS), 2) if residency.slot_of[key] == NOWHERE]
        if missing and mover.reading < 2 and (loads := residency.admit_unless(missing[:1], ()).loads):
            mover.fetch(loads)
        mover.check_integrity()
        compute.submit(reader.kernel, rng.sample(range(EXPERTS), 3))
        if rng.random() < 0.5:  # the host runs ahead, but not always
            launched = compute.record()
            compute.submit(reader.kernel, rng.sample(range(EXPERTS), 2))
            launched.wait()
    copying.close()
    arrived += arrive()
    compute.close()
    assert not reader.wrong, reader.wrong[:3]
    assert arrived > 20, "hardly anything moved, so hardly anything was tested"
    assert mover.reading == 0 and owner.tolist() == residency.owner.tolist()


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
