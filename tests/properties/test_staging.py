"""Buffers that are filled while layers run: the order of copies and launches, in every interleaving.

``Staging`` shares the two streams of a model with what gives slots to layers and drafts; see ``interleavings``. A
launch of a staged layer reads the table of its buffer, then what the table points at: a slot, or a place in the buffer.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import interleavings
import numpy as np
import pytest
import torch
from poison import poison_buffers

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import ConfigError
from vllm_spac.execution.address_table import AddressTable
from vllm_spac.execution.device.staging import BUFFERS, ExpertBuffers, Staging, divide, staging_bytes
from vllm_spac.execution.exchange import ThreadStream
from vllm_spac.storage.host import HostStore

PROMPT = "prompt"


@dataclass
class Scenario(interleavings.Scenario):
    """A step may also be PROMPT: every layer needs all of its experts, staged. Key = layer * experts + expert."""

    layers: int = 3
    experts: int = field(init=False)

    def __post_init__(self) -> None:
        self.experts = self.keys // self.layers


class ModelBuffers:
    """Micro-steps of filling a buffer and of writing its table."""

    def __init__(self, scenario: Scenario) -> None:
        self._experts, self._width = scenario.experts, scenario.width

    def fill(self, buffer, layer, missing):
        places = [(expert, place) for expert in missing.tolist() for place in range(self._width)]
        return [("fill", buffer, expert, place, layer * self._experts + expert) for expert, place in places]

    def direct(self, buffer, layer, slots):
        return [("direct", buffer, expert, int(slot)) for expert, slot in enumerate(slots)]


class World(interleavings.World):
    """With staged steps: their blocks read ``staged[buffer][expert]`` where the buffer's table says NOWHERE."""

    def __init__(self, scenario: Scenario, make_staging=Staging, buffers=ModelBuffers, **others) -> None:
        super().__init__(scenario, **others)
        self.staging = make_staging(buffers(scenario), scenario.layers, self.compute, self.copy)
        self.tables = [[NOWHERE] * scenario.experts for _ in range(BUFFERS)]
        self.staged = [[[None] * scenario.width for _ in range(scenario.experts)] for _ in range(BUFFERS)]

    def actions(self) -> list[tuple]:
        """Before a staged step the host waits for the reports of the others."""
        found = super().actions()
        waits = self.step < len(self.scenario.steps) and self.scenario.steps[self.step] == PROMPT and self.took
        if waits and not all(event.done() for event, *_ in self.reports):
            found.remove(("host",))
        return found

    def _host(self) -> None:
        if self.scenario.steps[self.step] != PROMPT or not self.took:
            super()._host()
            return
        self.took = False
        self._take()  # as ``Admission.slots`` in the first layer
        slots = self.offering.residency.slot_of.reshape(self.scenario.layers, -1)
        self.staging.begin()
        self.compute.queue.append(("offers", ()))
        for layer in range(self.scenario.layers):
            with self.staging.layer(layer, slots) as buffer:
                self.compute.queue.append(("staged", buffer, layer))
        self._end()

    def _run(self, step: tuple) -> None:
        if step[0] == "fill":
            self.staged[step[1]][step[2]][step[3]] = step[4]
        elif step[0] == "direct":
            self.tables[step[1]][step[2]] = step[3]
        elif step[0] == "staged":
            self.blocks = [[expert, 0, None, *step[1:]] for expert in range(self.scenario.experts)]
        else:
            super()._run(step)

    def _read(self, index: int) -> None:
        block = self.blocks[index]
        if len(block) == 3:
            super()._read(index)
            return
        expert, read, slot, buffer, layer = block
        if slot is None:
            block[2] = self.tables[buffer][expert]
            return
        found = self.staged[buffer][expert] if slot == NOWHERE else self.bytes[slot]
        if found[read] != layer * self.scenario.experts + expert:
            raise interleavings.Foreign(f"layer {layer} asked for expert {expert} and read {found}")
        block[1] += 1
        if block[1] == self.scenario.width:
            del self.blocks[index]

    def key(self) -> tuple:
        events = [event and event.name for event in (*self.staging._copied, *self.staging._read)]
        staged = tuple(tuple(map(tuple, buffer)) for buffer in self.staged)
        return (*super().key(), staged, tuple(map(tuple, self.tables)), tuple(self.staging._holds), tuple(events))


# An expert a layer, three layers, two buffers: the third layer takes the first one's. Slots change hands between.
SMALL = Scenario(keys=3, slots=1, width=1, steps=[[[1]], PROMPT, [[2]], [[0]], PROMPT], drafts=((), (0,), (1,), (), ()))


def test_no_interleaving_reads_a_buffer_that_is_written():
    count, states, ends = interleavings.explore(World(SMALL))
    print(f"{count:.3g} interleavings, {states} states, slots {sorted(ends)}")
    assert len(ends) > 1 and count > 10**9


class NoRead(Staging):
    """R is left out: a buffer is filled again whenever the copy stream comes to it."""

    def _fill(self, layer, slots):
        self._read = [None] * BUFFERS
        super()._fill(layer, slots)


class NoCopied(Staging):
    """C is left out: a layer is launched when its copies may be still to come."""

    def __init__(self, buffers, layers, compute, copy):
        super().__init__(buffers, layers, compute, copy)
        compute.wait = lambda event: None


class Stale(Staging):
    """What lies in the buffers is relied upon in the next step, too."""

    def begin(self):
        pass


class TableAhead(Staging):
    """A table is written with the copies, one layer ahead, on the copy stream, but not behind R."""

    def _fill(self, layer, slots):
        if self._holds[layer % BUFFERS] != layer:
            self._copy.submit(self._buffers.direct, layer % BUFFERS, layer, slots[layer])
        super()._fill(layer, slots)


BUGS = {"no R": NoRead, "no C": NoCopied, "stale": Stale, "table ahead": TableAhead}


@pytest.mark.parametrize("bug", BUGS)
def test_every_bug_is_found(bug):
    with pytest.raises(interleavings.Foreign):
        for seed in range(20_000):
            run(seed, make_staging=BUGS[bug])


def run(seed: int, **bug) -> None:
    """3 to 5 layers of 2 experts, prompts between steps that give slots away, as do their drafts."""
    rng = random.Random(seed)
    layers = rng.randint(3, 5)
    steps = [PROMPT if rng.random() < 0.4 else [rng.sample(range(2 * layers), 2)] for _ in range(6)]
    drafts = tuple(tuple(rng.sample(range(2 * layers), 2)) if rng.random() < 0.5 else () for _ in steps)
    scenario = Scenario(2 * layers, rng.randint(1, 4), steps, drafts=drafts, layers=layers)
    interleavings.run_randomly(World(scenario, **bug), rng)


def test_random_interleavings_of_larger_models():
    for seed in range(300):
        run(seed)


# --- real threads, real bytes ----------------------------------------------------------------------------------------

LAYERS, EXPERTS, WORDS = 5, 4, 1 << 12
SHAPE = MoEShape(tuple("abcde"), EXPERTS, 2, {"w": TensorSpec((WORDS,), torch.float32)})


def test_threads_read_their_layer_and_nothing_else():
    """Expert e is e everywhere; buffers are NaN before each copy; both streams are threads, the host runs ahead."""
    store = HostStore(SHAPE, "")
    for key in range(SHAPE.total):
        store.put(key, {"w": torch.full((WORDS,), float(key))})
    slots = {"w": torch.arange(SHAPE.total, dtype=torch.float32)[:7, None].repeat(1, WORDS)}  # keys 0 ... 6
    buffers = ExpertBuffers(store, AddressTable(store, slots, SHAPE.total), slots)
    poison_buffers(buffers)
    compute, copy = ThreadStream("compute"), ThreadStream("copy")
    staging, wrong, rng = Staging(buffers, LAYERS, compute, copy), [], random.Random(0)
    at = np.full((LAYERS, EXPERTS), NOWHERE)
    own = {slot.data_ptr(): key for key, slot in enumerate(slots["w"])}
    places = [{tensor.data_ptr(): tensor for tensor in b["w"]} for b in buffers._tensors]

    def kernel(buffer: int, layer: int) -> None:
        for expert, address in enumerate(buffers.tables[buffer]["w"].tolist()):
            key = layer * EXPERTS + expert
            if (address in own) != (at[layer, expert] != NOWHERE):
                wrong.append(f"{key} is at the wrong kind of place")
            seen = slots["w"][own[address]] if address in own else places[buffer][address]
            for _ in range(3):
                if not bool((seen == key).all()):
                    wrong.append(f"{key}: {seen.unique().tolist()}")
                threading.Event().wait(rng.random() * 1e-4)

    for _ in range(40):
        compute.record().wait()  # as ``at`` is shared with the kernels here
        at[:] = NOWHERE
        for key in rng.sample(range(7), rng.randint(0, 7)):
            at[key // EXPERTS, key % EXPERTS] = key
        staging.begin()
        for layer in range(LAYERS):
            with staging.layer(layer, at) as buffer:
                compute.submit(kernel, buffer, layer)
    copy.close()
    compute.close()
    assert not wrong, wrong[:3]


# --- what it takes ---------------------------------------------------------------------------------------------------

AUTO, HALF, ALL = SlotCount(), SlotCount.parse("50%"), SlotCount.parse("100%")
SIZE = SHAPE.expert_bytes


@pytest.mark.parametrize(
    ("slots", "knob", "free", "expected"),
    [
        (AUTO, "off", 16, (16, False)),
        (AUTO, "on", 16, (8, True)),
        (AUTO, "auto", 16, (16, False)),  # 8 of 16 are more than a quarter
        (AUTO, "auto", 32, (20, False)),  # all fit
        (AUTO, "on", 21, (20, False)),
        (HALF, "auto", 17, (10, False)),
        (HALF, "auto", 32, (10, True)),
        (HALF, "on", 18, (10, True)),
        (ALL, "on", 20, (20, False)),
    ],
)
def test_what_is_divided(slots, knob, free, expected):
    assert staging_bytes(SHAPE) == 8 * SIZE
    assert divide(slots, knob, SHAPE, free * SIZE) == expected


def test_what_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="are left"):
        divide(HALF, "on", SHAPE, 17 * SIZE)
    assert divide(HALF, "auto", SHAPE, 10 * SIZE) == (10, False)
