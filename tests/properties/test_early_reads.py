"""Reads ahead, in every order that two streams allow: no kernel reads what is not of its expert, and waits for no read.

The streams are driven by ``DeviceLookahead`` and ``DraftLookahead`` themselves. What they submit becomes micro-steps: a
plan writes one word after another, a program of a read looks at the turn, copies its byte and says so. A block of a
kernel looks up its expert, then whether it is there, and reads byte after byte. A step without plans, as of many rows,
follows one that has them.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from interleavings import Foreign, ModelStream
from vllm_spac.kernels.types import READERS

from vllm_spac.execution.device.draft_lookahead import DraftLookahead
from vllm_spac.execution.device.layer_launches import LayerRows
from vllm_spac.execution.device.layer_lookahead import DeviceLookahead

LAYERS, WIDTH = 4, 2  # bytes of an expert, one of each program that reads
HOST, FOUND = -1, -2


class Planned(DeviceLookahead):
    """With streams of a model, and work that is described."""

    def __init__(self, compute: ModelStream, copy: ModelStream, names: list[int]) -> None:
        self._compute, self._copy, self._last, self.rows = compute, copy, LAYERS - 1, 1
        self._planned = self._read = None
        self._started = False
        self._kept, self._step, self._names = (), [1.0], names
        self._votes = torch.ones(1, 1)

    def _name(self, layer, rows, votes):
        return [("forget", layer + 1), ("zero", layer + 1), ("keys", layer + 1, self._names[layer + 1])]

    def _reads(self, layer, after):
        return [("reads", layer, after)]


@dataclass
class World:
    """Keys of each layer are 2 * layer and the one behind it; ``missing``: those that have no slot.

    Attributes:
        steps: of each whether it is planned, and the experts that each layer uses.
        names: what is named of each layer.
    """

    steps: list[tuple[bool, list[list[int]]]]
    names: list[int]
    missing: set[int]
    later: list[int] | None = None  # in the second step, if it is planned with other names
    planned: type[Planned] = Planned
    marks_first: bool = False  # bugs: a part is there before its bytes, layers share one memory, plans forget nothing
    one_memory: bool = False
    forgets: bool = True
    heeds: bool = True  # the turn
    turn: tuple[int, int] = (-1, 0)
    keys: list[int] = field(default_factory=lambda: [-1] * LAYERS)
    done: list[int] = field(default_factory=lambda: [0] * LAYERS)
    taken: int = 0  # bytes that kernels took from there

    def __post_init__(self) -> None:
        reached, numbers = set(), []
        self.reached = reached
        self.memory = [[None] * WIDTH for _ in range(2)]
        self.blocks: list[list] = []  # of the kernel that runs: [layer, key, where, bytes read]
        self.programs: list[list] = []  # of the read that runs: [layer, byte, bytes copied, marked]
        self.streams = ModelStream(reached, numbers), ModelStream(reached, numbers)
        compute, copy = self.streams
        x = torch.zeros(1, 1)
        rows = LayerRows(x, x, x, x, x)
        ahead = self.planned(compute, copy, self.names)
        for number, (is_planned, used) in enumerate(self.steps):
            ahead._names = self.names if number == 0 else self.later or self.names
            for layer, experts in enumerate(used):
                ahead.wait()
                compute.queue.append(("admit", layer, *experts))
                if is_planned:
                    ahead.start(layer, rows)
                compute.queue.append(("kernel", layer, *experts))
                ahead.start_after(layer)
            ahead.finish()

    def actions(self) -> list[tuple]:
        found = [("block", at) for at in range(len(self.blocks))] + [
            ("program", at) for at in range(len(self.programs))
        ]
        for number, (stream, busy) in enumerate(zip(self.streams, (self.blocks, self.programs), strict=True)):
            if stream.next < len(stream.queue) and not busy:
                step = stream.queue[stream.next]
                if step[0] != "wait" or step[1] in self.reached:
                    found.append(("stream", number))
        return found

    def act(self, action: tuple) -> None:
        kind, at = action
        if kind == "stream":
            stream = self.streams[at]
            stream.next += 1
            self._run(*stream.queue[stream.next - 1])
        elif kind == "block":
            self._read(at)
        else:
            self._copy(at)

    def _run(self, kind: str, layer: int, *more) -> None:
        if kind == "reach":
            self.reached.add(layer)
        elif kind == "admit":
            self.turn = layer, len(self.missing.intersection(more))
        elif kind == "kernel":
            self.blocks = [[layer, key, None, 0] for key in more if key in self.missing]
        elif kind == "forget" and self.forgets:
            for same in range(layer % 2, LAYERS, 2):
                self.done[same] = -1
        elif kind == "zero":
            self.done[layer] = 0
        elif kind == "keys":
            self.keys[layer] = more[0]
        elif kind == "reads" and (not self.heeds or (self.turn[0] == layer - 1 and (self.turn[1] > 0) == more[0])):
            self.programs = [[layer, byte, False, False] for byte in range(WIDTH)] if self.keys[layer] >= 0 else []

    def _place(self, layer: int) -> list:
        return self.memory[0 if self.one_memory else layer % 2]

    def _copy(self, at: int) -> None:
        """Looks at the turn before the byte; the last step says that it is there."""
        layer, byte, copied, marked = program = self.programs[at]
        copies = not copied if not self.marks_first else marked and not copied
        if not copied and not marked and self.heeds and self.turn[0] != layer - 1:
            self.programs.pop(at)
        elif copies:
            self._place(layer)[byte] = self.keys[layer]
            program[2] = True
        elif not marked:
            self.done[layer] += 1
            program[3] = True
        if program[2] and program[3]:
            self.programs.remove(program)

    def _read(self, at: int) -> None:
        layer, key, where, read = block = self.blocks[at]
        if where is None:
            block[2] = FOUND if self.keys[layer] == key else HOST
        elif where == FOUND:
            block[2] = layer if self.done[layer] == WIDTH else HOST
        elif where != HOST:
            if self._place(layer)[read] != key:
                raise Foreign(f"a kernel asked for {key} and read {self._place(layer)}")
            self.taken += 1
            block[3] += 1
        if block[2] == HOST or block[3] == WIDTH:
            self.blocks.remove(block)

    def key(self) -> bytes:
        ahead = [stream.next for stream in self.streams]
        state = (
            self.turn,
            self.keys,
            self.done,
            self.memory,
            sorted(map(str, self.blocks)),
            sorted(map(str, self.programs)),
        )
        return pickle.dumps((ahead, state, sorted(self.reached)))


def explore(world: World) -> tuple[int, int]:
    """Every order from here; returns how many states there are, and the most bytes that kernels took in one order."""
    known: dict[bytes, int] = {}
    todo, most = [pickle.dumps(world)], 0
    while todo:
        here = todo.pop()
        found: World = pickle.loads(here)
        actions = found.actions()
        if not actions:
            assert all(stream.next == len(stream.queue) for stream in found.streams), "the streams are stuck"
            assert not found.blocks and not found.programs
            most = max(most, found.taken)
        for action in actions:
            following: World = pickle.loads(here)
            following.act(action)
            name = following.key()
            if known.get(name, -1) < following.taken:
                known[name] = following.taken
                todo.append(pickle.dumps(following))
    return len(known), most


USED = [[0], [2, 3], [4, 5], [6]]
RIGHT, WRONG, OTHER = [-1, 2, 4, 6], [-1, 3, 5, 7], [-1, 2, -1, 6]
EVERY = set(range(2 * LAYERS))


@pytest.mark.parametrize("names", [RIGHT, WRONG, OTHER], ids=["right", "partly", "not of all"])
@pytest.mark.parametrize("missing", [EVERY, {2, 4, 6, 7}, {3, 6}], ids=["all miss", "the first misses nothing", "few"])
def test_no_order_reads_what_is_not_there(names: list[int], missing: set[int]) -> None:
    assert READERS > 1
    states, taken = explore(World([(True, USED)], names, missing))
    assert states > 100
    assert taken > 0 or not missing.intersection(names, *USED)


@pytest.mark.parametrize("missing", [EVERY, {2, 6}], ids=["all miss", "few"])
def test_steps_without_plans_find_nothing_stale(missing: set[int]) -> None:
    steps = [(True, [[0], [2], [4], [6]]), (False, [[0], [2], [4], [6]])]
    assert explore(World(steps, RIGHT, missing))[1] > 0


class Hasty(Planned):
    """A bug: a layer does not wait for its plan."""

    def wait(self) -> None:
        self._planned = None


@pytest.mark.parametrize(
    "bug",
    [{"marks_first": True}, {"one_memory": True}, {"forgets": False}, {"planned": Hasty, "heeds": False}],
    ids=["there before its bytes", "one memory for all layers", "nothing is forgotten", "neither plans nor turns"],
)
def test_bugs_are_found(bug: dict) -> None:
    steps = [(True, [[0], [2], [4], [6]]), (False, [[0], [2], [4], [6]])]
    with pytest.raises((Foreign, AssertionError)):
        for missing in (EVERY, {2, 6}, {2, 4, 6}):
            explore(World(steps, RIGHT, missing, **bug))
            explore(World([(True, [[0], [2]]), (True, [[0], [2]])], RIGHT, missing, WRONG, **bug))


# --- while drafts are made --------------------------------------------------------------------------------------------


class Drafted(DraftLookahead):
    """With streams of a model, and work that is described."""

    def __init__(self, compute: ModelStream, copy: ModelStream) -> None:
        self._compute, self._copy, self._layers = compute, copy, LAYERS
        self._planned = self._read = None
        self._kept, self._drafted = [], False
        self.parts = SimpleNamespace(turn=SimpleNamespace(fill_=lambda turn: [("turn", turn)]))
        self._taken, self._new = 0, (0, 0)

    def _plan(self, inputs, first):
        steps = [("forget", entry) for entry in range(ENTRIES)] if first else []
        begin = 0 if first else self._taken
        named = inputs.draft_ids[: ENTRIES - begin]
        self._taken = begin + len(named)
        self._new = begin, self._taken
        return steps + [("key", begin + at, key) for at, key in enumerate(named)]

    def _read_new(self):
        return [("reads", *self._new)]


ENTRIES = 2


class Waits(AssertionError):
    """A read goes on while the step waits for what is behind it."""


@dataclass
class DraftWorld(World):
    """``names``: of each step, the keys that each forward of the drafter before it names."""

    drafted: type[Drafted] = Drafted
    tallies: bool = True  # steps do; other forwards through the layers do not

    def __post_init__(self) -> None:
        self.reached = reached = set()
        self.keys, self.done = [-1] * ENTRIES, [0] * ENTRIES
        self.memory = [[None] * WIDTH for _ in range(ENTRIES)]
        self.blocks, self.programs = [], []
        self.streams = ModelStream(reached, numbers := []), ModelStream(reached, numbers)
        compute, copy = self.streams
        ahead = self.drafted(compute, copy)
        for (_, used), named in zip(self.steps, self.names, strict=True):
            for keys in named:
                ahead.draft(keys)
            ahead.begin()
            for layer, experts in enumerate(used):
                ahead.wait()
                compute.queue.append(("kernel", layer, *experts))
            ahead.finish()
            if self.tallies:
                compute.queue += [("none", entry) for entry in range(ENTRIES)]

    def _run(self, kind: str, at: int, *more) -> None:
        if kind == "turn":
            self.turn = at, 0
        elif kind in ("forget", "none"):
            self.done[at] = 0
            self.keys[at] = -1 if kind == "forget" else self.keys[at]
        elif kind == "key":
            self.keys[at] = more[0]
        elif kind == "reads":
            self.programs = [[byte, at, more[0], False] for byte in range(WIDTH)] if at < more[0] else []
        else:
            super()._run(kind, at, *more)

    def _copy(self, at: int) -> None:
        byte, entry, last, begun = program = self.programs[at]
        if not begun and self.heeds and self.turn[0] != -2:
            self.programs.pop(at)
            return
        waiting = self.streams[0].queue[self.streams[0].next :][:1]
        waits = waiting and waiting[0][0] == "wait" and waiting[0][1] not in self.reached
        if not begun and waits and self.heeds:
            raise Waits(f"the step waits for {waiting[0][1]}, behind a read")
        if begun == self.marks_first:
            self.memory[entry][byte] = self.keys[entry]
        else:
            self.done[entry] += 1
        program[1:] = (entry + 1, last, False) if begun else (entry, last, True)
        if program[1] == last:
            self.programs.remove(program)

    def _read(self, at: int) -> None:
        layer, key, where, read = block = self.blocks[at]
        if where is None:
            block[2] = (self.keys.index(key), False) if key in self.keys else HOST
        elif not where[1]:
            block[2] = (where[0], True) if self.done[where[0]] == WIDTH else HOST
        else:
            if self.memory[where[0]][read] != key:
                raise Foreign(f"a kernel asked for {key} and read {self.memory[where[0]]}")
            self.taken += 1
            block[3] += 1
        if block[2] == HOST or block[3] == WIDTH:
            self.blocks.remove(block)


# Two steps: of each the forwards of the drafter before it, and what its layers use.
TWO = [[[1, 3], [4]], [[3], [5]]]
ONE = [[[1, 3]], [[3]]]
AGAIN = [(True, [[1], [3, 2]]), (True, [[1], [3]])]


@pytest.mark.parametrize("tallies", [True, False], ids=["steps", "other forwards"])
@pytest.mark.parametrize(
    "names", [TWO, ONE, [[[1], [3]], []], [[], [[3, 1]]]], ids=["two each", "one", "first", "last"]
)
def test_no_order_reads_what_was_not_read_for_drafts(names: list, tallies: bool) -> None:
    states, taken = explore(DraftWorld(AGAIN, names, EVERY, tallies=tallies))
    assert states > 100 and taken > 0


class NoTurn(Drafted):
    """A bug: the step waits for the plan before it stops reads."""

    def wait(self) -> None:
        if self._planned is not None:
            self._compute.wait(self._planned)
            self._compute.submit(self.parts.turn.fill_, -1)
            self._planned = None


class Careless(Drafted):
    """A bug: the step does not wait for the plan."""

    def wait(self) -> None:
        self._planned = None


class InUse(Drafted):
    """A bug: a plan is not behind the step before."""

    def __init__(self, compute: ModelStream, copy: ModelStream) -> None:
        super().__init__(compute, copy)
        self._copy = SimpleNamespace(submit=copy.submit, record=copy.record, wait=lambda event: None)


class Unforgotten(Drafted):
    """A bug: what was there of other experts is still there."""

    def _plan(self, inputs, first):
        return [step for step in super()._plan(inputs, first) if step[0] != "forget"]


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        ({"marks_first": True}, Foreign),
        ({"drafted": NoTurn}, Waits),
        ({"drafted": Careless, "heeds": False}, Foreign),
        ({"drafted": InUse, "heeds": False}, Foreign),
        ({"drafted": Unforgotten}, Foreign),
    ],
    ids=["there before its bytes", "waits before it stops reads", "no wait", "memory in use", "nothing is forgotten"],
)
def test_bugs_in_reads_for_drafts_are_found(bug: dict, found: type[Exception]) -> None:
    with pytest.raises(found):
        for tallies in (True, False):
            for names in (TWO, ONE):
                explore(DraftWorld(AGAIN, names, EVERY, tallies=tallies, **bug))
