"""Runs vLLM's own choice of MoE kernels for GPUs that are not there, alone and with the options that the plugin sets.

    python tests/upstream/selection.py FOLDER VERSION

FOLDER has the Python sources of that vLLM for CUDA, of ``wheels``, which are imported in place of the installed ones.
Prints ``Choice``s as JSON. Stubbed is what is not vLLM's Python: its compiled extensions, the GPU, and the packages
that it looks for. Layers are built on the CPU, and compute nothing.

Compiled code would say which capabilities CUTLASS kernels were built for; ``_BUILT_FOR`` assumes it. Marlin is among
vLLM's extensions and never looked for, so that there is no choice without it.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
import types
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

STOCK = "stock"
CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
KNOBS: dict[str, dict[str, str]] = {
    "default": {"slots": "25%"},  # else a GPU that holds the model serves it as stock vLLM does
    "plane=table": {"plane": "table"},
    "plane=slots": {"plane": "slots"},
}
_EXTENSIONS = ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C")
# What a wheel of vLLM brings, or asks for; of what is imported without a GPU, stand-ins.
_PACKAGES = {"flashinfer", "humming", "cutlass", "vllm.third_party.deep_gemm", "vllm.third_party.triton_kernels"}
_STANDINS = ("flashinfer", "humming")
_BUILT_FOR = {
    "cutlass_scaled_mm_supports_fp8": 89,
    "cutlass_scaled_mm_supports_block_fp8": 90,
    "cutlass_scaled_mm_supports_fp4": 100,
    "cutlass_group_gemm_supported": 90,
    "mxfp4_experts_quant_supported": 100,
}


@dataclass(frozen=True)
class Choice:
    """What an engine gets.

    Attributes:
        format, capability: of the experts, and of the GPU.
        packages: whether the optional ones are installed.
        asked: a key of ``KNOBS``, or ``STOCK``.
        options: what the plugin set: its own and vLLM's.
        layout: kernel, if vLLM's kernel reads slots; plain, if ours reads the experts.
        method, kernel: classes of vLLM; empty if the plugin refused before.
        rounds: whether our kernel rounds rows to FP8, as the kernel does that it stands for.
        refused: what the plugin says before a model is loaded; empty if it does not.
        failed: what vLLM or the plugin says when a layer is built, or warmed up as our kernel reads it; empty if they
            do not.
        instead: an option that ``refused`` names and with which the engine starts.
    """

    format: str
    capability: tuple[int, int]
    packages: bool
    asked: str = STOCK
    options: tuple[str, ...] = ()
    layout: str = ""
    method: str = ""
    kernel: str = ""
    rounds: bool = False
    refused: str = ""
    failed: str = ""
    instead: str = ""


class _Gpu:
    """What the stubs answer."""

    capability: tuple[int, int] | None = None
    packages = False


class _Packages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins for optional packages where they are to be there: bodies of vLLM's classes name theirs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        found = _Gpu.packages and name.partition(".")[0] in _STANDINS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        names = ("INDEXED", "GROUPED_CONTIGUOUS", "GROUPED_MASKED")  # of Humming's, by which vLLM chooses one
        kinds = Enum("GemmType", {name: name.lower() for name in names})
        return MagicMock(__path__=[], GemmType=kinds, DeviceInfo=type("DeviceInfo", (), {}))  # 0.32 patches the class

    def exec_module(self, module: Any) -> None:
        pass


def _stub(folder: str, version: str) -> None:
    """Makes vLLM importable from ``folder`` as if there were a GPU, and imports what it chooses with."""
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", VLLM_PLUGINS="")
    os.environ["VLLM_CACHE_ROOT"] = str(Path(folder, "cache"))
    sys.path[:0] = [folder, str(Path(__file__).resolve().parents[2])]
    sys.meta_path.insert(0, _Packages())
    for name in (f"vllm.{extension}" for extension in _EXTENSIONS):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    installed = importlib.metadata.version  # says cpu, for which vLLM switches Triton off
    importlib.metadata.version = lambda name: version if name == "vllm" else installed(name)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Stub(NonNvmlCudaPlatform):
        get_device_name = classmethod(lambda cls, device_id=0: "a stub")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        num_compute_units = classmethod(lambda cls, device_id=0: 108)

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
            return None if _Gpu.capability is None else DeviceCapability(*_Gpu.capability)

    vllm.platforms._current_platform = Stub()
    import vllm._custom_ops as ops
    from vllm.utils import flashinfer, import_utils

    assert Path(str(ops.__file__)).is_relative_to(folder)
    for name, least in _BUILT_FOR.items():
        setattr(ops, name, lambda capability, least=least: capability >= least)
    for name in dir(flashinfer):
        if name.startswith("has_flashinfer"):
            setattr(flashinfer, name, lambda *_: _Gpu.packages)
    import_utils._has_module = lambda name: _Gpu.packages and name in _PACKAGES
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import oracle
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.models import gpt_oss, qwen3_moe, registry  # noqa: F401

    parallel_state._TP = types.SimpleNamespace(world_size=1, rank_in_group=0)
    registry._run_in_subprocess = lambda function: function()  # which would import the installed vLLM
    for found in pkgutil.iter_modules(oracle.__path__, f"{oracle.__name__}."):
        importlib.import_module(found.name)
    for name in ("fp8", "compressed-tensors", "auto_gptq", "auto_awq", "moe_wna16", "gpt_oss_mxfp4", "modelopt_fp4"):
        get_quantization_config(name)
    import vllm_spac.integration.layers.packed_experts
    import vllm_spac.integration.preflight  # noqa: F401


def _formats() -> dict[str, dict[str, Any]]:
    """Returns ``config.json`` by format: those of published checkpoints, with sizes of their models but few experts."""
    from quantised_checkpoints import PUBLISHED, _compressed

    shared = {"num_hidden_layers": 2, "num_attention_heads": 32, "vocab_size": 512, "max_position_embeddings": 1024}
    shared |= {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    qwen = shared | PUBLISHED["Qwen3-30B-A3B-FP8"].config | {"hidden_size": 2048, "moe_intermediate_size": 768}
    gpt_oss = shared | PUBLISHED["gpt-oss-20b"].config | {"hidden_size": 2880, "intermediate_size": 2880}
    scales = {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}
    of_rows = scales | {"dynamic": True, "strategy": "token"}
    found = {
        "bf16": None,
        "fp8 by block": PUBLISHED["Qwen3-30B-A3B-FP8"].quantisation,
        "fp8 by channel": _compressed("float-quantized", scales, of_rows, ["lm_head"]),
        "int4 compressed": PUBLISHED["Kimi-K2-Thinking"].quantisation,
        "int4 GPTQ": PUBLISHED["Qwen3-30B-A3B-GPTQ-Int4"].quantisation,
        "int4 AWQ": PUBLISHED["Qwen3-30B-A3B-AWQ"].quantisation,
        "int4 AWQ, no zeros": (PUBLISHED["Qwen3-30B-A3B-AWQ"].quantisation or {}) | {"zero_point": False},
        "mxfp4": PUBLISHED["gpt-oss-20b"].quantisation,
        "nvfp4 ModelOpt": PUBLISHED["Qwen3-30B-A3B-NVFP4 (ModelOpt)"].quantisation,
        "nvfp4 compressed": PUBLISHED["Qwen3-30B-A3B-NVFP4 (compressed-tensors)"].quantisation,
    }
    models = {name: gpt_oss if name == "mxfp4" else qwen for name in found}
    return {name: models[name] | ({"quantization_config": each} if each else {}) for name, each in found.items()}


def _runner(args: Any, model: Any) -> Any:
    """Returns the layer that vLLM builds for a model, as its model's class asks for it."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    config, is_gpt_oss = model.hf_config, model.hf_config.model_type == "gpt_oss"
    sizes = (config.num_local_experts, config.num_experts_per_tok, config.hidden_size, config.intermediate_size)
    if not is_gpt_oss:
        sizes = (config.num_experts, *sizes[1:3], config.moe_intermediate_size)
    beside = {"activation": "swigluoai", "has_bias": True} if is_gpt_oss else {}
    quantised = VllmConfig._get_quantization_config(model, LoadConfig())
    engine = VllmConfig(kernel_config=replace(args.kernel_config, moe_backend=args.moe_backend))
    engine.model_config = model
    alone = dict.fromkeys(("tp_size", "dp_size", "pcp_size"), 1)
    beside |= {"prefix": "model.layers.0.mlp.experts", "renormalize": True, "quant_config": quantised}
    with set_current_vllm_config(engine), torch.device("cpu"):
        return FusedMoEFactory(*sizes, params_dtype=torch.bfloat16, **alone, **beside)


def _take(layer: Any, layout: str) -> bool:
    """Does what the plugin does with a layer at first; returns whether our kernel rounds its rows to FP8."""
    import torch

    from vllm_spac.integration.layers import quant_schemes
    from vllm_spac.integration.layers.packed_experts import WeightPacking, remove_scales

    packing = WeightPacking.of(layer) if quant_schemes.is_quantised(layer) and layout == "plain" else None
    staged = quant_schemes.expert_tensors(layer, packing is not None)
    if packing is None:
        assert layout == "kernel" or quant_schemes.is_plain(layer), "our kernel does not read this layer"
        return False
    packing({name: torch.ones_like(param.data[:1]) for name, param in staged.items()})
    remove_scales(layer.quant_method)
    for param in staged.values():
        param.data = param.data.new_empty(0)
    return getattr(packing.kind, "activations", None) is not None


def _warm_up(runner: Any) -> None:
    """Asks for what vLLM's warm-up of DeepGEMM, before the first request, asks every MoE layer. It computes nothing."""
    import torch
    from vllm.model_executor.warmup import deep_gemm_warmup

    deep_gemm_warmup.get_mk_alignment_for_contiguous_layout = lambda: [128, 128]  # compiled code says so
    assert isinstance(runner, deep_gemm_warmup.MoERunner), "the warm-up asks nothing"
    deep_gemm_warmup._count_warmup_iterations(torch.nn.Sequential(runner), 8192)


def _choice(found: Choice, folder: str, knobs: dict[str, str] | None, named: dict[str, str]) -> Choice:
    """Returns what an engine gets with these knobs (None: without the plugin) and these options of vLLM."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.config.config import SpacConfig
    from vllm_spac.errors import SpacError
    from vllm_spac.integration import gpu_defaults, preflight, store_choice

    store_choice.available_host_bytes = lambda: 1 << 50  # of any machine
    args, model = EngineArgs(model=folder, skip_tokenizer_init=True, **named), None
    if knobs is not None:
        args.additional_config = {"spac": knobs}
        try:
            config = gpu_defaults.apply(args, SpacConfig.parse(knobs))
            assert config is not None, "not a command's"
            preflight._check_quantisation(model := args.create_model_config(), config)
        except SpacError as error:
            return replace(found, refused=str(error))
        chosen = args.additional_config["spac"].items() - knobs.items()
        set_ = {"quantization": args.quantization, "moe-backend": args.moe_backend}
        options = [f"--spac-{name} {value}" for name, value in sorted(chosen)]
        options += [f"--{name} {value}" for name, value in set_.items() if value not in (None, "auto")]
        found = replace(found, options=tuple(options), layout=config.execution_class.layout)
    try:
        runner = _runner(args, model or args.create_model_config())
        method = runner.routed_experts.quant_method
        found = replace(found, method=type(method).__name__, kernel=method.experts_cls.__name__)
        if knobs is None:
            return found
        found = replace(found, rounds=_take(runner.routed_experts, found.layout))
        if found.layout == "plain":  # vLLM's kernel is built from weights, which there are none of here
            _warm_up(runner)
        return found
    except Exception as error:  # whatever it says is the result
        return replace(found, failed=f"{type(error).__name__}: {error}")


def _with_what_it_names(found: Choice, start: Choice, folder: str, knobs: dict[str, str]) -> Choice:
    """Tries each option that a refusal names."""
    for flag, value in re.findall(r"--([\w-]+) (\w+)", found.refused):
        ours, name = flag.startswith("spac-"), flag.removeprefix("spac-").replace("-", "_")
        again = _choice(start, folder, knobs | {name: value} if ours else knobs, {} if ours else {name: value})
        if not (again.refused or again.failed):
            return replace(found, instead=f"--{flag} {value}")
    return found


def _of_gpu(capability: tuple[int, int], packages: bool, folders: dict[str, str]) -> list[Choice]:
    _Gpu.capability, _Gpu.packages = capability, packages
    found = []
    for name, folder in folders.items():
        start = Choice(name, capability, packages)
        found.append(_choice(start, folder, None, {}))
        for asked, knobs in KNOBS.items():
            one = _choice(start := replace(start, asked=asked), folder, knobs, {})
            found.append(_with_what_it_names(one, start, folder, knobs))
    return found


def main() -> None:
    _stub(str(Path(sys.argv[1]).resolve()), sys.argv[2])
    with tempfile.TemporaryDirectory() as place:
        folders = {name: str(Path(place, name.replace(" ", "_"))) for name in _formats()}
        for name, config in _formats().items():
            Path(folders[name]).mkdir()
            Path(folders[name], "config.json").write_text(json.dumps(config))
        gpus = [(capability, packages, folders) for packages in (True, False) for capability in CAPABILITIES]
        # A fork for each: what vLLM remembers of a GPU ends with it.
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            found = [choice for choices in pool.starmap(_of_gpu, gpus, chunksize=1) for choice in choices]
    print(json.dumps([asdict(choice) for choice in found]))


if __name__ == "__main__":
    main()
