"""Checks ``grouped_gemm`` against float64, within a bound derived from its roundings, and for equal bits."""

from dataclasses import replace

import moe_layers
import pytest
import torch
from moe_layers import EMPTY, Layer, bound, make, truth
from vllm_spac.kernels import grouped_gemm as kernels
from vllm_spac.kernels.grouped_gemm import ACTIVATIONS, Tile, grouped_gemm
from vllm_spac.kernels.reference import grouped_gemm as reference
from vllm_spac.kernels.types import Pieces, block_bound

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def run(layer: Layer, device: str, **options) -> torch.Tensor:
    """The kernels' answer on the CPU; the output is given, and poisoned."""
    layer = layer.to(device)
    out = torch.full_like(layer.x, float("nan"))
    assert layer.call(grouped_gemm, out=out, **options) is out
    return out.cpu()


def off(layer: Layer, answer: torch.Tensor) -> torch.Tensor:
    """The worst error in units of the bound; NaN counts as infinite, and so does any error where nothing may be off."""
    error = (answer.double() - truth(layer)).abs()
    return torch.where(error == 0, 0.0, (error / bound(layer)).nan_to_num(nan=float("inf"))).max()


KINDS = [
    (dtype, act, bias) for dtype in DTYPES for act in ACTIVATIONS for bias in (False, True) if bias or act == "silu"
]


@pytest.mark.parametrize(("dtype", "activation", "bias"), KINDS)
def test_every_activation_and_dtype(device, dtype, activation, bias):
    """72 x 40: multiples of no tile, so that every edge is cut off."""
    layer = make(9, 72, 40, dtype, activation=activation, bias=bias)
    if (limit := reference.LIMITS.get(activation)) is not None:
        assert (layer.x.float() @ layer.w13[0].float().T).abs().max() > limit, "the clamp must be exercised"
    assert off(layer, run(layer, device)) <= 1
    assert off(layer, layer.call(reference.grouped_gemm)) <= 1


@pytest.mark.parametrize(("d", "ff"), [(33, 17), (256, 128), (8, 200)])
def test_sizes(device, d, ff):
    """33 x 17: rows that no vector fits; 256 x 128: whole tiles, unmasked; 8 x 200: less than a tile, and several."""
    layer = make(5, d, ff)
    assert off(layer, run(layer, device)) <= 1


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 65, 257])
def test_every_tile_of_the_table(device, rows):
    """Both ends of the buckets; 257 is prefill, with more than one block of rows for some expert."""
    layer = make(rows, 40, 24, torch.bfloat16 if rows < 65 else torch.float32, k=3)
    assert off(layer, run(layer, device)) <= 1


def test_row_blocks_that_take_turns(device):
    """14 blocks in groups of 4, the last one of 2, over several strips of columns in both GEMMs."""
    layer = make(70, 40, 24)
    tile = Tile(block_m=16, gate_up_n=16, down_n=16, k_bytes=64, num_warps=4, num_stages=2, group_m=4)
    assert block_bound(140, 6, 16) == 14
    assert off(layer, run(layer, device, tile=tile)) <= 1


def test_all_rows_on_one_expert(device):
    """Two blocks of one expert, all other experts idle and poisoned."""
    layer = make(70, 40, 24, k=1)
    layer.ids.fill_(4)
    for expert in (0, 1, 2, 5):
        moe_layers.poison(layer, expert)
    assert off(layer, run(layer, device)) <= 1


def test_one_expert_twice_in_a_row(device):
    """Truncation repeats ids; a row may then meet an expert twice, with two weights."""
    layer = make(9, 40, 24, torch.float32)
    layer.ids[:, 1] = layer.ids[:, 0]
    assert off(layer, run(layer, device)) <= 1


def test_padding_and_weightless_pairs_read_no_expert(device):
    """Ids outside the experts, and weight 0: zero contribution, although the expert behind it is poisoned."""
    layer = make(9, 40, 24)
    layer.ids[2], layer.ids[5, 0], layer.ids[7, 1] = -1, -1, 6  # 6 is one past the last expert
    layer.ids[4, 0], layer.weights[4, 0] = EMPTY, 0.0
    answer = run(layer, device)
    assert off(layer, answer) <= 1
    assert (answer[2] == 0).all() and (answer[5] != 0).any()


@pytest.mark.parametrize("rows", [0, 1, 70])
def test_counts_of_pairs_that_are_computed(device, rows):
    """Padding and weightless pairs are left out of them too; what was there is overwritten."""
    layer = make(max(rows, 1), 40, 24)
    layer = replace(layer, **{name: getattr(layer, name)[:rows] for name in ("x", "ids", "weights")})
    if rows > 1:
        layer.ids[2], layer.ids[5, 0], layer.weights[4, 0] = -1, 6, 0.0
    live = (layer.ids >= 0) & (layer.ids < 6) & (layer.weights != 0)
    expected = torch.bincount(layer.ids[live].long(), minlength=6).int()
    for function, where in ((grouped_gemm, device), (reference.grouped_gemm, "cpu")):
        counts = torch.full((2, 6), -7, dtype=torch.int32, device=where)
        layer.to(where).call(function, counts=counts[1])
        assert torch.equal(counts[1].cpu(), expected) and (counts[0] == -7).all()


def test_nothing_to_do(device):
    layer = make(4, 40, 24)
    layer.ids.fill_(-1)
    assert (run(layer, device) == 0).all()
    assert run(replace(layer, x=layer.x[:0], ids=layer.ids[:0], weights=layer.weights[:0]), device).shape == (0, 40)


def test_int64_ids(device):
    layer = make(9, 40, 24)
    assert torch.equal(run(layer, device), run(replace(layer, ids=layer.ids.long()), device))


def test_bits_do_not_depend_on_where_experts_lie(device):
    """One tensor for all, an allocation each, and other slots: only the addresses differ."""
    layer = make(9, 72, 40, bias=True)
    whole = run(layer, device)
    names = ("w13", "w2", "b13", "b2")
    stacked = replace(layer, **{name: list(torch.stack(getattr(layer, name))) for name in names})
    aligned = all(part.data_ptr() % 16 == 0 for name in names for part in getattr(stacked, name))
    assert aligned, "72 and 40 columns keep every expert on a multiple of 16 bytes"
    assert torch.equal(run(stacked, device), whole)
    slots = torch.tensor([5, 0, 3, 1, 4, 2])
    moved = {name: [getattr(layer, name)[slot] for slot in slots.tolist()] for name in names}
    where = slots.argsort()
    assert torch.equal(run(replace(layer, **moved, ids=where[layer.ids.long()].int()), device), whole)


def test_bits_do_not_depend_on_the_rows_beside(device):
    """With a fixed tile, as the deterministic setting has it."""
    layer = make(21, 72, 40)
    tile = Tile(block_m=16, gate_up_n=32, down_n=64, k_bytes=128, num_warps=4, num_stages=2)
    whole = run(layer, device, tile=tile)
    for part in (slice(0, 1), slice(1, 4), slice(4, 21)):
        alone = replace(layer, **{name: getattr(layer, name)[part].clone() for name in ("x", "ids", "weights")})
        assert torch.equal(run(alone, device, tile=tile), whole[part])
    assert torch.equal(run(layer, device, tile=tile), whole)


@pytest.mark.parametrize("rows", [3, 40])
@pytest.mark.parametrize("op", [grouped_gemm, reference.grouped_gemm], ids=["kernel", "twin"])
def test_launches_over_some_experts_have_the_bits_of_one(device, rows, op):
    """Each launch skips the pairs of the others; the last one sums all. Padding stays out, whatever y had."""
    if op is not grouped_gemm and device != "cpu":
        pytest.skip("the twin reads addresses of the CPU")
    layer = make(rows, 72, 40, bias=True).to(device)
    layer.ids[0, 0] = -1
    whole = layer.call(op)
    y, out = torch.full((layer.ids.numel(), 72), float("nan"), dtype=layer.x.dtype, device=device), None
    for number, part in enumerate(([0, 1], [2, 5], [3, 4])):
        mine = torch.isin(layer.ids, torch.tensor(part, device=device))
        some = replace(layer, ids=layer.ids.where(mine, -1))
        out = some.call(op, pieces=Pieces(y, layer.ids if number == 2 else None))
    assert torch.equal(out, whole)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("twice", [False, True], ids=["distinct", "one expert for all"])
def test_bits_do_not_depend_on_who_finds_the_blocks(device, rows, twice, monkeypatch):
    """Each program its own, or one launch for all: more pairs of an expert than a block has rows among them."""
    layer = make(rows, 72, 40, experts=40, k=2, bias=True)
    if twice:
        layer.ids.fill_(4)
    layer.ids[-1, 0] = -1
    whole, counts = run(layer, device), torch.full((2, 40), -7, dtype=torch.int32, device=device)
    layer.to(device).call(grouped_gemm, counts=counts[0])
    monkeypatch.setattr(kernels, "_unsorted", lambda *_: False)
    assert torch.equal(run(layer, device), whole)
    layer.to(device).call(grouped_gemm, counts=counts[1])
    assert torch.equal(counts[0], counts[1]) and int(counts[0].sum()) == 2 * rows - 1


@pytest.mark.parametrize("experts", [6, 40], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("live", [0, 2, 9, 100])
def test_pairs_behind_the_live_ones_are_padding(device, experts, live, monkeypatch):
    """9 of 18 pairs end in the middle of a row. No expert is read for what is behind: nothing of it is computed."""
    products, combine = [], kernels.combine
    monkeypatch.setattr(kernels, "combine", lambda y, *others: (products.append(y), combine(y, *others)))
    layer = make(9, 40, 24, experts=experts)
    bound = torch.tensor([live], dtype=torch.int32)
    marked = replace(layer, ids=torch.where(torch.arange(18).view(9, 2) < live, layer.ids, -1))
    for function, where in ((grouped_gemm, device), (reference.grouped_gemm, "cpu")):
        counts = torch.full((2, experts), -7, dtype=torch.int32, device=where)
        limited = layer.to(where).call(function, counts=counts[0], live=bound.to(where))
        assert torch.equal(limited, marked.to(where).call(function, counts=counts[1]))
        assert torch.equal(counts[0], counts[1])
    assert products[0].view(18, 40).isnan().all(1).tolist() == [pair >= live for pair in range(18)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_and_twin_round_alike(device, dtype):
    """At the same places, to the nearest: they differ only where sums of another order fall on two sides of a tie.

    Where that is an element of the hidden layer, what it is multiplied by may be larger than the answer: a unit of the
    greatest one is allowed too. An H100 needs it in float16.
    """
    layer = make(9, 72, 40, dtype, bias=True)
    answer, twin = run(layer, device), layer.call(reference.grouped_gemm)
    if dtype != torch.float32:
        assert (answer != twin).double().mean() < 0.05
    unit = 2.0 ** (-7 if dtype == torch.bfloat16 else -10)
    carried = 0.0 if dtype == torch.float32 else float(twin.double().abs().max())
    truncated = (twin.double().abs() + carried) * unit + 1e-6
    assert ((answer.double() - twin.double()).abs() <= truncated).all()


def rolled(layer: Layer, name: str) -> Layer:
    parts = getattr(layer, name)
    return replace(layer, **{name: parts[1:] + parts[:1]})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: replace(x, w13=[w.roll(len(w) // 2, 0) for w in x.w13]), id="gate and up swapped"),
        pytest.param(lambda x: replace(x, weights=x.weights.roll(1, 1)), id="router weights in other order"),
        pytest.param(lambda x: rolled(x, "b2"), id="bias of the neighbour"),
        pytest.param(lambda x: rolled(x, "w2"), id="down weight of the neighbour"),
        pytest.param(lambda x: replace(x, activation="gelu"), id="another activation"),
        pytest.param(lambda x: replace(x, x=torch.cat([x.x[:, :-1], 0 * x.x[:, -1:]], 1)), id="last column left out"),
    ],
)
def test_the_bound_tells_a_wrong_kernel(wrong, dtype):
    layer = make(9, 72, 40, dtype, bias=True)
    answer = wrong(layer).call(reference.grouped_gemm)
    assert off(layer, answer) > 1


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_float32_tells_both_gelus_apart(device, activation):
    """They differ by 5e-4 at most; few columns, so that the bound is below that."""
    layer = make(9, 8, 8, torch.float32, activation=activation)
    other = "gelu" if activation == "gelu_tanh" else "gelu_tanh"
    assert off(replace(layer, activation=other), run(layer, device)) > 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "relu.*silu"),
        ({"x": torch.zeros(4, 40, dtype=torch.float64)}, "x must be"),
        ({"ids": torch.zeros(5, 2, dtype=torch.int32)}, "one row of top-k"),
        ({"b2": None}, "both biases or none"),
    ],
)
def test_what_does_not_fit_is_refused(device, change, message):
    with pytest.raises(AssertionError, match=message):
        replace(make(4, 40, 24, bias=True), **change).to(device).call(grouped_gemm)
