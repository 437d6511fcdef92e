"""vLLM's own layers under management, mainly quantised: conversion runs on a CPU, their (Triton) kernels do not."""

from __future__ import annotations

import importlib
import json
import random
import resource
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from looped_experts import Looped
from memory_store import MemoryStore
from safetensors.torch import save_file
from torch import Tensor
from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.base import ExecutionContext
from vllm_spac.execution.device.pointers_execution import PointerExecution
from vllm_spac.execution.host.table_execution import TableExecution
from vllm_spac.integration.layers import quant_schemes
from vllm_spac.integration.loading import managed_load
from vllm_spac.integration.loading.fingerprint import fingerprint
from vllm_spac.integration.loading.model_experts import ModelExperts
from vllm_spac.integration.loading.packing import Packing
from vllm_spac.methods.moe_spec.control import BudgetControl
from vllm_spac.runtime import Runtime
from vllm_spac.storage.checkpoint import headers
from vllm_spac.storage.checkpoint import quantisation as quantised
from vllm_spac.storage.checkpoint.contents import CheckpointContents
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.host_memory import release_freed_memory

EXPERTS, TOP_K, HIDDEN, INNER = 6, 2, 256, 128
GROUP = {"strategy": "group", "group_size": 32, "num_bits": 4, "type": "int", "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights: dict, activations: dict | None, layout: str) -> dict:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"all": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": [],
    }


METHODS = {
    "fp8, blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed fp8, blocks": compressed(
        FP8 | {"strategy": "block", "block_structure": [128, 128]},
        FP8 | {"strategy": "group", "group_size": 128, "dynamic": True},
        "float-quantized",
    ),
    "compressed fp8, channels": compressed(
        FP8 | {"strategy": "channel"}, FP8 | {"strategy": "token", "dynamic": True}, "float-quantized"
    ),
    "compressed int4": compressed(GROUP, None, "pack-quantized"),
    "compressed int4, zero points": compressed(GROUP | {"symmetric": False}, None, "pack-quantized"),
    "gptq int4": GPTQ,
    "gptq int8": GPTQ | {"bits": 8},
    "awq int4": AWQ | {"zero_point": False},
    "awq int4, zero points": AWQ,
}


UNQUANTISED: dict = {}


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """One rank, and vLLM's methods choose the kernels of a GPU."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts, TritonWNA16Experts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization import auto_awq, fp8, moe_wna16

    def fp8_backend(**_):
        return Fp8MoeBackend.TRITON, TritonExperts

    def int4_backend(*_, **__):
        return WNA16MoEBackend.TRITON, TritonWNA16Experts

    be_rank(0, 1, monkeypatch)
    moe = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
    monkeypatch.setattr(fp8, "select_fp8_moe_backend", fp8_backend)
    monkeypatch.setattr(f"{moe}w8a8_fp8.select_fp8_moe_backend", fp8_backend)
    monkeypatch.setattr(f"{moe}wna16.select_wna16_moe_backend", int4_backend)
    monkeypatch.setattr(moe_wna16, "select_wna16_moe_backend", int4_backend)
    monkeypatch.setattr(auto_awq.AutoAWQConfig, "get_min_capability", lambda: -1)  # a CPU has none


def be_rank(number: int, ranks: int, monkeypatch) -> None:
    """Makes this process rank ``number`` of ``ranks``, as far as layers ask."""
    rank = SimpleNamespace(world_size=ranks, rank_in_group=number, device=torch.device("cpu"))
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", rank)


def sizes(ranks: int = 1) -> dict:
    size = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER, "tp_size": ranks}
    return size | {"dp_size": 1, "pcp_size": 1, "params_dtype": torch.bfloat16, "prefix": "layers.0.experts"}


def build(quantisation: dict | None, managed=True, ranks: int = 1, experts=False, on_cpu: bool | None = None, **knobs):
    """A layer as vLLM builds it for a checkpoint with ``quantisation``, or with none.

    ``ranks``: number of ranks, each of which holds a part of every expert or, with ``experts``, some of the experts.
    ``on_cpu``: where the kernels are to run; quantised ones here are those of a GPU by default.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory
    from vllm.model_executor.layers.quantization import get_quantization_config

    config = VllmConfig()
    config.parallel_config.enable_expert_parallel = experts
    with set_current_vllm_config(config):
        size, quant = sizes(ranks), None
        if quantisation is not None:
            method = quantised.loader(quantisation) or quantisation["quant_method"]
            method = "modelopt_fp4" if method == "modelopt" else method  # as vLLM reads its algorithm
            quant = get_quantization_config(method).from_config(quantisation)
        if not managed:
            return FusedMoEFactory(quant_config=quant, **size).routed_experts
        where = SimpleNamespace(is_cpu=lambda: quantisation is None if on_cpu is None else on_cpu)
        platform = patch.object(quant_schemes, "current_platform", where)
        with platform, managed_load.managed_load(partial(ModelExperts, SpacConfig(**knobs), config)):
            return FusedMoEFactory(quant_config=quant, **size).routed_experts


def checkpoint(quantisation: dict) -> dict[str, Tensor]:
    """Random experts as a checkpoint has them, by the names under ``experts.``."""
    generator, found = torch.Generator().manual_seed(0), {}

    def bits(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator, dtype=torch.int32)

    def floats(*shape: int, dtype=torch.bfloat16) -> Tensor:
        return (torch.rand(shape, generator=generator) + 0.5).to(dtype)

    for expert in range(EXPERTS):
        for part, (rows, columns) in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            if quantisation.get("format") == "pack-quantized":
                tensors = {
                    "weight_packed": bits(rows, columns // 8),
                    "weight_scale": floats(rows, columns // 32),
                    "weight_shape": torch.tensor([rows, columns]),
                }
                if not quantisation["config_groups"]["all"]["weights"]["symmetric"]:
                    tensors["weight_zero_point"] = bits(rows // 8, columns // 32)
            elif quantisation.get("quant_method") in ("gptq", "awq"):
                packed, group = 32 // quantisation["bits"], quantisation["group_size"]
                tensors = {
                    "qweight": bits(columns, rows // packed),
                    "qzeros": bits(columns // group, rows // packed),
                    "scales": floats(columns // group, rows, dtype=torch.float16 if packed == 8 else torch.float32),
                }
                if quantisation == METHODS["awq int4"]:
                    del tensors["qzeros"]
                if quantisation["quant_method"] == "gptq":
                    tensors["qweight"] = bits(columns // packed, rows)
                    tensors["g_idx"] = (torch.arange(columns) // group).to(torch.int32)
                    tensors["bias"] = floats(rows)  # some have one that the model does not
            elif not quantisation:
                tensors = {"weight": floats(rows, columns)}
            else:
                channels = "channel" in str(quantisation)
                scale = "weight_scale_inv" if quantisation["quant_method"] == "fp8" else "weight_scale"
                tensors = {"weight": floats(rows, columns, dtype=torch.float8_e4m3fn)}
                tensors[scale] = floats(rows, 1) if channels else floats(rows // 128, columns // 128)
            found |= {f"{expert}.{part}_proj.{name}": tensor for name, tensor in tensors.items()}
    return found


def load(layer, tensors: dict[str, Tensor], names: list[str] | None = None) -> None:
    """Give ``layer`` the tensors as vLLM's models do."""
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    for name in tensors if names is None else names:
        expert, part, last = name.split(".")
        prefix, shard = shards[part]
        if (param := getattr(layer, f"{prefix}_{last}", None)) is not None:
            loaded = param.weight_loader(param, tensors[name], f"experts.{prefix}_{last}", shard, int(expert), True)
            assert loaded or name.endswith("qzeros")  # vLLM says that it did not load what it does not read


def is_unread(name: str, method: str) -> bool:
    """Whether no kernel reads the checkpoint's tensor ``name``: its experts are quantised as ``METHODS[method]``."""
    return name.endswith(("weight_shape", "g_idx", "bias")) or (name.endswith("qzeros") and "zero points" not in method)


def stand_in(layer) -> list[int]:
    """Detach ``layer`` from its model; returns the list that grows when it is packed."""
    packed: list[int] = []
    device, config = torch.device("cpu"), layer.spac.config
    layer.spac = SimpleNamespace(
        device=device, on_cpu=True, config=config, arrived=lambda _: None, is_stored=lambda _: False
    )
    layer.spac.pack = lambda _: packed.append(len(packed))
    return packed


def waiting(quantisation: dict | None, **options) -> tuple[Any, list[int]]:
    """A layer that waits for its tensors, and the list that grows when it is packed."""
    layer = build(quantisation, **options)
    packed = stand_in(layer)
    layer.probe()
    return layer, packed


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether all bits are the same: NaNs are."""
    return found.keys() == expected.keys() and all(
        (t.shape, t.dtype) == (expected[n].shape, expected[n].dtype)
        and torch.equal(t.contiguous().view(torch.uint8), expected[n].contiguous().view(torch.uint8))
        for n, t in found.items()
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_few_experts_are_converted_as_the_whole_layer(name):
    tensors = checkpoint(METHODS[name])
    stock, layer = build(METHODS[name], managed=False), build(METHODS[name])
    load(stock, tensors)
    stock.quant_method.process_weights_after_loading(stock)
    stand_in(layer)
    specs = layer.probe()
    load(layer, tensors)
    parts = [layer.convert(start, stop) for start, stop in ((0, 1), (1, 5), (5, EXPERTS))]
    assert {n: (s.shape, s.dtype) for n, s in specs.items()} == {n: (t.shape[1:], t.dtype) for n, t in parts[0].items()}
    together = {n: torch.cat([part[n].view(torch.uint8) for part in parts]).view(s.dtype) for n, s in specs.items()}
    assert same(together, {n: getattr(stock, n).data for n in specs})


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", [*METHODS, "none"])
def test_a_rank_packs_its_part_when_its_last_tensor_has_come(name, number, monkeypatch):
    """The checkpoint's tensors are whole; of each the rank keeps another part, or all of it."""
    monkeypatch.setitem(globals(), "INNER", 256)  # a rank has whole blocks of scales
    quantisation = METHODS.get(name)
    tensors = checkpoint(quantisation or UNQUANTISED)
    be_rank(number, 2, monkeypatch)
    stock, layer = build(quantisation, managed=False, ranks=2), build(quantisation, ranks=2)
    raw = {n: param for n, param in stock.named_parameters() if n in layer._staged}
    load(stock, tensors)
    packed = stand_in(layer)
    layer.probe()
    waited = [n for n in tensors if not is_unread(n, name)]
    random.Random(number).shuffle(waited)
    load(layer, tensors, waited[:-1])
    assert packed == []
    load(layer, tensors, waited[-1:])
    assert packed == [0]
    assert same({n: param.data for n, param in layer._staged.items()}, {n: param.data for n, param in raw.items()})


LOADED_BY_RANKS = [name for name in (*METHODS, "none") if name != "awq int4, zero points"]  # see ``test_refusals``


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", LOADED_BY_RANKS)
def test_a_rank_with_some_of_the_experts_waits_for_those_alone(name, number, monkeypatch):
    """Also where the quant method's own loader converts what comes; the rank has the bytes that one alone has."""
    quantisation = METHODS.get(name)
    tensors = checkpoint(quantisation or UNQUANTISED)
    alone = build(quantisation, managed=False)
    load(alone, tensors)
    be_rank(number, 2, monkeypatch)
    layer, packed = waiting(quantisation, ranks=2, experts=True)
    mine = [n for n in tensors if int(n.split(".")[0]) // (EXPERTS // 2) == number]
    assert layer.local_of[layer.local_of >= 0].tolist() == list(range(EXPERTS // 2))
    read = [n for n in tensors if not is_unread(n, name)]
    mine, others = [n for n in read if n in mine], [n for n in read if n not in mine]
    random.Random(number).shuffle(mine)
    last, found = mine[-1], {}

    def pack(_):
        found.update({n: param.data.clone() for n, param in layer._staged.items()})
        packed.append(len(packed))
        layer.drop()

    layer.spac.pack = pack
    shards = {"gate_proj": ("w13", "w1"), "up_proj": ("w13", "w3"), "down_proj": ("w2", "w2")}
    done = False
    for each in [*others[::2], *mine, *others[1::2]]:  # others' experts come after the layer was packed, too
        expert, part, ending = each.split(".")
        prefix, shard = shards[part]
        param = getattr(layer, f"{prefix}_{ending}")
        loaded = param.weight_loader(param, tensors[each], f"experts.{prefix}_{ending}", shard, int(expert), True)
        done = done or each == last
        assert loaded is (each in mine) and packed == ([0] if done else [])
    own = slice(number * EXPERTS // 2, (number + 1) * EXPERTS // 2)
    whole = dict(alone.named_parameters())
    assert same(found, {n: whole[n].data[own] for n in found})


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_that_comes_twice_before_its_layer_is_packed(name):
    (layer, packed), tensors = waiting(METHODS[name]), checkpoint(METHODS[name])
    first, *_ = (n for n in tensors if not is_unread(n, name))
    load(layer, tensors, [first])
    with pytest.raises(SpacError, match="of expert 0 of layers.0.experts came twice; use a checkpoint that has each"):
        load(layer, tensors, [first])
    assert packed == []


@pytest.mark.parametrize("name", METHODS)
def test_a_stored_layer_takes_nothing(name):
    layer, packed = waiting(METHODS[name])
    layer.spac.is_stored = lambda _: True
    load(layer, {n: t.to("meta") for n, t in checkpoint(METHODS[name]).items()})  # which nobody can read
    assert packed == []


@pytest.mark.parametrize("name", METHODS)
def test_a_weight_that_comes_after_its_layer_was_packed(name):
    """Of a running engine whose weights are changed, or of a checkpoint that has it twice."""
    (layer, _), tensors = waiting(METHODS[name]), checkpoint(METHODS[name])
    layer.spac.is_stored = lambda _: layer._packed
    layer.spac.pack = lambda _: layer.drop()
    load(layer, tensors)
    for again in (n for n in tensors if not is_unread(n, name)):
        with pytest.raises(SpacError, match="came after the layer was packed.*or restart with the new one"):
            load(layer, tensors, [again])
    layer = build(METHODS[name])
    stand_in(layer)
    layer.spac.is_stored = lambda _: True
    layer.drop()  # as an engine does whose experts were packed by an earlier start
    with pytest.raises(SpacError, match="came after the layer was packed"):
        load(layer, tensors)


@pytest.mark.parametrize("name", ["compressed int4, zero points", "gptq int4", "awq int4, zero points"])
def test_a_layer_is_no_memory_before_its_weights_come(name, monkeypatch):
    build(METHODS[name])  # imports
    monkeypatch.setitem(globals(), "EXPERTS", 16384)
    before = resident_bytes()
    layer = build(METHODS[name])
    release_freed_memory()  # what vLLM wrote, and the plugin let go
    grown = resident_bytes() - before
    scales = sum(param.nbytes for param in layer._staged.values() if param.dtype == torch.bfloat16)
    assert scales >= 48 << 20 and grown < scales / 2  # other things grow by a few MiB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def attached(quantisation: dict, slots: int):
    """(layer, tensors of its pool) as they serve."""
    layer = build(quantisation)
    stand_in(layer)
    specs = layer.probe()
    tensors = {n: torch.zeros((slots, *s.shape), dtype=s.dtype) for n, s in specs.items()}
    shape = MoEShape((layer.layer_name,), EXPERTS, TOP_K, specs)
    residency = SimpleNamespace(slots=slots)
    pool = SimpleNamespace(shape=shape, holds_all=slots == EXPERTS, tensors=tensors, residency=residency)
    return layer, pool


@pytest.mark.parametrize("slots", [3, EXPERTS], ids=["some", "all"])
@pytest.mark.parametrize("name", METHODS)
def test_the_kernel_reads_the_slots(name, slots):
    layer, pool = attached(METHODS[name], slots)
    layer.attach(pool)
    config = layer.quant_method.moe_kernel.fused_experts.quant_config
    reads = {
        "w13": (layer.w13_weight, config.w1_scale, config.w1_zp),
        "w2": (layer.w2_weight, config.w2_scale, config.w2_zp),
    }
    for prefix, tensors in reads.items():
        ours = {t.data_ptr(): t for n, t in pool.tensors.items() if n.startswith(prefix)}
        for tensor in (t for t in tensors if t is not None):
            assert tensor.shape == ours[tensor.data_ptr()].shape
    assert (config.w1_zp is None) == ("zero points" not in name)
    assert layer.local_num_experts == slots


@pytest.mark.parametrize("name", ["fp8, blocks", "compressed int4"])
def test_a_kernel_that_kept_a_scale_is_noticed(name):
    layer, pool = attached(METHODS[name], 3)
    config = layer.quant_method.moe_kernel.fused_experts.quant_config
    config._w2.scale = config._w2.scale.clone()
    with pytest.raises(SpacError, match="keeps w2_scale for itself"):
        layer.attach(pool)


FP8_TENSOR = FP8 | {"strategy": "tensor"}


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        {"quant_method": "fp8", "activation_scheme": "static"},
        compressed(FP8_TENSOR, FP8_TENSOR | {"dynamic": True}, "float-quantized"),
        compressed(FP8_TENSOR, FP8_TENSOR | {"dynamic": False}, "float-quantized"),
    ],
    ids=["fp8, dynamic", "fp8, static", "compressed, dynamic", "compressed, static"],
)
def test_scales_of_whole_tensors_are_refused(quantisation):
    assert "share a scale" in quantised.refusal(quantisation)
    with pytest.raises(UnsupportedError, match="_scale.* not among the weights and scales by block"):
        build(quantisation)


def test_quantised_experts_have_no_cpu_experts():
    with pytest.raises(UnsupportedError, match="quantised experts.*--spac-cpu-experts off"):
        build(METHODS["fp8, blocks"], cpu_experts=2, store="host")


@pytest.mark.parametrize(
    ("quantisation", "named"),
    [
        (GPTQ | {"desc_act": True}, "activation ordering (desc_act) (gptq): not supported; use one in FP8"),
        (GPTQ | {"sym": False}, "zero points (sym=false), which vLLM does not load (gptq)"),
        (GPTQ | {"bits": 3}, "3 bits (gptq)"),
        (GPTQ | {"group_size": -1}, "one scale per channel (group_size=-1) (gptq)"),
        (AWQ | {"bits": 8}, "8 bits (awq)"),
        (AWQ | {"group_size": -1}, "one scale per channel (group_size=-1) (awq)"),
    ],
    ids=str,
)
def test_gptq_and_awq_that_vllm_or_its_kernel_cannot_run(quantisation, named):
    assert named in quantised.refusal(quantisation)


@pytest.mark.parametrize(
    ("on_cpu", "instead"),
    [
        (False, "TritonExperts was; add --moe-backend triton, or"),
        (True, "CPUExpertsFp8 was; use another quantisation .vllm-spac check says which., or an unquantised"),
    ],
)
def test_a_kernel_that_was_never_seen_is_refused(monkeypatch, on_cpu, instead):
    """With what works on this machine, and not on another."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8

    monkeypatch.setattr(fp8, "select_fp8_moe_backend", lambda **_: (Fp8MoeBackend.MARLIN, MarlinExperts))
    with pytest.raises(UnsupportedError, match=f"MarlinExperts was never tested .* {instead}"):
        build(METHODS["fp8, blocks"], on_cpu=on_cpu)


def choose(kernel, monkeypatch) -> None:
    """Let vLLM choose ``kernel`` for unquantised experts, which a CPU has others for."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as unquantised
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    chosen = UnquantizedMoeBackend.TRITON, kernel
    monkeypatch.setattr(unquantised, "select_unquantized_moe_backend", lambda *_, **__: chosen)


@pytest.fixture
def unquantised(monkeypatch):
    """A layer whose (Triton) kernel reads experts as the checkpoint has them, loaded, and what it was given."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    choose(TritonExperts, monkeypatch)
    layer, _ = waiting(None)
    plain = {n: t for n, t in checkpoint(METHODS["fp8, blocks"]).items() if n.endswith("weight")}
    load(layer, {n: t.to(torch.bfloat16) for n, t in plain.items()})
    return layer, {n: p.data.clone() for n, p in layer._staged.items()}


def test_what_a_kernel_reads_as_the_checkpoint_has_it_is_not_converted(unquantised):
    layer, given = unquantised
    calls, to_kernel = [], layer.spac_conversion.to_kernel
    layer.spac_conversion.to_kernel = lambda _: (calls.append(len(layer.w13_weight)), to_kernel(layer))
    parts = [layer.convert(start, stop) for start, stop in ((0, 2), (2, 5), (5, EXPERTS))]
    assert calls == [1], "one expert is, to see that it is so"
    assert same({n: torch.cat([part[n] for part in parts]) for n in given}, given)
    assert all(
        t.untyped_storage().data_ptr() == layer._staged[n].untyped_storage().data_ptr() for n, t in parts[0].items()
    )
    pool = SimpleNamespace(shape=SimpleNamespace(experts=EXPERTS), holds_all=False, residency=SimpleNamespace(slots=4))
    pool.tensors = {n: t[:4].clone() for n, t in given.items()}
    layer.attach(pool)
    assert layer.w13_weight.data_ptr() == pool.tensors["w13_weight"].data_ptr()


@pytest.mark.parametrize(
    "change", [lambda t: t.flip(1), lambda t: t.transpose(1, 2).contiguous()], ids=["order", "shape"]
)
def test_a_kernel_that_is_given_experts_otherwise_is_noticed(unquantised, change):
    layer, _ = unquantised
    to_kernel = layer.spac_conversion.to_kernel

    def converted(_):
        to_kernel(layer)
        layer.w13_weight.data = change(layer.w13_weight.data)

    layer.spac_conversion.to_kernel = converted
    with pytest.raises(SpacError, match="TritonExperts does not read w13_weight of .* as the checkpoint has it"):
        layer.convert(0, 2)


@pytest.mark.parametrize(("on_cpu", "chunks"), [(True, 6), (False, 1)])
def test_a_gpu_is_given_many_experts_at_once(on_cpu, chunks):
    """Each chunk costs it a kernel object and copies; on a CPU a chunk is memory beside the layer."""
    shape = MoEShape(("layer",), EXPERTS, TOP_K, {"w": TensorSpec((3, 1 << 20), torch.float32)})
    store, asked, forgotten = MemoryStore(shape, ""), [], []
    experts = object.__new__(Packing)
    experts.on_cpu, experts._bar = on_cpu, SimpleNamespace(update=lambda: None)
    experts._stores, experts._put = {"layer": store}, []

    def convert(start, stop):
        asked.append((start, stop))
        return {"w": torch.arange(start, stop).float()[:, None, None].expand(-1, 3, 1 << 20)}

    layer = SimpleNamespace(
        layer_name="layer", spac_index=0, convert=convert, drop=lambda: forgotten.append(len(asked))
    )
    experts.pack(layer)
    assert len(asked) == chunks and forgotten == [chunks]
    assert [store.view(key)["w"][2, 7].item() for key in range(EXPERTS)] == list(range(EXPERTS))


def test_a_load_that_failed_gives_back_its_stores_once_each():
    """What is pinned stays pinned otherwise, in a process that goes on."""
    experts, closed = object.__new__(ModelExperts), []
    experts.serving, experts.head = None, None
    experts.packing = packing = object.__new__(Packing)
    packing._locks = [SimpleNamespace(close=lambda: closed.append("lock"))]
    shared, other = (SimpleNamespace(close=lambda name=name: closed.append(name)) for name in ("shared", "other"))
    packing._stores, packing._filled = {"first": shared, "second": shared, "third": other}, {}
    experts.close()
    assert closed == ["lock", "shared", "other"]
    closed.clear()
    pool = SimpleNamespace(store=other, close=lambda: (closed.append("pool"), other.close()))
    packing._filled = {"shape": pool}
    experts.close()
    assert closed == ["lock", "pool", "other", "shared"]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("triton_moe.TritonExperts", True),
        ("flashinfer_cutlass_moe.FlashInferExperts", False),
        ("trtllm_bf16_moe.TrtLlmBf16ExpertsModular", False),
        ("fused_batched_moe.BatchedTritonExperts", False),
    ],
)
def test_off_the_cpu_unquantised_experts_need_a_kernel_that_finds_slots(monkeypatch, path, known):
    """FlashInfer's ignores the map from experts to slots, and is vLLM's choice on sm_100 and sm_120."""
    module, name = path.split(".")
    choose(
        getattr(importlib.import_module(f"vllm.model_executor.layers.fused_moe.experts.{module}"), name), monkeypatch
    )
    build(None)  # a CPU's kernels take slots for experts
    if known:
        build(None, on_cpu=False)
    else:
        with pytest.raises(UnsupportedError, match=f"{name} is not known .* TritonExperts does; add --moe-backend"):
            build(None, on_cpu=False)


@pytest.mark.parametrize("name", METHODS)
def test_inspect_counts_the_bytes_of_a_slot(name, tmp_path):
    facts = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": METHODS[name]}))
    tensors = checkpoint(METHODS[name])
    save_file({f"model.layers.0.mlp.experts.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    found = headers.read_checkpoint(tmp_path)
    layer = build(METHODS[name])
    stand_in(layer)
    assert found.expert_bytes == [sum(spec.nbytes for spec in layer.probe().values())]
    assert quantised.refusal(found.quantisation) is None


def test_packed_experts_are_told_apart():
    """Also between ranks, which hold other parts of the same experts, or other experts, in the same shapes."""
    shape = MoEShape(("layer",), EXPERTS, TOP_K, {"w13_weight_packed": TensorSpec((4,), torch.uint8)})
    ranks = [{}, {"tp_size": 2}, {"tp_size": 2, "tp_rank": 1}, {"ep_size": 2, "use_ep": True}]
    ranks.append({"ep_size": 2, "use_ep": True, "ep_rank": 1})
    alone = {"tp_size": 1, "tp_rank": 0, "ep_size": 1, "ep_rank": 0, "use_ep": False}
    names = set()
    for change in ({}, {"symmetric": False}, {"type": "float"}):
        entry = compressed(GROUP | change, None, "pack-quantized")
        model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda entry=entry: {"quantization_config": entry}))
        vllm_config = SimpleNamespace(model_config=model, load_config=SimpleNamespace(load_format="auto"))
        for kernel in (Tensor, MoEShape):
            for method in ("Fp8MoEMethod", "CompressedTensorsWNA16MoEMethod"):
                for rank in ranks:
                    held = SimpleNamespace(get_local_expert_ids=lambda: [0, 1, 2])  # as if ranks were not numbered
                    layer = SimpleNamespace(
                        expert_map_manager=held,
                        quant_method=type(method, (), {"experts_cls": kernel})(),
                        moe_config=SimpleNamespace(moe_parallel_config=SimpleNamespace(**alone | rank)),
                    )
                    for weights, layout in product(("one", "two"), ("kernel", "plain")):
                        names.add(fingerprint(vllm_config, shape, layer, CheckpointContents([weights]), layout))
    assert len(names) == 3 * 2 * 2 * len(ranks) * 2 * 2


# -- our kernels -------------------------------------------------------------------------------------------

INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {"group_0": {"weights": NVFP4, "input_activations": NVFP4, "targets": ["Linear"]}},
    "ignore": ["lm_head"],
}
PACKED = METHODS | {
    "compressed nvfp4": compressed(NVFP4, None, "nvfp4-pack-quantized"),
    "compressed nvfp4, W4A4": compressed(NVFP4, NVFP4 | {"dynamic": "local"}, "nvfp4-pack-quantized"),
    "modelopt nvfp4": MODELOPT,
    "compressed int8, channels": compressed(
        INT8 | {"strategy": "channel"}, INT8 | {"strategy": "token", "dynamic": True}, "int-quantized"
    ),
    "gptq int4, Marlin": GPTQ,
    "awq int4, Marlin": AWQ,
    "gpt-oss": {"quant_method": "mxfp4"},
}
POINTERS = {"plane": "pointers", "store": "host", "slots": "50%"}
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


@pytest.fixture
def backends(monkeypatch):
    """vLLM's methods choose kernels of a GPU, none of which runs."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.int8 import Int8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, mxfp4

    def marlin(*_, **__):
        return WNA16MoEBackend.MARLIN, MarlinExperts

    moe = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_"
    monkeypatch.setattr(auto_gptq, "select_wna16_moe_backend", marlin)
    monkeypatch.setattr(auto_awq, "select_wna16_moe_backend", marlin)
    monkeypatch.setattr(mxfp4, "select_mxfp4_moe_backend", lambda *_: (Mxfp4MoeBackend.MARLIN, MarlinExperts))
    int8 = Int8MoeBackend.TRITON, MarlinExperts
    monkeypatch.setattr(f"{moe}w8a8_int8.select_int8_moe_backend", lambda *_, **__: int8)
    nvfp4_backend("MARLIN", monkeypatch)
    fp8_backend("MARLIN", monkeypatch)


def nvfp4_backend(name: str, monkeypatch) -> None:
    """Lets vLLM choose kernels for NVFP4; only their name matters."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend

    for module in ("modelopt", "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4"):
        path = f"vllm.model_executor.layers.quantization.{module}.select_nvfp4_moe_backend"
        monkeypatch.setattr(path, lambda **_: (NvFp4MoeBackend[name], MarlinExperts))


def fp8_backend(name: str, monkeypatch) -> None:
    """Lets vLLM choose kernels for FP8; only their name matters."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import MarlinExperts
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend

    for module in ("fp8", "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8"):
        path = f"vllm.model_executor.layers.quantization.{module}.select_fp8_moe_backend"
        monkeypatch.setattr(path, lambda **_: (Fp8MoeBackend[name], MarlinExperts))


def build_packed(name: str):
    """A layer over pointers, of a method that stands in for what a GPU's vLLM would choose."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory, RoutedExperts
    from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMoEMethod
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig, AutoGPTQMoEMethod
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    made = {
        "gptq int4, Marlin": lambda moe: AutoGPTQMoEMethod(AutoGPTQConfig.from_config(GPTQ), moe),
        "awq int4, Marlin": lambda moe: AutoAWQMoEMethod(AutoAWQConfig.from_config(AWQ), moe),
        "gpt-oss": GptOssMxfp4MoEMethod,
    }
    if name not in made:
        return build(PACKED[name], **POINTERS)
    size = sizes()
    if name == "gpt-oss":
        from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

        size |= {"has_bias": True, "activation": "swigluoai", "routed_experts_cls": GptOssRoutedExperts}
    config = VllmConfig()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RoutedExperts, "_get_quant_method", lambda self, prefix, quant, moe: made[name](moe))
        with (
            set_current_vllm_config(config),
            managed_load.managed_load(partial(ModelExperts, SpacConfig(**POINTERS), config)),
        ):
            return FusedMoEFactory(quant_config=None, **size).routed_experts


def nibbles(words: Tensor, bits: int = 4) -> Tensor:
    """int32 [..., n] -> [..., 32 / bits * n], the lowest first."""
    shifts = torch.arange(0, 32, bits)
    return ((words.long()[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def published(name: str) -> dict[str, Tensor]:
    """Random experts of ``PACKED[name]``, by the names under ``experts.``."""
    if name == "gpt-oss":
        rng, found = torch.Generator().manual_seed(0), {}
        for expert in range(EXPERTS):
            for part, (rows, columns) in {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
                found |= {
                    f"{expert}.{part}_proj.blocks": torch.randint(
                        0, 256, (rows, columns // 32, 16), dtype=torch.uint8, generator=rng
                    ),
                    f"{expert}.{part}_proj.scales": torch.randint(
                        120, 126, (rows, columns // 32), dtype=torch.uint8, generator=rng
                    ),
                    f"{expert}.{part}_proj.bias": torch.randn(rows, generator=rng).bfloat16(),
                }
        return found
    if "nvfp4" in name:
        return nvfp4(name)
    tensors = checkpoint(PACKED[name] if "int8, channels" not in name else METHODS["compressed fp8, channels"])
    if "int8, channels" in name:
        return {n: t.view(torch.int8) if n.endswith("weight") else t * 0.05 for n, t in tensors.items()}
    return {n: t for n, t in tensors.items() if not n.endswith(".bias")} if "Marlin" in name else tensors


def nvfp4(name: str) -> dict[str, Tensor]:
    """Random experts as ModelOpt and llm-compressor write them; gate and up have tensors' scales of their own."""
    rng, found = torch.Generator().manual_seed(0), {}
    for expert in range(EXPERTS):
        for part, (rows, columns) in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=rng)
            scales = (448 * torch.rand(rows, columns // 16, generator=rng)).to(torch.float8_e4m3fn)
            whole, seen = (0.1 + torch.rand(2, generator=rng)) / 2688
            if name.startswith("modelopt"):
                tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole, "input_scale": seen}
            else:
                tensors = {
                    "weight_packed": codes,
                    "weight_scale": scales,
                    "weight_global_scale": 1 / whole[None],
                    "input_global_scale": 1 / seen[None],
                }
                if "W4A4" not in name:
                    del tensors["input_global_scale"]
            found |= {f"{expert}.{part}_proj.{last}": tensor for last, tensor in tensors.items()}
    return found


def meant(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """The weight [N, K] bfloat16 that the tensors of one projection stand for, by the scheme's definition."""
    scheme = PACKED[name]
    if name == "gpt-oss":
        blocks = tensors["blocks"].flatten(1).long()
        codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(1)
        powers = torch.exp2(tensors["scales"].double() - 127).repeat_interleave(32, 1)
        return (_E2M1[codes] * powers).bfloat16()
    if "nvfp4" in name:  # by vLLM's own emulation
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

        packed = next(tensors[n] for n in ("weight", "weight_packed") if n in tensors)
        whole = tensors["weight_scale_2"] if "weight_scale_2" in tensors else 1 / tensors["weight_global_scale"]
        return dequantize_to_dtype(packed, tensors["weight_scale"], whole, torch.bfloat16, swizzle=False)
    if scheme.get("format") == "pack-quantized":
        codes, scale = nibbles(tensors["weight_packed"]), tensors["weight_scale"]
        zero = nibbles(tensors["weight_zero_point"].T).T if "weight_zero_point" in tensors else torch.tensor(8)
    elif scheme["quant_method"] == "gptq":
        codes, scale = nibbles(tensors["qweight"].T, scheme["bits"]), tensors["scales"].T
        zero = torch.tensor(1 << (scheme["bits"] - 1))
    elif scheme["quant_method"] == "awq":
        order = [0, 4, 1, 5, 2, 6, 3, 7]
        codes = nibbles(tensors["qweight"]).unflatten(1, (-1, 8))[..., order].flatten(1).T
        scale, zero = tensors["scales"].T, torch.tensor(8)
        if scheme["zero_point"]:
            zero = nibbles(tensors["qzeros"]).unflatten(1, (-1, 8))[..., order].flatten(1).T
    else:
        weight, scale = tensors["weight"].float(), next(tensors[n] for n in tensors if "scale" in n).float()
        steps = [size // count for size, count in zip(weight.shape, scale.shape, strict=True)]
        return (weight * scale.repeat_interleave(steps[0], 0).repeat_interleave(steps[1], 1)).bfloat16()
    group = codes.shape[1] // scale.shape[1]
    zero = zero.repeat_interleave(group, 1) if zero.dim() else zero
    return ((codes - zero).double() * scale.bfloat16().double().repeat_interleave(group, 1)).bfloat16()


def given(layer, name: str, tensors: dict[str, Tensor]) -> None:
    """Loads as vLLM's models do."""
    if name != "gpt-oss":
        load(layer, tensors, [n for n in tensors if not is_unread(n, "zero points" if "Marlin" in name else name)])
        return
    parts = {"gate_up_proj": "w13", "down_proj": "w2"}
    lasts = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}
    for key, tensor in tensors.items():
        expert, part, last = key.split(".")
        target = f"{parts[part]}_{lasts[last]}"
        param = getattr(layer, target)
        assert param.weight_loader(param, tensor, target, f"gpt_oss_{parts[part]}", int(expert), return_success=True)


def taken(name: str) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a checkpoint, and a layer that has taken all of them, and was packed once."""
    tensors, layer = published(name), build_packed(name)
    packed = stand_in(layer)
    layer.probe()
    given(layer, name, tensors)
    assert packed == [0]
    return tensors, layer


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """(x, weights, ids) of four rows."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, HIDDEN, generator=generator) / 16).bfloat16()
    return x, torch.rand(4, TOP_K, generator=generator), torch.tensor([[0, 5], [3, 1], [2, 0], [4, 5]])


def tables_of(name: str, tensors: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """The dequantised weights of each expert: w13, w2 and biases."""
    found: dict[str, list[Tensor]] = {"w13": [], "w2": [], "b13": [], "b2": []}
    for expert in range(EXPERTS):

        def part(projection: str, expert: int = expert) -> dict[str, Tensor]:
            prefix = f"{expert}.{projection}_proj."
            return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}

        if name == "gpt-oss":
            found["w13"].append(meant(name, part("gate_up")))
            found["b13"].append(part("gate_up")["bias"])
            found["b2"].append(part("down")["bias"])
        else:
            found["w13"].append(torch.cat([meant(name, part("gate")), meant(name, part("up"))]))
        found["w2"].append(meant(name, part("down")).contiguous())
    return {kind: parts for kind, parts in found.items() if parts}


def served(layer, slots: int, kind: type[PointerExecution | TableExecution] = PointerExecution):
    """The layer's experts as our kernel reads them, and the layer attached to them."""
    shape = MoEShape((layer.layer_name,), EXPERTS, TOP_K, layer.probe(), layer.spac_packed)
    PointerExecution.check_shape(shape)
    store = components.build("stores", "host", shape=shape, fingerprint="")
    for start, stop in ((0, 1), (1, 4), (4, EXPERTS)):
        part = layer.convert(start, stop)
        for key in range(start, stop):
            store.put(key, {name: tensor[key - start] for name, tensor in part.items()})
    layer.drop()
    tensors = {n: torch.full((slots, *s.shape), 255, dtype=torch.uint8).to(s.dtype) for n, s in shape.tensors.items()}
    policy = components.build("policies", "lru")
    execution = kind(ExecutionContext(shape, slots, policy, store, tensors, path="host", rows=16))
    assert sum(execution.fill()) == slots
    layer.spac.runtime = Runtime([execution], BudgetControl([]))
    layer.attach(execution)
    return execution


@pytest.mark.parametrize("name", PACKED)
def test_a_layer_over_pointers_computes_what_the_checkpoint_means(backends, name):
    """vLLM's own parameters, loaders and method; what is stored are the packed bytes, and nothing is dequantised."""
    tensors, layer = taken(name)
    execution = served(layer, 3)
    x, weights, ids = rows()
    out = layer.forward_modular(x, weights, ids)
    plain = tables_of(name, tensors)
    tables = {kind: torch.tensor([part.data_ptr() for part in parts]) for kind, parts in plain.items()}
    act = "swigluoai" if name == "gpt-oss" else "silu"
    biases = tables.get("b13"), tables.get("b2")
    expected = grouped_gemm(x, tables["w13"], tables["w2"], weights, ids, INNER, *biases, act)
    assert torch.isfinite(expected).all() and torch.equal(out, expected)
    bits = 4 if layer.spac_packed.per_byte == 2 else 8
    least = 3 * INNER * HIDDEN * bits // 8
    assert least < execution.shape.expert_bytes < 1.3 * least
    layer.spac.runtime.close()


@pytest.mark.parametrize(
    ("name", "columns"),
    [("fp8, blocks", 128), ("compressed fp8, blocks", 128), ("compressed fp8, channels", 0)],
)
def test_rows_are_rounded_where_vllms_kernel_rounds_them(backends, monkeypatch, name, columns):
    """As by its Triton kernel for FP8; not by Marlin's."""
    answers = {}
    for backend in ("MARLIN", "TRITON"):
        fp8_backend(backend, monkeypatch)
        tensors, layer = taken(name)
        assert layer.spac_packed.activations == (columns if backend == "TRITON" else None)
        served(layer, 3)
        x, weights, ids = rows()
        answers[backend] = layer.forward_modular(x, weights, ids)
        layer.spac.runtime.close()
    off = (answers["TRITON"] - answers["MARLIN"]).abs().max() / answers["MARLIN"].abs().max()
    assert 2**-8 < off < 0.1, "a number of e4m3 is off by 1 / 16 at most"


@pytest.mark.parametrize("name", ["gpt-oss", "modelopt nvfp4", "compressed int8, channels", "awq int4, Marlin"])
def test_a_layer_over_slots_of_our_kernel_computes_what_pointers_do(backends, monkeypatch, name):
    """Formats that vLLM's kernels do not read from slots; three slots for six experts, so that rows come in waves."""
    answers = {}
    for kind in (PointerExecution, TableExecution):
        tensors, layer = taken(name)
        execution = served(layer, 3, kind)
        x, weights, ids = rows()
        answers[kind] = layer.forward_modular(x, weights, ids)
        if kind is TableExecution:  # what the CPU computes of them
            act = "swigluoai" if name == "gpt-oss" else "silu"
            share = Looped(execution.shape, 1, act).run(x, weights, ids, execution.store.layer(0))
            off = (share - answers[kind].float()).abs().max() / share.abs().max()
            assert off < 2**-6, "sums of bfloat16 numbers, and of float32 ones"
        layer.spac.runtime.close()
    pointers, table = answers[PointerExecution].float(), answers[TableExecution].float()
    assert pointers.any() and (pointers - table).abs().max() / pointers.abs().max() < 2**-6, "sums in another order"


def test_a_bias_that_the_model_does_not_have_is_not_left_out(backends):
    layer = build_packed("gptq int4, Marlin")
    stand_in(layer)
    tensors = checkpoint(GPTQ)
    with pytest.raises(UnsupportedError, match="cannot add .*w13_bias .* add --quantization moe_wna16"):
        load(layer, tensors, ["0.gate_proj.bias"])
    load(layer, {"0.gate_proj.bias": torch.zeros(INNER)}, ["0.gate_proj.bias"])


@pytest.mark.parametrize("name", ["modelopt nvfp4", "compressed nvfp4, W4A4"])
def test_nvfp4_where_vllm_would_quantise_activations(backends, monkeypatch, name):
    """Another computation than ours, which is that of Marlin: on GPUs since sm_100."""
    nvfp4_backend("VLLM_CUTLASS", monkeypatch)
    with pytest.raises(UnsupportedError, match="NVFP4 whose activations VLLM_CUTLASS quantises.*--moe-backend marlin"):
        build(PACKED[name], **POINTERS)
    build(PACKED["compressed nvfp4"], **POINTERS)


def test_what_pointers_cannot_read_is_refused(backends):
    tensor = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    with pytest.raises(UnsupportedError, match="our kernels cannot read FP8 with one scale per tensor of .*MXFP4"):
        build(tensor, **POINTERS)


def test_slots_name_the_execution_that_can(backends):
    with pytest.raises(UnsupportedError, match="W8A8Int8MoEMethod.* in slots; .*use --spac-plane pointers"):
        build(PACKED["compressed int8, channels"])


ONLY_PACKED = {"compressed int8, channels", "gpt-oss", "compressed nvfp4", "compressed nvfp4, W4A4", "modelopt nvfp4"}


@pytest.mark.parametrize("name", [name for name in PACKED if name != "awq int4"])  # which has no zero points: refused
def test_inspect_counts_the_bytes_of_a_packed_slot(backends, name, tmp_path):
    """Of what our kernels read; scales of blocks are padded to four rows, which are fewer here and in no model."""
    facts = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    (tmp_path / "config.json").write_text(json.dumps(facts | {"quantization_config": PACKED[name]}))
    tensors = published(name)
    if name == "gpt-oss":  # all experts of a layer in one tensor
        lasts = {n.partition(".")[2] for n in tensors}
        tensors = {
            last.replace(".", "_"): torch.stack([tensors[f"{e}.{last}"] for e in range(EXPERTS)]) for last in lasts
        }
    save_file({f"model.layers.0.mlp.experts.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    found, layer = headers.read_checkpoint(tmp_path, FormatKernels.OURS), build_packed(name)
    stand_in(layer)
    (counted,), stored = found.expert_bytes, sum(spec.nbytes for spec in layer.probe().values())
    assert counted == stored or ("blocks" in name and counted < stored < counted + 2 * 4 * 4 * 2)
    assert quantised.refusal(found.quantisation, FormatKernels.OURS) is None
    named = "nvfp4" in name or "fp8" in name or name == "gpt-oss"  # where vLLM's own choice may build other layers
    marlin = ("--moe-backend marlin",) if named else ()
    assert quantised.flags(found.quantisation, FormatKernels.OURS) == ("--spac-plane pointers", *marlin)
    newer = ("--moe-backend triton",) if "fp8" in name else marlin
    assert quantised.flags(found.quantisation, FormatKernels.OURS, (9, 0)) == ("--spac-plane pointers", *newer)
    assert quantised.only_ours(found.quantisation) == (name in ONLY_PACKED)
    if name in ONLY_PACKED:
        assert headers.read_checkpoint(tmp_path) == found


def test_sizes_that_vllm_rounds_up(backends, monkeypatch):
    """As Marlin does: a layer is packed when the real part has arrived, and the rest is zero."""
    monkeypatch.setitem(globals(), "HIDDEN", 192)
    monkeypatch.setitem(globals(), "INNER", 96)
    tensors, layer = taken("gpt-oss")
    assert layer._staged["w13_weight"].shape == (EXPERTS, 256, 128), "192 became 256, and 96 128"
    execution = served(layer, 3)
    x, weights, ids = rows()
    x = torch.nn.functional.pad(x, (0, 64))
    out = layer.forward_modular(x, weights, ids)
    plain = tables_of("gpt-oss", tensors)
    tables = {kind: torch.tensor([part.data_ptr() for part in parts]) for kind, parts in plain.items()}
    expected = grouped_gemm(
        x[:, :192].contiguous(), tables["w13"], tables["w2"], weights, ids, 96, tables["b13"], tables["b2"], "swigluoai"
    )
    torch.testing.assert_close(out[:, :192], expected, rtol=2**-7, atol=1e-3)
    assert not out[:, 192:].any() and execution.shape.packed is not None
    layer.spac.runtime.close()
