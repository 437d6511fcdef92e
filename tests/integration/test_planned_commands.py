"""``vllm-spac plan`` prints commands that the engine accepts without a warning, on each machine and for each format.

Each command goes through vLLM's parser, the plugin's checks of the arguments and of the engine, and vLLM's own choice
of a MoE kernel, on a platform that claims to be the machine's GPU. No weight is read and nothing is computed.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_configs import qwen3_moe

from vllm_spac.decisions.costs import Capacity, Costs, names
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.storage.checkpoint.quantisation import Capability
from vllm_spac.system.machine import Machine
from vllm_spac.tools.planning import planned_machine as machines
from vllm_spac.tools.planning import planned_routing
from vllm_spac.tools.planning import planned_serving as plans
from vllm_spac.tools.planning.planned_machine import HERE, UTILIZATION, PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load, slot_bytes
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_serving import ServingPlan, make_plan
from vllm_spac.tools.planning.predict import Prediction

GIB, MIB = 1 << 30, 1 << 20
LAYERS = 16
QWEN = qwen3_moe(
    hidden_size=4096,
    intermediate_size=4096,
    moe_intermediate_size=1536,
    num_hidden_layers=LAYERS,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    vocab_size=1024,
    max_position_embeddings=8192,
)
OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "dtype": "bfloat16",
}
MIXED = {  # of ModelOpt, as nvidia publishes Qwen3.6-35B-A3B
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.{part}": entry
        for layer in range(LAYERS)
        for part, entry in (
            ("mlp.experts", {"quant_algo": "W4A16_NVFP4", "group_size": 16}),
            ("self_attn.o_proj", {"quant_algo": "FP8"}),
        )
    },
    "ignore": ["lm_head"],
}
FORMATS: dict[str, tuple[dict, dict | None]] = {
    "bf16": (QWEN, None),
    "FP8": (QWEN, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "GPTQ": (QWEN, {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}),
    "AWQ": (QWEN, {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}),
    "MXFP4": (OSS, {"quant_method": "mxfp4"}),
    "NVFP4": (QWEN, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head"]}),
    "NVFP4 beside FP8": (QWEN, MIXED),
}
GPUS = [name for name in names() if (capacity := Costs.read(name).capacity) is not None and capacity.gpu]
AMX, NO_AMX = "here, a CPU with AMX", "here, a CPU without AMX"
# A machine's own fast memory, little, and so little that not one percent of the slots fits; host memory for all
# experts, for some, and for none.
TINY = 1
MEMORIES = [(fast, host) for fast in (None, 12 * GIB) for host in (1024 * GIB, 9 * GIB, GIB)] + [(TINY, 1024 * GIB)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is predicted: the commands of all choices are checked, not only that of the best."""
    monkeypatch.setenv("VLLM_PLUGINS", "spac")
    monkeypatch.setattr(machines, "_free", lambda folder: 1 << 40)
    monkeypatch.setattr(plans, "predict", lambda *_: Prediction("low", 1.0, 1.0, "compute"))
    monkeypatch.setattr(plans, "first_token", lambda *_: (1.0, 1.0))


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plugin's warnings, whatever handlers loggers have: vLLM configures them again while it is imported."""
    found: list[str] = []
    handle = logging.Logger.handle

    def seen(self: logging.Logger, record: logging.LogRecord) -> None:
        if self.name.startswith("vllm.spac") and record.levelno >= logging.WARNING:
            found.append(record.getMessage())
        handle(self, record)

    monkeypatch.setattr(logging.Logger, "handle", seen)
    return found


@cache
def served(model: Path, on_cpu: bool, capability: Capability | None, amx: bool) -> list[ServedModel]:
    """As an engine may choose by itself, and with our kernel where the host decides."""
    named = find_model(str(model))
    found = list(ServedModel.ways(named, on_cpu=on_cpu, capability=capability, amx=amx))
    if not on_cpu and "table" not in (way.execution for way in found):
        found += ServedModel.ways(named, "table", on_cpu=on_cpu, capability=capability)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, (config, quantised) in FORMATS.items():
        found[name] = tmp_path_factory.mktemp(name)
        whole = config if quantised is None else config | {"quantization_config": quantised}
        (found[name] / "config.json").write_text(json.dumps(whole))
    return found


def here(folder: Path) -> None:
    """Writes the profile of this machine as one without a GPU that was measured."""
    known = Costs.read("rtx4090")
    origin = {"how": "measured", "machine": Machine.here(folder), "store": "disk"}
    changes = {"load": known.disk, "host": known.load, "disk": None, "capacity": Capacity(host=64 * GIB)}
    profile = known.model_copy(update=changes | {"provenance": known.provenance.model_copy(update=origin)})
    (folder / machines.PROFILE).write_text(profile.model_dump_json())


def planned(model: Path, machine: str, memory: tuple[int | None, int], folder: Path, way: int) -> ServingPlan:
    """The plan as the command line makes it, of one of ``served``."""
    fast, host = memory
    if fast == TINY:
        whole = planned(model, machine, (12 * GIB, host), folder, way)
        needed = whole.split.fast - whole.split.room + slot_bytes(whole.model, 0, tokens=2)
        fast = int(needed / UTILIZATION) + MIB
    if not machine.startswith(HERE):
        found = PlannedMachine.of(machine, fast, host)
    else:
        found = PlannedMachine.of(HERE, None, host if fast is None else fast, folder)
    ways = served(model, not found.gpu, found.capability, found.amx)
    return make_plan(ways[way % len(ways)], found, Load(2048, 1), (planned_routing.LOW,))


def printed(model: Path, machine: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[str], list[str]]:
    """The commands of all choices, of those that differ in numbers of bytes only one, and what has no plan."""
    monkeypatch.setattr(machines, "has_amx", lambda: machine == AMX)
    monkeypatch.setattr(Machine, "differences", lambda self, other: [])  # a GPU of this machine does not matter
    here(folder)
    found, refused = {}, []
    for memory, way in itertools.product(MEMORIES, range(3)):
        try:
            plan = planned(model, machine, memory, folder, way)
        except (ConfigError, UnsupportedError) as error:
            refused.append(str(error))
            continue
        for row in plan.rows:
            line = row.command
            if row.choice.store == "none" and plan.model.stock:
                assert not re.search("spac|moe|quantization", line.partition(plan.model.name)[2]), "stock's own choice"
                continue
            found[re.sub(r"(memory\S*|slots) \d+", r"\1 N", line)] = line
    return set(found.values()), refused


@contextmanager
def claimed(capability: Capability | None, v2: bool = True, amx: bool = True) -> Iterator[None]:
    """The plugin's checks see a GPU of this capability; None: a CPU with or without AMX, whatever is there."""
    from vllm import platforms

    from vllm_spac.integration.hooks import device, drafts

    with pytest.MonkeyPatch.context() as patch:
        if capability is None:
            patch.setattr(device, "runs_quantised_experts", lambda: amx)
        else:
            facts = device.DeviceFacts("a GPU", True, capability, pinned=True, unified=True)
            patch.setattr(type(platforms.current_platform), "is_cpu", lambda self: False)
            patch.setattr(device, "query", lambda: facts)
            patch.setattr(drafts, "plans_drafts", lambda config: v2)
        yield


class Started:
    """A command that vLLM's parser has taken, with the plugin's checks before a worker starts, which depend on a GPU.

    Attributes:
        config: vLLM's configuration.
    """

    def __init__(self, line: str) -> None:
        self._checks: list[tuple[Callable, tuple]] = []
        self.config, self._line = self._parse(line), line

    def check(self, capability: Capability | None, amx: bool = True) -> None:
        """Runs the checks on that GPU, with both runners of vLLM; None: on a CPU. No weights are there."""
        from vllm_spac.integration import preflight

        for v2 in (True, False):
            with claimed(capability, v2, amx), pytest.MonkeyPatch.context() as patch:
                patch.setattr(preflight, "check_weights", lambda vllm_config: None)
                for function, arguments in self._checks:
                    function(*arguments)
        if (
            capability is not None or "--spac-plane table" not in self._line
        ):  # on a CPU that is where vLLM has no kernel
            check_kernel(self.config, capability)

    def _parse(self, line: str) -> Any:
        from vllm import platforms
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms.interface import DeviceCapability
        from vllm.plugins import load_general_plugins
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from vllm_spac.integration import gpu_defaults, preflight
        from vllm_spac.integration.hooks import graphs

        load_general_plugins()
        serve, word, model, *options = shlex.split(line)
        assert (serve, word) == ("vllm", "serve")
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = parser.parse_args(["--model", model, "--skip-tokenizer-init", *options])
        with pytest.MonkeyPatch.context() as patch:
            # AWQ for Triton is for GPUs: here vLLM is told of one of the oldest that the plugin serves on.
            any_gpu, platform = classmethod(lambda cls, device_id=0: DeviceCapability(8, 0)), platforms.current_platform
            patch.setattr(type(platform), "get_device_capability", any_gpu)
            # What is for a GPU or for AMX is parsed on this CPU, which would get another plane.
            patch.setattr(gpu_defaults, "_on_a_cpu", lambda engine_args, config: config)
            for module, name in ((graphs, "request"), (preflight, "check_engine")):
                patch.setattr(module, name, partial(self._keep, getattr(module, name)))
            return EngineArgs.from_cli_args(args).create_engine_config()

    def _keep(self, check: Callable, *arguments: Any) -> None:
        self._checks.append((check, arguments))


# -- vLLM's choice of a kernel --


@contextmanager
def choosing(config: Any, capability: Capability | None) -> Iterator[None]:
    """vLLM chooses kernels as on a GPU of this capability with all libraries that its wheel brings."""
    import vllm.utils.flashinfer
    from vllm import platforms
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    platform, module = platforms.current_platform, "vllm.model_executor.layers.fused_moe.experts"
    get_quantization_config("fp8")  # imports all methods, while this is a CPU
    kernels = ("flashinfer_cutlass", "trtllm_bf16", "trtllm_fp8", "trtllm_mxfp4", "trtllm_nvfp4", "deep_gemm")
    for name in (*kernels, "triton_deep_gemm", "cutlass", "gpt_oss_triton_kernels", "marlin"):
        __import__(f"{module}.{name}_moe")
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(config):
        if capability is None:
            patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
        else:
            found = DeviceCapability(*capability)
            patch.setattr(platform, "_enum", PlatformEnum.CUDA)
            patch.setattr(type(platform), "get_device_capability", classmethod(lambda cls, device_id=0: found))
            patch.setattr(type(platform), "supports_fp8", classmethod(lambda cls: capability >= (8, 9)))
            there = {name: True for name in dir(vllm.utils.flashinfer) if name.startswith("has_flashinfer")}
            there |= {"has_deep_gemm": True, "is_deep_gemm_supported": capability >= (9, 0), "has_triton_kernels": True}
            there |= {"cutlass_group_gemm_supported": (9, 0) <= capability < (12, 0)}
            for name, value in there.items():
                _everywhere(patch, name, lambda *args, value=value, **options: value)
        yield


def _everywhere(patch: pytest.MonkeyPatch, name: str, function: Callable) -> None:
    for module in [found for key, found in sys.modules.items() if key.startswith("vllm.")]:
        if hasattr(module, name):
            patch.setattr(module, name, function)


def built(config: Any) -> Any:
    """A MoE layer with the quant method, and so the kernel, that vLLM chooses; its parameters are tiny."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization import get_quantization_config

    from vllm_spac.integration.layers.quant_schemes import SCHEMES

    model, oss = config.model_config, config.model_config.hf_config.model_type == "gpt_oss"
    hf, experts = model.hf_config, model.get_num_experts()
    moe = FusedMoEConfig(
        num_experts=experts,
        experts_per_token=model.get_num_experts_per_tok(),
        hidden_dim=hf.hidden_size,
        intermediate_size=hf.intermediate_size if oss else hf.moe_intermediate_size,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=MoEActivation.SWIGLUOAI if oss else MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
        moe_backend=config.kernel_config.moe_backend,
        has_bias=oss,
    )
    layer = object.__new__(RoutedExperts)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.moe_config, layer.activation = "model.layers.0.mlp.experts", moe, moe.activation
    if model.quantization is None:
        method: Any = UnquantizedFusedMoEMethod(moe)
    else:
        quantised = hf.quantization_config
        method = get_quantization_config(model.quantization).from_config(dict(quantised))
        method = method.get_quant_method(layer, layer.layer_name)
    layer.quant_method = method
    for name in (f"{which}_{kind}" for which in ("w13", "w2") for kind in SCHEMES[type(method).__name__].tensors):
        layer.register_parameter(name, torch.nn.Parameter(torch.zeros(2, 8, 8), requires_grad=False))
    return layer


def check_kernel(config: Any, capability: Capability | None) -> None:
    """Takes the layer that vLLM would build through the plugin's checks of layers."""
    from vllm_spac.config.config import config_of
    from vllm_spac.integration.layers import quant_schemes
    from vllm_spac.integration.layers.staged_experts import StagedExperts

    spac = config_of(config.additional_config)
    assert spac is not None
    with choosing(config, capability):
        layer = built(config)
        packed = spac.execution_class.layout == "plain" and quant_schemes.is_quantised(layer)
        quant_schemes.expert_tensors(layer, packed)
        facts = dict.fromkeys(("swiglu_limit", "swiglu_alpha", "swiglu_beta")) | {"apply_router_weight_on_input": False}
        facts |= {"spac_packing": packed or None, "layer_name": layer.layer_name, "activation": layer.activation}
        host = SimpleNamespace(execution=spac.execution_class, config=spac)
        quantised = type(layer.quant_method).__name__ if quant_schemes.is_quantised(layer) else None
        StagedExperts._check(SimpleNamespace(spac=host, **facts), quantised)


# -- the tests --


@pytest.mark.parametrize("kind", FORMATS)
def test_every_printed_command_is_accepted(kind, folders, tmp_path, monkeypatch, warnings) -> None:
    """On every machine with a profile, and on a CPU: by the engine and by vLLM's kernels, without a warning."""
    seen: set[tuple] = set()
    started: dict[str, Started] = {}
    for machine in (*GPUS, AMX):
        capacity = Costs.read(machine).capacity if machine != AMX else None
        lines, refused = printed(folders[kind], machine, tmp_path, monkeypatch)
        if not lines:
            assert machine == AMX and kind.startswith("NVFP4"), refused
            assert all("vLLM has no kernel for a CPU" in text for text in refused)
        capability = capacity and capacity.capability
        for line in sorted(lines):
            options = re.sub(r"\d+", "", line.partition("--plugin")[2])
            if (capability, options) in seen:
                continue  # another machine with such a GPU, or another number
            seen.add((capability, options))
            if options not in started:
                started[options] = Started(line)
            started[options].check(capability)
            assert warnings == [], f"{machine}: {line}"
    print(f"{len(seen)} commands")
    assert len(seen) > len(GPUS), "experts in host memory and on a disk, with and without drafts"
    assert any("--spac-plane table" in options for _, options in seen)


def test_a_cpu_without_amx_serves_quantised_experts_from_the_table(folders, tmp_path, monkeypatch) -> None:
    for kind, folder in folders.items():
        lines, _ = printed(folder, NO_AMX, tmp_path, monkeypatch)
        assert lines, kind
        for line in lines:
            assert ("--spac-plane table" in line) == (kind != "bf16"), line
            assert "--moe-backend" not in line, line
            Started(line).check(None, amx=False)


def test_what_is_not_printed_is_refused(folders, tmp_path, monkeypatch) -> None:
    """What this file would miss if its platform let everything pass: the commands of before these checks."""
    base = "--plugin spac --spac-slots 25% --spac-store host --max-model-len 2048 --max-num-seqs 1"
    for kind, capability, options, said in (
        (
            "GPTQ",
            (8, 9),
            "--quantization moe_wna16 --moe-backend triton --spac-cpu-experts auto",
            "--spac-plane table",
        ),
        ("bf16", (12, 0), "", "add --moe-backend triton"),
        ("FP8", (8, 6), "--moe-backend triton", "use --spac-plane table"),
        ("MXFP4", (9, 0), "--spac-plane pointers", "add --moe-backend marlin"),
    ):
        with pytest.raises((SystemExit, UnsupportedError), match=said):
            Started(f"vllm serve {folders[kind]} {base} {options}").check(capability)


def test_slots_are_multiples_of_top_k_where_no_percent_fits(folders, tmp_path, monkeypatch) -> None:
    lines, _ = printed(folders["bf16"], "rtx4090", tmp_path, monkeypatch)
    assert any(re.search(r"--spac-slots \d+k ", line) for line in lines)
    assert any(re.search(r"--spac-slots \d+% ", line) for line in lines)
