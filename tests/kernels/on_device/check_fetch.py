"""Checks that every byte of the admitted experts is copied, and no other, by a grouped GEMM."""

from collections.abc import Iterator
from dataclasses import replace

import moe_layers
import pytest
import quantised_layers
import torch
from moe_layers import Layer
from quantised_layers import FORMATS, QuantisedLayer
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder
from vllm_spac.kernels.fetch import read_early
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.grouped_gemm import grouped_gemm
from vllm_spac.kernels.reference import fetch as reference
from vllm_spac.kernels.reference import grouped_gemm as gemm_twin
from vllm_spac.kernels.types import (
    ADMITTED,
    EARLY_ROWS,
    HIT,
    READERS,
    STREAMED,
    Early,
    Fills,
    Pieces,
    Quantised,
)

# -- as a grouped GEMM computes ---------------------------------------------------------------------------------------

GUARD = 64  # bytes before and behind a slot that nobody may write
POISON = 255  # in all bytes: NaN, or codes and scales that make it


class Reached:
    """A layer whose experts are in slots, in host memory, or about to get into slots.

    Attributes:
        names: of a launch's tables of addresses, by ``Fills``.
        hosts: by name, of each expert, its bytes.
        slots: as ``hosts``, with guards around them; poisoned where an expert is ``ADMITTED``.
    """

    def __init__(self, layer: Layer | QuantisedLayer, sources: list[int], device: str) -> None:
        self.plain = layer.plain if isinstance(layer, QuantisedLayer) else layer
        self.kind = layer.kind if isinstance(layer, QuantisedLayer) else None
        parts = {"w13": self.plain.w13, "w2": self.plain.w2, "b13": self.plain.b13, "b2": self.plain.b2}
        if isinstance(layer, QuantisedLayer):
            parts |= {"w13": layer.codes13, "w2": layer.codes2, "s13": layer.scales13, "s2": layer.scales2}
        self.sources, self.device = sources, device
        bytes_of = {
            name: [tensor.view(torch.uint8).flatten() for tensor in each] for name, each in parts.items() if each
        }
        if device == "cuda":
            bytes_of = {name: [tensor.pin_memory() for tensor in each] for name, each in bytes_of.items()}
        self.hosts: dict[str, list[Tensor]] = bytes_of
        self.slots = {
            name: [self._slot(*each) for each in zip(tensors, sources, strict=True)]
            for name, tensors in bytes_of.items()
        }

    def _slot(self, host: Tensor, source: int) -> Tensor:
        made = torch.full((len(host) + 2 * GUARD,), 9, dtype=torch.uint8)
        made[GUARD:-GUARD] = POISON if source == ADMITTED else host
        return made.to(self.device)

    def run(self, op, *, whole: bool = False, **options) -> Tensor:
        """``whole``: as if every expert were read where it is stored."""
        hosts = {name: self._table(each) for name, each in self.hosts.items()}
        tables = hosts if whole else {
            name: torch.where(
                torch.tensor([source in (HIT, ADMITTED) for source in self.sources], device=self.device),
                self._table(slots) + GUARD,
                hosts[name],
            )
            for name, slots in self.slots.items()
        }  # fmt: skip
        if not whole:
            sources = torch.tensor(self.sources, dtype=torch.int32, device=self.device)
            options["fills"] = Fills(sources, **hosts)
        if self.kind is not None:
            options["quantised"] = Quantised(self.kind, tables["s13"], tables["s2"])
        layer = self.plain
        given = (tensor.to(self.device) for tensor in (layer.x, layer.weights, layer.ids))
        x, weights, ids = given
        biases = tables.get("b13"), tables.get("b2")
        return op(
            x, tables["w13"], tables["w2"], weights, ids, layer.intermediate, *biases, layer.activation, **options
        ).cpu()

    def _table(self, tensors: list[Tensor]) -> Tensor:
        return torch.tensor([tensor.data_ptr() for tensor in tensors], device=self.device)

    def check(self, selected: set[int]) -> None:
        """Every byte of the experts that were to be copied is there, and nothing else was written."""
        for name, slots in self.slots.items():
            for expert, (slot, source) in enumerate(zip(slots, self.sources, strict=True)):
                expected = self._slot(self.hosts[name][expert], HIT if expert in selected else source)
                assert torch.equal(slot, expected), (name, expert)


def selected(layer: Layer) -> set[int]:
    pairs = zip(layer.ids.flatten().tolist(), layer.weights.flatten().tolist(), strict=True)
    return {expert for expert, weight in pairs if weight and 0 <= expert < len(layer.w13)}


MIXED = [ADMITTED, HIT, ADMITTED, ADMITTED, STREAMED, ADMITTED]  # EMPTY is the fourth: it has no rows


@pytest.fixture(params=["forward", "backward"])
def order(request, device) -> Iterator[str]:
    """Programs in order, and the last one first: on a GPU they run as they like."""
    if request.param == "forward" or device == "cuda":
        yield request.param
        return
    builder, set_index = interpreter_builder, interpreter_builder.set_grid_idx
    builder.set_grid_idx = lambda x, y, z: set_index(builder.grid_dim[0] - 1 - x, y, z)
    yield request.param
    builder.set_grid_idx = set_index


def check(layer: Layer | QuantisedLayer, device: str, sources: list[int] = MIXED, **options) -> None:
    """The same bits as without slots, by the kernels and by the twin."""
    for op in (grouped_gemm, gemm_twin.grouped_gemm):
        if op is not grouped_gemm and device == "cuda":
            continue  # it follows addresses of the CPU
        reached = Reached(layer, sources, device)
        plain = reached.plain
        assert torch.equal(reached.run(op, **options), reached.run(op, whole=True, **options))
        reached.check(selected(plain))


@pytest.mark.parametrize("rows", [1, 3, 4, 17, 65])
@pytest.mark.parametrize(("d", "ff", "dtype"), [(72, 40, torch.bfloat16)])
def test_a_gemm_copies_what_was_admitted(device, order, rows, d, ff, dtype):
    """Of few rows programs find their blocks themselves; of 65 an expert may have two blocks. Tiles are cut."""
    layer = moe_layers.make(rows, d, ff, dtype, bias=True, activation="swigluoai" if rows % 2 else "silu")
    check(layer, device)


@pytest.mark.parametrize(("d", "ff", "dtype"), [(36, 20, "float16"), (256, 128, "bfloat16"), (8, 200, "float32")])
def test_rows_of_any_length(device, d, ff, dtype):
    """Tensors are multiples of 16 bytes, rows of 36 numbers are not; 256 x 128 are whole tiles."""
    check(moe_layers.make(3, d, ff, getattr(torch, dtype), bias=d == 36), device)


ALL = FORMATS | {
    "fp8, rows too": Format("e4m3", 128, 128, activations=128),
    "by channel": Format("e4m3", activations=0),
}


@pytest.mark.parametrize("name", ALL)
def test_codes_and_scales_are_copied(device, name):
    """Scales of 160 rows by 128 are padded, and 288 columns cut groups and words; of 65 rows tiles are others."""
    kind, rows = ALL[name], (1, 17, 65)[list(ALL).index(name) % 3]
    ff = 128 if kind.rows > 1 or kind.group == 128 else 96
    check(quantised_layers.make(kind, rows, 160 if kind.rows > 1 else 288, ff), device)


@pytest.mark.parametrize("name", ["mxfp4", "int4 by 32", "nvfp4"])
def test_biases_and_gates_in_turns(device, name):
    check(quantised_layers.make(FORMATS[name], 5, 160, 96, activation="swigluoai", bias=True), device)


@pytest.mark.parametrize("twice", [False, True], ids=["70 rows", "twice in a row"])
@pytest.mark.parametrize("name", [None, "int4"])
def test_further_rows_of_an_expert_are_read_in_host_memory(device, order, name, twice):
    """Two blocks and more of one expert: only the first one's programs may read the slot."""
    rows = 9 if twice else 70
    layer = moe_layers.make(rows, 40, 24, k=2) if name is None else quantised_layers.make(FORMATS[name], rows, 128, 64)
    plain = layer if name is None else layer.plain
    plain.ids.fill_(5)
    check(layer, device)


@pytest.mark.parametrize("experts", [6, 40], ids=["sorted", "unsorted"])
def test_an_expert_twice_where_programs_find_their_blocks(device, order, experts):
    layer = moe_layers.make(16, 40, 24, experts=experts)
    layer.ids[2:] = 5
    check(layer, device, [*MIXED, *[ADMITTED] * (experts - 6)])


def test_what_is_left_out_is_not_copied(device, order):
    """Padding, pairs without weight, and pairs behind the live ones select nothing."""
    layer = moe_layers.make(9, 40, 24)
    layer.ids.fill_(1)
    layer.ids[0], layer.ids[3, 0], layer.ids[4, 1] = 4, -1, 6
    layer.ids[5, 0], layer.weights[5, 0] = 0, 0.0
    layer.ids[8] = 2
    live = torch.tensor([16], dtype=torch.int32)
    for op, where in ((grouped_gemm, device), (gemm_twin.grouped_gemm, "cpu")):
        reached = Reached(layer, MIXED, where)
        before = {name: [slot.clone() for slot in slots] for name, slots in reached.slots.items()}
        reached.run(op, live=live.to(where))
        for name, slots in reached.slots.items():
            assert all(map(torch.equal, slots, before[name]))


def test_in_pieces(device):
    """Each launch copies what its own pairs select."""
    layer, out = moe_layers.make(9, 72, 40, bias=True), None
    y = torch.full((18, 72), float("nan"), dtype=torch.bfloat16, device=device)
    reached = Reached(layer, MIXED, device)
    for number, part in enumerate(([0, 1], [2, 4, 5])):
        mine = layer.ids.where(torch.isin(layer.ids, torch.tensor(part)), -1)
        reached.plain = replace(layer, ids=mine)
        out = reached.run(grouped_gemm, pieces=Pieces(y, layer.ids.to(device) if number else None))
        reached.check(selected(replace(layer, ids=layer.ids.where(layer.ids < [2, 6][number], -1))))
    reached.plain = layer
    assert torch.equal(out, reached.run(grouped_gemm, whole=True))


def test_a_host_copy_of_each_tensor_is_needed(device):
    reached = Reached(moe_layers.make(3, 40, 24, bias=True), MIXED, device)
    del reached.hosts["b2"], reached.slots["b2"]
    with pytest.raises((AssertionError, KeyError)):
        reached.run(grouped_gemm)


# -- ahead of need ----------------------------------------------------------------------------------------------------

LAYER, ENTRIES = 3, 4


def early_of(ff: int, d: int, memory: list[list[Tensor]], keys: list[int], device: str) -> Early:
    """Nothing is there; ``memory``: of w13 and w2, the bytes of each entry."""
    done = [torch.zeros(len(keys), -(-size // EARLY_ROWS), dtype=torch.int32, device=device) for size in (ff, d)]
    addresses = [torch.tensor([each.data_ptr() for each in entries], device=device) for entries in memory]
    return Early(torch.tensor(keys, dtype=torch.int32, device=device), *done, *addresses)


class Ahead:
    """Experts of random bytes in host memory, and entries of poison."""

    def __init__(self, ff: int, d: int, row13: int, row2: int, keys: list[int], device: str) -> None:
        rng, self.device = torch.Generator().manual_seed(1), device
        self.sizes, self.keys, self.nbytes = (ff, d, row13, row2), keys, (2 * ff * row13, d * row2)
        self.hosts = [
            [torch.randint(0, 256, (size,), generator=rng, dtype=torch.uint8) for _ in range(6)] for size in self.nbytes
        ]
        if device == "cuda":
            self.hosts = [[each.pin_memory() for each in part] for part in self.hosts]
        self.memory = [
            [torch.full((size + GUARD,), POISON, dtype=torch.uint8, device=device) for _ in keys]
            for size in self.nbytes
        ]
        self.early = early_of(ff, d, self.memory, keys, device)
        self.tables = [torch.tensor([each.data_ptr() for each in part], device=device) for part in self.hosts]

    def read(self, op, turn: Tensor, *, after: bool, interleaved: bool = False) -> None:
        op(turn, LAYER, self.early, *self.tables, self.sizes, after=after, interleaved=interleaved)

    def check(self, there: list[int]) -> None:
        """All of these entries is there, and nothing of others; nothing is written behind an entry."""
        for matrix, (entries, done) in enumerate(zip(self.memory, (self.early.done13, self.early.done2), strict=True)):
            for entry, memory in enumerate(entries):
                expected = torch.full_like(memory.cpu(), POISON)
                if entry in there:
                    expected[:-GUARD] = self.hosts[matrix][self.keys[entry]]
                assert torch.equal(memory.cpu(), expected)
                assert bool((done[entry] == (READERS if entry in there else 0)).all())


READS = [
    pytest.param(read_early, id="kernel"),
    pytest.param(reference.read_early, id="twin", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="CPU's")),
]


@pytest.mark.parametrize("function", READS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "in turns"])
@pytest.mark.parametrize("sizes", [(40, 72, 144, 80), (20, 36, 72, 40), (100, 8, 1040, 16), (32, 64, 4096, 64)])
def test_reads_what_the_next_layer_is_expected_to_use(device, function, sizes, interleaved):
    """Parts are cut by the last row, and rows of 1,040 bytes make several pieces of a part."""
    ahead = Ahead(*sizes, [4, 1, -1, 2], device)
    for turn, after in (([LAYER, 0], False), ([LAYER, 5], True), ([LAYER - 2, 0], False), ([LAYER - 1, 1], False)):
        ahead.read(function, torch.tensor(turn, dtype=torch.int32, device=device), after=after, interleaved=interleaved)
        ahead.check([])
    misses = sizes[0] // 20 % 2  # then the launch after the layer before reads
    turn = torch.tensor([LAYER - 1, misses], dtype=torch.int32, device=device)
    for after in (False, True):
        ahead.read(function, turn, after=after, interleaved=interleaved)
    ahead.check([0, 1, 3])


@pytest.mark.parametrize("function", READS)
@pytest.mark.parametrize("matrix", [0, 1])
def test_what_is_read_when_the_layer_begins_does_not_count(function, matrix):
    """``turn`` is in memory that is read into: as if the layer began meanwhile."""
    ahead = Ahead(64, 96, 512, 256, [4, 1, 0, 2], "cpu")
    at = EARLY_ROWS * ahead.sizes[2 + matrix]
    turn = ahead.memory[matrix][0][at : at + 8].view(torch.int32)
    turn.copy_(torch.tensor([LAYER - 1, 0]))
    ahead.read(function, turn, after=False)
    assert turn[0] != LAYER - 1, "it was overwritten"
    done = torch.cat([ahead.early.done13, ahead.early.done2], 1)
    assert bool((done[1:] < READERS).all()) and bool((done[0] < READERS).any())
    for matrix, parts in enumerate((ahead.early.done13[0], ahead.early.done2[0])):
        for part in (parts == READERS).nonzero().flatten().tolist():
            for start, size in reference.parts_of(part, matrix, ahead.sizes, False):
                there = ahead.memory[matrix][0][start : start + size]
                assert torch.equal(there, ahead.hosts[matrix][4][start : start + size])


class ReachedEarly(Reached):
    """With parts of the experts of ``early`` that are there, and of which the host copies that a GEMM reads are poison.

    Args:
        early: of each entry its expert, or -1.
        first: key of the layer's expert 0.
    """

    def __init__(self, layer, sources, device, early: list[int], first: int = 60) -> None:
        super().__init__(layer, sources, device)
        plain, rng = self.plain, torch.Generator().manual_seed(2)
        rows = {"w13": 2 * plain.intermediate, "w2": plain.x.shape[1]}
        row = [len(self.hosts[name][0]) // count for name, count in rows.items()]
        self.first, sizes = first, (plain.intermediate, plain.x.shape[1], *row)
        memory = [[torch.full_like(self.hosts[name][0], POISON) for _ in early] for name in rows]
        keys = [first + expert if expert >= 0 else -1 for expert in early]
        self.early = early_of(*sizes[:2], memory, keys, device)
        self.kept, self.damaged = memory, {name: [each.clone() for each in hosts] for name, hosts in self.hosts.items()}
        for matrix, (name, done) in enumerate(zip(rows, (self.early.done13, self.early.done2), strict=True)):
            strips = -(-done.shape[1] // 4)  # as wide as the widest tile
            for entry, expert in enumerate(early):
                there = (torch.rand(strips, generator=rng) < 0.6).repeat_interleave(4)[: done.shape[1]]
                done[entry] = torch.where(there, READERS, READERS - 1 - entry % 2 * (READERS - 1)).int()
                for part in there.nonzero().flatten().tolist() if expert >= 0 else ():
                    for start, size in reference.parts_of(part, matrix, sizes, plain.activation == "swigluoai"):
                        memory[matrix][entry][start : start + size] = self.hosts[name][expert][start : start + size]
                        self.damaged[name][expert][start : start + size] = POISON

    def run(self, op, *, whole: bool = False, **options) -> Tensor:
        if whole:
            return super().run(op, whole=True, **options)
        clean, self.hosts = self.hosts, self.damaged
        try:
            return super().run(op, early=(self.first, self.early), **options)
        finally:
            self.hosts = clean


@pytest.mark.parametrize(("name", "rows"), [(None, 1), (None, 65), ("int4", 5), ("mxfp4", 3), ("fp8, rows too", 17)])
def test_a_gemm_takes_what_was_read_early(device, order, name, rows):
    """Whether it gets a slot or not; a hit, and an expert of another layer with its number, are not looked up."""
    activation = "swigluoai" if name == "mxfp4" else "silu"
    if name is None:
        layer = moe_layers.make(rows, 160, 136, torch.bfloat16, bias=True)
    else:
        layer = quantised_layers.make(ALL[name], rows, 256, 256 if rows == 17 else 160, activation=activation)
    for op in (grouped_gemm, gemm_twin.grouped_gemm):
        if op is not grouped_gemm and device == "cuda":
            continue
        reached = ReachedEarly(layer, MIXED, device, [4, 2, -1, 0])
        assert torch.equal(reached.run(op), reached.run(op, whole=True))
        reached.check(selected(reached.plain))
        wrong = ReachedEarly(layer, MIXED, device, [1, -1, -1, -1])
        wrong.damaged = wrong.hosts
        for each in (*wrong.kept[0], *wrong.kept[1]):
            each.fill_(POISON)
        assert torch.equal(wrong.run(op), wrong.run(op, whole=True))
        other = ReachedEarly(layer, MIXED, device, [4, 2, -1, 0])
        other.damaged, other.first = other.hosts, other.first + 6
        for each in (*other.kept[0], *other.kept[1]):
            each.fill_(POISON)
        assert torch.equal(other.run(op), other.run(op, whole=True))
