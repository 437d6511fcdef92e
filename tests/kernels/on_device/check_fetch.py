"""Checks that every byte of the admitted experts is copied, and no other: by ``fetch``, and by a grouped GEMM."""

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
from vllm_spac.kernels.fetch import fetch
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.grouped_gemm import grouped_gemm
from vllm_spac.kernels.reference import fetch as reference
from vllm_spac.kernels.reference import grouped_gemm as gemm_twin
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED, Experts, Fills, Pieces, Quantised

KEYS, SLOTS, N = 6, 4, 5


def made(device: str, sizes: list[int]) -> tuple[list, list, Experts]:
    """(host copies, slots, their addresses), a tensor of so many bytes for each name; slots hold 9."""
    rng = torch.Generator().manual_seed(0)
    hosts = [[torch.randint(0, 256, (size,), generator=rng, dtype=torch.uint8) for _ in range(KEYS)] for size in sizes]
    if device == "cuda":
        hosts = [[tensor.pin_memory() for tensor in tensors] for tensors in hosts]
    slots = [[torch.full((size,), 9, dtype=torch.uint8, device=device) for _ in range(SLOTS)] for size in sizes]
    nothing = torch.zeros(0, dtype=torch.int32, device=device)
    addresses = [
        torch.tensor([[tensor.data_ptr() for tensor in tensors] for tensors in kind], device=device)
        for kind in (hosts, slots)
    ]
    return hosts, slots, Experts(nothing, nothing, nothing, *addresses)


def asked(device: str, *pairs: tuple[int, int]) -> torch.Tensor:
    copies = torch.full((1 + 2 * N,), 1 << 30, dtype=torch.int32)  # what means nothing is no address
    copies[0] = len(pairs)
    for at, (key, slot) in enumerate(pairs):
        copies[1 + at], copies[1 + N + at] = key, slot
    return copies.to(device)


@pytest.mark.parametrize("function", [fetch, reference.fetch], ids=["kernel", "twin"])
@pytest.mark.parametrize("pairs", [[], [(5, 0)], [(0, 3), (4, 1), (5, 0)]], ids=["none", "one", "some"])
@pytest.mark.parametrize("sizes", [[16], [48, 16 * 1024], [8192, 8192 + 16, 3 * 8192]])
def test_copies_what_was_admitted(device, function, pairs, sizes):
    """Less than a chunk, whole chunks, a cut one, and more chunks than programs with small ones beside."""
    if function is reference.fetch and device == "cuda":
        pytest.skip("the twin follows addresses of the CPU only")
    hosts, slots, experts = made(device, sizes)
    words = torch.tensor([size // 8 for size in sizes], dtype=torch.int32, device=device)
    function(asked(device, *pairs), experts, words)
    owner = {slot: key for key, slot in pairs}
    for host, tensors in zip(hosts, slots, strict=True):
        for slot, tensor in enumerate(tensors):
            expected = host[owner[slot]] if slot in owner else torch.full_like(host[0], 9)
            assert torch.equal(tensor.cpu(), expected)


def test_more_chunks_than_programs(device):
    size = 8192 * 70 + 32
    hosts, slots, experts = made(device, [size])
    fetch(asked(device, (1, 2), (3, 0)), experts, torch.tensor([size // 8], dtype=torch.int32, device=device))
    assert torch.equal(slots[0][2].cpu(), hosts[0][1]) and torch.equal(slots[0][0].cpu(), hosts[0][3])
    assert bool((slots[0][1] == 9).all())


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
