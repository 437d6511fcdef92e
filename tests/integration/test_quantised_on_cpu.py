"""vLLM's layers with quantised experts in its kernels for a CPU: what is packed, what a slot has, what waves change.

The kernels run here where ``parity/quantised.py`` says so; vLLM itself selects them on a CPU with AMX only.
"""

from __future__ import annotations

import json
import sys
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from memory_store import MemoryStore
from safetensors.torch import save_file
from torch import Tensor

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.integration.layers import cpu_kernel, quant_schemes
from vllm_spac.integration.loading import managed_load
from vllm_spac.integration.loading.model_experts import ModelExperts
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.runtime import Runtime
from vllm_spac.storage.base import allocate
from vllm_spac.storage.checkpoint import cpu_layouts, quantisation
from vllm_spac.storage.checkpoint.headers import read_checkpoint
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

import quantised  # noqa: E402

pytestmark = pytest.mark.skipif(quantised.missing() is not None, reason=str(quantised.missing()))
EXPERTS, TOP_K, HIDDEN, INNER, ROWS = 8, 3, 256, 128, 48
MXFP4 = "mxfp4"
KERNEL = {name: "CPUExpertsInt4" for name in quantised.SCHEMES} | {
    "fp8": "CPUExpertsFp8",
    "fp8, compressed": "CPUExpertsFp8",
    "int8": "CPUExpertsInt8",
    MXFP4: "CPUExpertsMxfp4",
}
# Kernels in which a row's bits do not depend on the rows beside it. FP8's takes another path above four rows.
INDEPENDENT = {"CPUExpertsInt4", "CPUExpertsInt8", "CPUExpertsMxfp4"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    for name in quantised.KERNELS:
        monkeypatch.setattr(getattr(cpu_moe, name), "_supports_current_device", staticmethod(lambda: True))
    rank = SimpleNamespace(world_size=1, rank_in_group=0, device=torch.device("cpu"))
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", rank)
    mxfp4 = "vllm.model_executor.layers.fused_moe.oracle.mxfp4"
    monkeypatch.setattr(f"{mxfp4}._user_moe_activation_override", lambda: None)  # reads the config of a model


def build(scheme: str, managed: bool = True):
    """A layer as vLLM builds it for a checkpoint of ``scheme``."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization import get_quantization_config

    entry = quantised.SCHEMES[scheme].entry
    size = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER}
    size |= {"tp_size": 1, "dp_size": 1, "pcp_size": 1, "params_dtype": torch.bfloat16, "prefix": "layers.0.experts"}
    name = {"gptq": "auto_gptq", "awq": "auto_awq", MXFP4: "gpt_oss_mxfp4"}.get(entry["quant_method"])
    quant = get_quantization_config(name or entry["quant_method"]).from_config(entry)
    if scheme == MXFP4:
        from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

        size |= {"has_bias": True, "activation": "swigluoai", "routed_experts_cls": GptOssRoutedExperts}
    config = VllmConfig()
    with set_current_vllm_config(config):
        if not managed:
            return FusedMoEFactory(quant_config=quant, **size).routed_experts
        with managed_load.managed_load(partial(ModelExperts, SpacConfig(), config)):
            return FusedMoEFactory(quant_config=quant, **size).routed_experts


@cache
def checkpoint(scheme: str) -> dict[str, Tensor]:
    """Random experts, by the names under ``experts.``."""
    rng, found = torch.Generator().manual_seed(0), {}
    write = quantised.SCHEMES[scheme].projection
    for expert in range(EXPERTS):
        for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            weight = torch.randn(rows, columns, generator=rng) / 8
            if write is not None:
                found |= {f"{expert}.{part}_proj.{last}": t for last, t in write(weight).items()}
            else:
                codes, exponents = quantised.mxfp4(weight)
                found |= {f"{expert}.{part}_proj.weight": codes.flatten(1), f"{expert}.{part}_proj.scale": exponents}
                found[f"{expert}.{part}_proj.bias"] = torch.randn(rows, generator=rng).bfloat16()
    return found


def parts(scheme: str) -> list[tuple[str, Tensor, str | None, int | None]]:
    """(parameter, tensor, shard, expert) of each call of a loader; GPT-OSS's interleaves rows and loads all experts."""
    tensors = checkpoint(scheme)
    if scheme != MXFP4:
        shards = {"gate": ("w13", "w1"), "up": ("w13", "w3"), "down": ("w2", "w2")}
        split = [(name.partition("."), tensor) for name, tensor in tensors.items()]
        named = [(int(e), *rest.split("_proj."), tensor) for (e, _, rest), tensor in split]
        return [(f"{shards[part][0]}_{last}", t, shards[part][1], e) for e, part, last, t in named]
    found = []
    for last, param in (("weight", "weight"), ("scale", "weight_scale"), ("bias", "bias")):
        gate, up, down = (
            torch.stack([tensors[f"{e}.{part}_proj.{last}"] for e in range(EXPERTS)]) for part in ("gate", "up", "down")
        )
        both = torch.stack([gate, up], 2).flatten(1, 2)
        found += [(f"w13_{param}", both, None, None), (f"w2_{param}", down, None, None)]
    return found


def load(layer, given: list[tuple[str, Tensor, str | None, int | None]]) -> None:
    for name, tensor, shard, expert in given:
        if (param := getattr(layer, name, None)) is not None:
            param.weight_loader(param, tensor, weight_name=f"experts.{name}", shard_id=shard, expert_id=expert)


def stand_in(layer) -> list[int]:
    """Detaches ``layer`` from its model; returns the list that grows when it is packed."""
    packed: list[int] = []
    layer.spac = SimpleNamespace(
        device=torch.device("cpu"),
        on_cpu=True,
        config=layer.spac.config,
        arrived=lambda _: None,
        is_stored=lambda _: False,
        pack=lambda _: packed.append(len(packed)),
    )
    return packed


def loaded(scheme: str, managed: bool = True):
    layer = build(scheme, managed)
    if managed:
        stand_in(layer)
        layer.probe()
    load(layer, parts(scheme))
    if not managed:
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def served(layer, slots: int) -> SlotExecution:
    """The execution that ``layer`` is attached to, whose slots are fewer than its experts unless they are all."""
    specs = layer.probe()
    shape = MoEShape((layer.layer_name,), EXPERTS, TOP_K, specs)
    store = MemoryStore(shape, "")
    converted = layer.convert(0, EXPERTS)
    for key in range(EXPERTS):
        store.put(key, {name: tensor[key] for name, tensor in converted.items()})
    tensors = allocate(specs, slots, "cpu")
    policy = components.build("policies", "lru")
    execution = SlotExecution(ExecutionContext(shape, slots, policy, store, tensors, io_threads=1, path="memory"))
    list(execution.fill())
    layer.attach(execution)
    layer.spac.runtime = Runtime([execution], BudgetControl([]))
    return execution


def rows(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randn(ROWS, HIDDEN, generator=rng) / 4).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(ROWS)]).int()
    return x, torch.rand(ROWS, TOP_K, generator=rng), ids


def run(layer, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return layer.forward_modular(x, weights, ids, None, None)


@pytest.mark.parametrize("scheme", quantised.SCHEMES)
def test_a_few_experts_are_converted_as_the_whole_layer(scheme: str) -> None:
    stock, layer = loaded(scheme, managed=False), loaded(scheme)
    whole = quant_schemes.kernel_parameters(stock, EXPERTS)
    found = [layer.convert(start, stop) for start, stop in ((0, 1), (1, 5), (5, EXPERTS))]
    specs = layer.probe()
    assert {n: (s.shape, s.dtype) for n, s in specs.items()} == {n: (t.shape[1:], t.dtype) for n, t in found[0].items()}
    for name, spec in specs.items():
        together = torch.cat([part[name].view(torch.uint8) for part in found]).view(spec.dtype)
        assert torch.equal(together.view(torch.uint8), whole[name].data.contiguous().view(torch.uint8)), name
    aliases = {id(param) for param in whole.values()}
    assert len(specs) == len(aliases), "every tensor that the kernel reads is in a slot, once"


@pytest.mark.parametrize("scheme", quantised.SCHEMES)
def test_inspect_counts_the_bytes_of_a_slot(scheme: str, tmp_path: Path) -> None:
    entry = quantised.SCHEMES[scheme].entry
    facts = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": entry}))
    if scheme == MXFP4:
        ends = {"w13_weight": "gate_up_proj_blocks", "w2_weight": "down_proj_blocks"}
        ends |= {"w13_weight_scale": "gate_up_proj_scales", "w2_weight_scale": "down_proj_scales"}
        ends |= {"w13_bias": "gate_up_proj_bias", "w2_bias": "down_proj_bias"}
        tensors = {
            ends[name]: t.unflatten(2, (-1, 16)) if "blocks" in ends[name] else t for name, t, *_ in parts(scheme)
        }
    else:
        tensors = checkpoint(scheme)
    save_file({f"model.layers.0.mlp.experts.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    (counted,) = read_checkpoint(tmp_path, FormatKernels.CPU).expert_bytes
    layer = build(scheme)
    stand_in(layer)
    assert counted == sum(spec.nbytes for spec in layer.probe().values())
    assert quantisation.refusal(entry, FormatKernels.CPU) is None and quantisation.flags(entry, FormatKernels.CPU) == ()
    if scheme != MXFP4:  # whose biases are no part of a weight
        sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
        assert counted == sum(cpu_layouts.stored_bytes(entry, size) for size in sizes)


@pytest.mark.parametrize("scheme", quantised.SCHEMES)
def test_waves_change_no_bit(scheme: str) -> None:
    """Of a layer whose rows need all experts, with the fewest slots; and rows alone change bits where it says so."""
    stock, layer = loaded(scheme, managed=False), loaded(scheme)
    assert type(stock.quant_method.moe_kernel.fused_experts).__name__ == KERNEL[scheme]
    x, weights, ids = rows()
    expected = run(stock, x, weights, ids)
    assert expected.isfinite().all() and expected.float().std() > 1e-3
    execution = served(layer, TOP_K)
    assert torch.equal(run(layer, x, weights, ids), expected)
    layer.spac_kernel.by_expert = False  # in waves of rows
    divided = run(layer, x, weights, ids)
    assert torch.equal(divided, expected) == (KERNEL[scheme] in INDEPENDENT)
    execution.close()


@pytest.mark.parametrize("slots", [TOP_K, TOP_K + 2, EXPERTS])
@pytest.mark.parametrize("seed", range(4))
def test_waves_of_any_rows(seed: int, slots: int) -> None:
    """Of FP8, whose bits depend on an expert's other rows, with few rows and many."""
    stock, layer = loaded("fp8", managed=False), loaded("fp8")
    execution = served(layer, slots)
    x, weights, ids = rows(seed)
    for count in (1, 2, 5, 9, 17, ROWS):
        part = x[:count], weights[:count], ids[:count]
        assert torch.equal(run(layer, *part), run(stock, *part)), count
    execution.close()


@pytest.mark.parametrize("scheme", quantised.SCHEMES)
def test_cpu_experts_run_the_kernel_of_the_slots(scheme: str) -> None:
    """From the store's tensors, from any number of rows; vLLM's kernel would end the process for none."""
    layer = loaded(scheme)
    execution = served(layer, EXPERTS)
    kernel = cpu_kernel.of(layer)
    assert kernel is not None
    x, weights, ids = rows()
    experts = execution.store.layer(0)
    assert experts is not None
    for part in (slice(0, ROWS), slice(0, 1), slice(3, 9)):
        expected = run(layer, x[part], weights[part], ids[part])
        assert torch.equal(kernel(x[part], weights[part], ids[part].long(), experts), expected)
    assert kernel(x[:0], weights[:0], ids[:0], experts).shape == (0, HIDDEN)
    execution.close()
