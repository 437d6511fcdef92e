"""Assumptions of exactness: vLLM's CPU kernel computes the layer that the twin defines, its result depends neither on
the slot of an expert nor on the rows that run together, and packing an expert does not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from vllm_spac.kernels.reference import grouped_gemm as reference

ops = pytest.importorskip("vllm._custom_ops", reason="the kernel under test is vLLM's")
if not hasattr(torch.ops._C, "cpu_fused_moe"):
    pytest.skip("this vLLM was not built for the CPU", allow_module_level=True)

EXPERTS, TOP_K, EMPTY = 12, 8, 5  # k = 8: more than one pass of the kernel's three-part weighted sum; one expert idle
# hidden x intermediate: multiples of 32, as the kernel demands, and not of 64, so that tiles are cut off.
SIZES = [(96, 32), (32, 160)]
ISAS = ["vec"] + (["amx"] if torch.cpu._is_amx_tile_supported() else [])


@dataclass(frozen=True)
class Layer:
    """One MoE layer and its routed input; shapes as in ``reference.moe``."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    b13: Tensor
    b2: Tensor

    def packed(self, isa: str) -> Layer:
        return replace(self, w13=ops.cpu_prepack_moe_weight(self.w13, isa), w2=ops.cpu_prepack_moe_weight(self.w2, isa))


def make(tokens: int, hidden: int, intermediate: int, dtype: torch.dtype, scale: float = 1.0) -> Layer:
    """Gate and up are of the order of ``scale``. ``EMPTY`` gets no token, and is poisoned to prove it."""
    rng = torch.Generator().manual_seed(1000 * tokens + hidden + intermediate)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    others = torch.tensor([expert for expert in range(EXPERTS) if expert != EMPTY])
    ids = torch.stack([others[torch.randperm(len(others), generator=rng)[:TOP_K]] for _ in range(tokens)])
    layer = Layer(
        x=normal(tokens, hidden).to(dtype),
        w13=(scale * normal(EXPERTS, 2 * intermediate, hidden) / hidden**0.5).to(dtype),
        w2=(normal(EXPERTS, hidden, intermediate) / intermediate**0.5).to(dtype),
        topk_weights=torch.rand(tokens, TOP_K, generator=rng),
        topk_ids=ids.int(),
        b13=(scale * normal(EXPERTS, 2 * intermediate)).to(dtype),
        b2=normal(EXPERTS, hidden).to(dtype),
    )
    for tensor in (layer.w13, layer.w2, layer.b13, layer.b2):
        tensor[EMPTY] = float("nan")
    return layer


def kernel(layer: Layer, activation: str = "silu", isa: str = "vec", bias: bool = True) -> Tensor:
    """vLLM's kernel on a packed layer; ``out`` is poisoned, so that a row left out shows."""
    out = torch.full_like(layer.x, float("nan"))
    b13, b2 = (layer.b13, layer.b2) if bias else (None, None)
    ids = layer.topk_ids.contiguous()
    weights = layer.topk_weights.clone()  # the kernel may write to them
    ops.cpu_fused_moe(out, layer.x.contiguous(), layer.w13, layer.w2, b13, b2, weights, ids, activation, isa)
    return out


def twin(layer: Layer, activation: str = "silu", bias: bool = True) -> Tensor:
    b13, b2 = (layer.b13, layer.b2) if bias else (None, None)
    return reference.moe(layer.x, layer.w13, layer.w2, layer.topk_weights, layer.topk_ids, b13, b2, activation)


def float32_bound(layer: Layer, activation: str, bias: bool) -> Tensor:
    """The most that float32 can lose, element by element; shape of the output.

    A sum of n terms is off by at most (n + 1) u sum|terms| in any order, u = 2**-24. The exponential of the kernel is
    good to 20 ulp (40 u; the polynomial that torch calls exp_u20), the division, the product and the clamp add a
    few u: 64 u covers the activation. Its slope in gate is at most 1.13 * |up or up + 1|, in up at most |gate|.
    """
    u = 2.0**-24
    hidden, intermediate = layer.x.shape[1], layer.w2.shape[2]
    bound = torch.zeros_like(layer.x, dtype=torch.float64)
    for token, (weights, ids) in enumerate(zip(layer.topk_weights.double(), layer.topk_ids.tolist(), strict=True)):
        x = layer.x[token].double()
        size = torch.zeros(hidden, dtype=torch.float64)
        for weight, expert in zip(weights, ids, strict=True):
            w13, w2 = layer.w13[expert].double(), layer.w2[expert].double()
            b13 = layer.b13[expert].double() if bias else torch.zeros(2 * intermediate, dtype=torch.float64)
            b2 = layer.b2[expert].double() if bias else torch.zeros(hidden, dtype=torch.float64)
            gate, up = reference.gate_up(w13 @ x + b13, activation)
            lost_gate, lost_up = reference.gate_up((hidden + 2) * u * (w13.abs() @ x.abs() + b13.abs()), activation)
            factor = up if activation == "silu" else up.clamp(-7, 7) + 1
            acted = reference.activate(w13 @ x + b13, activation)
            lost = 1.13 * factor.abs() * lost_gate + gate.abs().clamp(max=7) * lost_up + 64 * u * acted.abs()
            lost += 1.13 * lost_gate * lost_up
            terms = weight * (w2.abs() @ acted.abs() + b2.abs())
            bound[token] += weight * (w2.abs() @ lost) + (intermediate + 3) * u * terms
            size += terms
        bound[token] += TOP_K * u * size
    return bound


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_cpu_kernel_computes_what_the_twin_says(activation: str, hidden: int, intermediate: int, bias: bool) -> None:
    layer = make(9, hidden, intermediate, torch.float32, scale=3.0)
    if activation == "swigluoai":
        pre = torch.einsum("th,eih->tei", layer.x, layer.w13)
        assert (pre.abs() > 7).any(), "the clamp must be exercised"
    error = (kernel(layer.packed("vec"), activation, bias=bias) - twin(layer, activation, bias)).abs()
    assert (error <= float32_bound(layer, activation, bias)).all()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda x: replace(x, w13=x.w13.roll(x.w13.shape[1] // 2, 1)), id="gate and up swapped"),
        pytest.param(lambda x: replace(x, w13=x.w13.bfloat16().float()), id="weights rounded to bfloat16"),
        pytest.param(lambda x: replace(x, topk_weights=x.topk_weights.roll(1, 1)), id="router weights in other order"),
        pytest.param(lambda x: replace(x, b2=x.b2.roll(1, 0)), id="bias of the neighbour"),
    ],
)
def test_tolerance_tells_a_wrong_kernel(wrong) -> None:
    layer = make(9, 96, 32, torch.float32)
    error = (kernel(layer.packed("vec")) - twin(wrong(layer))).abs()
    assert not (error <= float32_bound(layer, "silu", True)).all()


def test_twin_is_the_sum_of_its_experts() -> None:
    """By hand, on one token: 2 * expert 0 + 3 * expert 1, each w2 * silu(gate) * up + b2."""
    x = torch.tensor([[1.0, 2.0]])
    w13 = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 1.0]]])
    w2 = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]])
    b2 = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    out = reference.moe(x, w13, w2, torch.tensor([[2.0, 3.0]]), torch.tensor([[0, 1]]), b2=b2)
    sigmoid = torch.sigmoid(torch.tensor([1.0, 2.0], dtype=torch.float64))
    first, second = 1 * sigmoid[0] * 2, 2 * sigmoid[1] * 3
    torch.testing.assert_close(out, torch.stack([2 * first, 2 * 1 + 3 * second])[None], rtol=1e-15, atol=0)
    assert out.dtype == torch.float64


@pytest.mark.parametrize(
    ("activation", "parameters"), [("silu_clamped", (10.0,)), ("swigluoai_uninterleave", (7.0, 1.702, 1.0))]
)
def test_clamped_activations_are_those_of_vllm(activation: str, parameters: tuple[float, ...]) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.activation import SiluAndMulWithClamp

    hidden = 8 * torch.randn(40, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert (hidden.abs() > parameters[0]).any()
    with set_current_vllm_config(VllmConfig()):
        theirs = SiluAndMulWithClamp(*parameters).forward_native(hidden)
    torch.testing.assert_close(reference.activate(hidden, activation), theirs, rtol=1e-13, atol=1e-13)


def test_twin_refuses_an_unknown_activation() -> None:
    layer = make(1, 96, 32, torch.float32)
    with pytest.raises(ValueError, match="relu.*silu.*swigluoai"):
        twin(layer, "relu")


def cases() -> list:
    """Every dtype and instruction set the plugin can meet on a CPU; T = 1 is decoding, 9 and 200 cut tiles of rows."""
    kinds = [("vec", torch.float32)] + [(isa, torch.bfloat16) for isa in ISAS]
    return [
        pytest.param(isa, dtype, tokens, *size, activation, id=f"{isa}-{str(dtype)[6:]}-{tokens}-{size}-{activation}")
        for isa, dtype in kinds
        for tokens in (1, 9, 200)
        for size, activation in zip(SIZES, ("silu", "swigluoai"), strict=True)
    ]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads of the kernel for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


CASES = pytest.mark.parametrize(("isa", "dtype", "tokens", "hidden", "intermediate", "activation"), cases())


def assert_same_bits(left: Tensor, right: Tensor) -> None:
    assert torch.isfinite(left).all(), "a row was left out, or a poisoned expert was read"
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def scattered(layer: Layer, slots: Tensor, pool: int) -> Layer:
    """The packed ``layer`` with expert e in slot ``slots[e]`` of ``pool`` slots, all others poisoned."""

    def spread(tensor: Tensor) -> Tensor:
        target = tensor.new_full((pool, *tensor.shape[1:]), float("nan"))
        target[slots] = tensor
        return target

    return replace(
        layer,
        w13=spread(layer.w13),
        w2=spread(layer.w2),
        b13=spread(layer.b13),
        b2=spread(layer.b2),
        topk_ids=slots[layer.topk_ids.long()].int(),
    )


@CASES
def test_result_does_not_depend_on_the_slot(isa, dtype, tokens, hidden, intermediate, activation) -> None:
    layer = make(tokens, hidden, intermediate, dtype).packed(isa)
    whole = kernel(layer, activation, isa)
    for seed in range(3):
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:EXPERTS]
        assert_same_bits(kernel(scattered(layer, slots, 20), activation, isa), whole)


@CASES
def test_result_does_not_depend_on_the_rows_beside_it(
    isa, dtype, tokens, hidden, intermediate, activation, threads
) -> None:
    layer = make(tokens, hidden, intermediate, dtype).packed(isa)
    whole = kernel(layer, activation, isa)
    sizes = [1, 2, 3] * -(-tokens // 6)
    sizes = sizes[: next(n for n in range(len(sizes) + 1) if sum(sizes[:n]) >= tokens)]
    sizes[-1] -= sum(sizes) - tokens
    parts = [
        replace(layer, x=x, topk_weights=weights, topk_ids=ids)
        for x, weights, ids in zip(
            layer.x.split(sizes), layer.topk_weights.split(sizes), layer.topk_ids.split(sizes), strict=True
        )
    ]
    if len(parts) > 10:
        threads(1)  # a hundred small calls; several threads would mostly wait for one another on a busy machine
    assert_same_bits(torch.cat([kernel(part, activation, isa) for part in parts]), whole)


@pytest.mark.parametrize(("isa", "dtype"), [("vec", torch.float32), *((isa, torch.bfloat16) for isa in ISAS)])
def test_packing_a_part_of_the_experts_is_packing_all(isa: str, dtype: torch.dtype) -> None:
    """Experts are packed a few at a time while a checkpoint loads, and damaged ones one by one."""
    layer = make(1, 96, 32, dtype)
    for weight in (layer.w13, layer.w2):
        whole = ops.cpu_prepack_moe_weight(weight, isa)
        parts = [ops.cpu_prepack_moe_weight(weight[start : start + 5], isa) for start in range(0, EXPERTS, 5)]
        assert torch.equal(torch.cat(parts).view(torch.uint8), whole.view(torch.uint8))
