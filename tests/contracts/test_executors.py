"""Contract of the executors that compute experts on the CPU, checked against float64.

A new file in ``cpu_experts/`` is tested without a change here.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._C import set_num_threads
from vllm_spac.kernels.reference import grouped_gemm as reference

from vllm_spac import components
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.cpu_kernels.base import CpuExperts, check_same
from vllm_spac.errors import ConfigError

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 6, 3, 96, 64
CASES = {
    "silu": ("silu", False, torch.bfloat16),
    "silu, float32": ("silu", False, torch.float32),
    "gelu_tanh": ("gelu_tanh", False, torch.float32),
    "swigluoai with biases": ("swigluoai", True, torch.bfloat16),
    "silu_clamped": ("silu_clamped", False, torch.bfloat16),
    "swigluoai_uninterleave": ("swigluoai_uninterleave", False, torch.float32),
}


@dataclass(frozen=True)
class Layer:
    """Routed input and the experts as a checkpoint has them."""

    x: Tensor
    weights: Tensor
    ids: Tensor
    experts: dict[str, Tensor]
    activation: str

    @property
    def shape(self) -> MoEShape:
        specs = {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in self.experts.items()}
        return MoEShape(("layer",), EXPERTS, TOP_K, specs)


def make(case: str, rows: int = 9) -> Layer:
    activation, bias, dtype = CASES[case]
    rng = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    size = 8 if activation in ("silu_clamped", "swigluoai_uninterleave") else 2  # so that their clamps are met
    experts = {
        "w13_weight": (size * normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) / HIDDEN**0.5).to(dtype),
        "w2_weight": (normal(EXPERTS, HIDDEN, INTERMEDIATE) / INTERMEDIATE**0.5).to(dtype),
    }
    if bias:
        experts |= {
            "w13_bias": normal(EXPERTS, 2 * INTERMEDIATE).to(dtype),
            "w2_bias": normal(EXPERTS, HIDDEN).to(dtype),
        }
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(rows)]).int()
    weights = torch.rand(rows, TOP_K, generator=rng) + 0.1
    return Layer(normal(rows, HIDDEN).to(dtype), weights, ids, experts, activation)


def truth(layer: Layer) -> tuple[Tensor, Tensor]:
    """(output, the most that a right executor can be off), both float64 [rows, hidden].

    u is half a unit in the last place of the dtype, v of float32, in which at most n terms are added: n v each. Rounded
    to the dtype: gate and up, act(gate), h, an expert's result and the sum. The slope of the activations is below 1.13,
    and |act(gate)| <= |gate|, clamped or not; up counts as |up| + 1, which covers swigluoai. 1.1: products of errors.
    """
    x, e = layer.x.double(), {name: tensor.double() for name, tensor in layer.experts.items()}
    u, v = torch.finfo(layer.x.dtype).eps / 2, 2.0**-24
    out, off = torch.zeros_like(x), torch.zeros_like(x)
    for pair in (layer.weights != 0).nonzero().tolist():
        row, expert, weight = pair[0], int(layer.ids[*pair]), float(layer.weights[*pair])
        hidden = e["w13_weight"][expert] @ x[row]
        size = e["w13_weight"][expert].abs() @ x[row].abs()
        result = torch.zeros(HIDDEN, dtype=torch.float64)
        if "w13_bias" in e:
            hidden, size = hidden + e["w13_bias"][expert], size + e["w13_bias"][expert].abs()
            result = e["w2_bias"][expert].clone()
        lost = (HIDDEN + 64) * v * size + u * hidden.abs()
        (gate, up), (lost_gate, lost_up) = (reference.gate_up(t, layer.activation) for t in (hidden, lost))
        gate, up = gate.abs(), up.abs() + 1
        lost_h = 1.13 * up * lost_gate + gate * lost_up + 4 * (u + v) * gate * up
        h = reference.activate(hidden, layer.activation)
        w2 = e["w2_weight"][expert]
        terms = w2.abs() @ h.abs() + result.abs()
        result += w2 @ h
        out[row] += weight * result
        off[row] += weight * (w2.abs() @ lost_h + INTERMEDIATE * v * terms + 2 * u * result.abs())
    return out, 1.1 * (off + (u + TOP_K * v) * out.abs() + u * off)


def vllm_kernel(layer: Layer):
    """(vLLM's kernel, the experts in its layout)."""
    ops = pytest.importorskip("vllm._custom_ops", reason="the kernel is vLLM's")
    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        pytest.skip("this vLLM was not built for the CPU")
    packed = {
        name: ops.cpu_prepack_moe_weight(tensor, "vec") if name.endswith("weight") else tensor
        for name, tensor in layer.experts.items()
    }

    def kernel(x, weights, ids, experts):
        out = torch.empty_like(x)
        biases = experts.get("w13_bias"), experts.get("w2_bias")
        w13, w2 = experts["w13_weight"], experts["w2_weight"]
        ops.cpu_fused_moe(out, x, w13, w2, *biases, weights, ids, layer.activation, "vec", False)
        return out

    return kernel, packed


def build(name: str, layer: Layer, threads: int = 1) -> tuple[CpuExperts, dict[str, Tensor]]:
    """The executor, and the experts as it wants them."""
    if name == "simd" and missing():
        pytest.skip(missing())
    kind = components.find("cpu_kernels", name)
    if kind.layout == "kernel" and layer.activation in ("silu_clamped", "swigluoai_uninterleave"):
        pytest.skip(f"vLLM's kernel for a CPU has no {layer.activation}")
    kernel, experts = vllm_kernel(layer) if kind.layout == "kernel" else (None, layer.experts)
    return kind(layer.shape, threads, layer.activation, kernel), experts


NAMES = [*components.names("cpu_kernels"), "outside:RowByRow", "looped_experts:Looped"]
every = pytest.mark.parametrize("name", NAMES)


@every
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [1, 40])
def test_close_to_float64(name: str, case: str, rows: int) -> None:
    layer = make(case, rows)
    executor, experts = build(name, layer)
    out = executor.run(layer.x, layer.weights, layer.ids, experts)
    expected, off = truth(layer)
    assert out.shape == layer.x.shape and out.dtype in (torch.float32, layer.x.dtype)
    assert ((out.double() - expected).abs() <= off).all()
    assert (off < 0.5 * expected.abs().max()).all(), "the bound would let anything pass"


@every
@pytest.mark.parametrize("case", CASES)
def test_pairs_of_weight_0_and_repeated_experts(name: str, case: str) -> None:
    """As a share has them: the first expert of the row again, with weight 0."""
    layer = make(case)
    own = torch.zeros_like(layer.ids, dtype=torch.bool)
    own[:, 1] = True
    own[::2, 2] = True
    layer = Layer(
        layer.x,
        layer.weights.masked_fill(~own, 0),
        torch.where(own, layer.ids, layer.ids[:, 1:2]),
        layer.experts,
        layer.activation,
    )
    executor, experts = build(name, layer)
    out = executor.run(layer.x, layer.weights, layer.ids, experts)
    expected, off = truth(layer)
    assert ((out.double() - expected).abs() <= off).all()


@pytest.mark.parametrize("name", ["native", "simd"])
@pytest.mark.parametrize("case", ["silu", "silu, float32"])
def test_bits_depend_on_no_number_of_threads_and_on_no_thread(case: str, name: str) -> None:
    """Of native: so a row whose experts are all on the CPU is the one that the slots would have given. torch's do."""
    layer = make(case, 20)
    found = []
    for threads in (1, 2):
        executor, experts = build(name, layer, threads)
        with ThreadPoolExecutor(1, initializer=set_num_threads, initargs=(threads,)) as pool:
            found.append(pool.submit(executor.run, layer.x, layer.weights, layer.ids, experts).result())
    executor, experts = build(name, layer)
    found.append(executor.run(layer.x, layer.weights, layer.ids, experts))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    """torch keeps the newest number of threads for threads to come."""
    before = torch.get_num_threads()
    yield
    set_num_threads(before)


def test_an_activation_that_it_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match="'situ'.*--spac-cpu-experts off"):
        components.build("cpu_kernels", "simd", shape=make("silu").shape, threads=1, activation="situ")


def test_native_needs_a_kernel() -> None:
    with pytest.raises(ConfigError, match="use simd"):
        components.build("cpu_kernels", "native", shape=make("silu").shape, threads=1, activation="silu")


@pytest.mark.parametrize("wrong", ["zeros", "NaN", "another expert", "none"])
def test_results_that_differ_are_refused(wrong: str) -> None:
    layer = make("silu")
    executor, experts = build("looped_experts:Looped", layer)
    right = executor.run(layer.x, layer.weights, layer.ids, experts)
    other = executor.run(layer.x, layer.weights, layer.ids.roll(1, dims=0), experts)
    found = {"zeros": torch.zeros_like(right), "NaN": right * torch.nan, "another expert": other, "none": right}[wrong]
    if wrong == "none":
        check_same(found.bfloat16(), right, torch.bfloat16, HIDDEN, "here")
    else:
        with pytest.raises(ConfigError, match="here: results differ"):
            check_same(found, right, torch.bfloat16, HIDDEN, "here")
