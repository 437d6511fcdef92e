"""Slots that steps borrow while layers run: the order of copies and launches, in every interleaving.

``BorrowedSlots`` shares slots, table and the two streams of a model with what gives slots to layers; see
``interleavings``.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import interleavings
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.execution.device.borrowed_slots import BorrowedSlots, Loan, SlotMoves
from vllm_spac.execution.exchange import ThreadStream
from vllm_spac.storage.host import HostStore

PROMPT = "prompt"


@dataclass
class Scenario(interleavings.Scenario):
    """A step may also be PROMPT: every layer needs all of its experts. Key = layer * experts + expert."""

    layers: int = 3
    experts: int = field(init=False)

    def __post_init__(self) -> None:
        self.experts = self.keys // self.layers


class ModelMoves:
    """Micro-steps of what is submitted."""

    def __init__(self, scenario: Scenario) -> None:
        self._width = scenario.width

    def evict(self, keys):
        return [("evict", key) for key in keys.tolist()]

    def write(self, keys, slots):
        return [("point", key, slot) for key, slot in zip(keys.tolist(), slots.tolist(), strict=True)]

    def fill(self, keys, slots):
        pairs = zip(keys.tolist(), slots.tolist(), strict=True)
        return [("byte", slot, at, key) for key, slot in pairs for at in range(self._width)]


class World(interleavings.World):
    """With steps that borrow slots; with ``fails`` they end after so many layers."""

    def __init__(self, scenario: Scenario, borrowed=BorrowedSlots, moves=ModelMoves, fails=None, **others):
        super().__init__(scenario, **others)
        self.borrowed = borrowed(moves(scenario), self.compute, self.copy)
        self.fails = fails

    def actions(self) -> list[tuple]:
        """Before such a step the host waits for the reports of the others."""
        found = super().actions()
        waits = self.step < len(self.scenario.steps) and self.scenario.steps[self.step] == PROMPT and self.took
        events = [event for event, *_ in self.reports] + [self.updated] * (self.updated is not None)
        if waits and not all(event.done() for event in events):
            found.remove(("host",))
        return found

    def _host(self) -> None:
        if self.scenario.steps[self.step] != PROMPT or not self.took:
            super()._host()
            return
        self.took = False
        self._offer()
        self._take()  # as ``Admission.slots`` and ``order`` in the first layer
        residency = self.account.residency
        slots = residency.slot_of.reshape(self.scenario.layers, -1)
        self.borrowed.begin(Loan.of(slots, residency.owner[self.order]))
        for layer in range(self.scenario.layers if self.fails is None else self.fails):
            parts = self.borrowed.parts(layer)
            mine = {key for part in parts for key in self.borrowed.keys(part).tolist()}
            first = layer * self.scenario.experts
            others = set(range(first, first + self.scenario.experts)) - mine
            for part in parts:
                self.borrowed.begin_part(part)
                self.compute.queue.append(("part", *others, *self.borrowed.keys(part).tolist()))
                others = set()
        _, keys, left = self.borrowed.end()
        changed = residency.owner[left] != keys
        residency.update_owners(left[changed], keys[changed])
        self._end()

    def _run(self, step: tuple) -> None:
        if step[0] == "evict":
            self.table[step[1]] = NOWHERE
        elif step[0] == "point":
            self.table[step[1]], self.owner[step[2]] = step[2], step[1]
        elif step[0] == "part":
            self.begin_kernel(step[1:])
            if any(self.table[key] == NOWHERE for key in step[1:]):
                raise interleavings.Foreign("an expert is not there that was to be copied")
        else:
            super()._run(step)


# An expert a layer, three layers. Slots change hands between; a ring of one slot, filled in every layer.
SMALL = Scenario(3, 1, [[[1]], PROMPT, [[2]], PROMPT, [[0]]], width=1)
# Two of four slots are a ring that is ahead of the layers by one expert.
AHEAD = Scenario(6, 4, [[[5]], PROMPT, [[0]], PROMPT, [[1]]], width=1)


@pytest.mark.parametrize("scenario", [SMALL, AHEAD], ids=["one place", "two places"])
def test_no_interleaving_reads_a_slot_that_is_written(scenario):
    count, states, ends = interleavings.explore(World(scenario))
    print(f"{count:.3g} interleavings, {states} states, slots {sorted(ends)}")
    assert count > 10**8


class Deaf:
    """A stream that waits for nothing."""

    def __init__(self, stream) -> None:
        self.submit, self.record = stream.submit, stream.record

    def wait(self, event) -> None:
        pass


class NoEvicted(BorrowedSlots):
    """E is left out: places are filled whenever the copy stream comes to it."""

    def __init__(self, moves, compute, copy):
        super().__init__(moves, compute, Deaf(copy))


class NoCopied(BorrowedSlots):
    """C is left out: a part is launched when its copies may be still to come."""

    def __init__(self, moves, compute, copy):
        super().__init__(moves, compute, copy)
        self._compute = Deaf(compute)


class TooFar(BorrowedSlots):
    """A place more is filled than is free."""

    def _fill(self, stop, *, whole=True):
        super()._fill(stop + whole, whole=whole)


class Kept(BorrowedSlots):
    """The owners of borrowed slots stay in the table until others are seated."""

    def begin(self, loan):
        super().begin(loan._replace(owners=loan.owners[:0]))


class Forgotten(ModelMoves):
    """An expert that has been copied over stays in the table."""

    def evict(self, keys):
        return super().evict(keys) if len(keys) > 1 else []


class Lost(BorrowedSlots):
    """What was copied ahead when a step ends is not written to the table."""

    def end(self):
        self._copied = []
        return super().end()


BUGS = {
    "no E": {"borrowed": NoEvicted},
    "no C": {"borrowed": NoCopied},
    "too far": {"borrowed": TooFar},
    "kept": {"borrowed": Kept},
    "forgotten": {"moves": Forgotten},
    "lost": {"borrowed": Lost},
}


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_is_found(bug):
    with pytest.raises(AssertionError):
        for seed in range(20_000):
            run(seed, **BUGS[bug])


def run(seed: int, **bug) -> None:
    """3 to 5 layers of 2 experts, prompts between steps that give slots away."""
    rng = random.Random(seed)
    layers = rng.randint(3, 5)
    steps = [PROMPT if rng.random() < 0.4 else [rng.sample(range(2 * layers), 2)] for _ in range(6)]
    scenario = Scenario(2 * layers, rng.randint(1, 2 * layers - 1), steps, layers=layers)
    fails = rng.randint(0, layers) if rng.random() < 0.2 else None
    interleavings.run_randomly(World(scenario, fails=fails, **bug), rng)


def test_random_interleavings_of_larger_models():
    for seed in range(300):
        run(seed)


# --- what is borrowed ------------------------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_a_loan_copies_what_is_missing_once(layers, experts, data):
    total = layers * experts
    order = np.array(data.draw(st.permutations(range(total)))[: data.draw(st.integers(1, total))], dtype=np.int64)
    slot_of = np.full(total, NOWHERE, dtype=np.int32)
    slot_of[order] = data.draw(st.permutations(range(len(order))))
    first = data.draw(st.integers(0, layers - 1))
    loan = Loan.of(slot_of.reshape(layers, experts), order, first)
    size = len(loan.ring)
    assert size <= max(1, len(order) // 2) and size <= len(loan.keys)
    assert set(loan.owners.tolist()) == set(order[:size].tolist()), "the least valuable"
    assert (slot_of[loan.owners] == loan.ring).all() and (np.diff(loan.ring) > 0).all()
    away = set(np.flatnonzero(slot_of == NOWHERE).tolist()) | set(loan.owners.tolist())
    assert loan.keys.tolist() == sorted(key for key in away if key >= first * experts)
    assert bool(size) == bool((slot_of[first * experts :] == NOWHERE).any())
    assert [part.start for part in loan.parts] == [0, *(part.stop for part in loan.parts[:-1])]
    assert sorted({part.layer for part in loan.parts}) == list(range(first, layers))
    for part in loan.parts:
        assert part.stop - part.start <= max(1, size // 2)
        assert (loan.keys[part.start : part.stop] // experts == part.layer).all()


def test_what_is_borrowed_by_hand():
    """42 slots, 3 layers of 20 that miss 6 each: no more is borrowed than is missing, from the first layers here."""
    slot_of = np.arange(60).reshape(3, 20)
    slot_of[:, 14:] = NOWHERE
    slot_of[slot_of != NOWHERE] = np.arange(42)
    loan = Loan.of(slot_of, np.flatnonzero(slot_of.ravel() != NOWHERE))
    assert loan.ring.tolist() == list(range(18)) and [part.layer for part in loan.parts] == [0, 0, 0, 1, 1, 2]
    assert [part.stop for part in loan.parts] == [7, 14, 20, 25, 30, 36]


# --- real threads, real bytes ----------------------------------------------------------------------------------------

LAYERS, EXPERTS, WORDS = 5, 4, 1 << 12
SHAPE = MoEShape(tuple("abcde"), EXPERTS, 2, {"w": TensorSpec((WORDS,), torch.float32)})


class Table:
    """As ``Admission`` writes it."""

    delivery = None  # of what the device cannot address

    def __init__(self, slots: int) -> None:
        self.slot_of = np.full(SHAPE.total, NOWHERE, dtype=np.int64)
        self.slot_of[:slots] = np.arange(slots)

    def evict(self, keys: np.ndarray) -> None:
        self.slot_of[keys] = NOWHERE

    def write(self, keys: np.ndarray, slots: np.ndarray) -> None:
        self.slot_of[keys] = slots


@pytest.mark.parametrize("count", [1, 7, 16])
def test_threads_read_their_layer_and_nothing_else(count):
    """Expert e is e everywhere; slots are NaN before each copy; both streams are threads, the host runs ahead."""
    store = HostStore(SHAPE, "")
    for key in range(SHAPE.total):
        store.put(key, {"w": torch.full((WORDS,), float(key))})
    slots = {"w": torch.arange(SHAPE.total, dtype=torch.float32)[:count, None].repeat(1, WORDS)}
    table = Table(count)
    moves = SlotMoves(store, slots, table)
    fill = moves.fill

    def poisoned(keys: np.ndarray, places: np.ndarray) -> None:
        slots["w"][places] = float("nan")
        fill(keys, places)

    moves.fill = poisoned
    compute, copy = ThreadStream("compute"), ThreadStream("copy")
    borrowed, wrong, rng = BorrowedSlots(moves, compute, copy), [], random.Random(0)

    def kernel(keys: list[int]) -> None:
        for key in keys:
            seen = slots["w"][table.slot_of[key]]
            for _ in range(3):
                if table.slot_of[key] == NOWHERE or not bool((seen == key).all()):
                    wrong.append(f"{key}: {seen.unique().tolist()}")
                threading.Event().wait(rng.random() * 1e-4)

    for _ in range(20):
        compute.record().wait()  # as the table is read here
        order = np.flatnonzero(table.slot_of != NOWHERE)
        rng.shuffle(order)
        borrowed.begin(Loan.of(table.slot_of.reshape(LAYERS, EXPERTS), order))
        for layer in range(LAYERS):
            for part in borrowed.parts(layer):
                borrowed.begin_part(part)
                compute.submit(kernel, borrowed.keys(part).tolist())
        borrowed.end()
    copy.close()
    compute.record().wait()
    compute.close()
    assert not wrong, wrong[:3]
