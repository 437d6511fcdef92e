"""What an engine on a GPU gets where its user named nothing: who decides, what computes, and vLLM's options for it.

With ``decisions=host`` every layer waits for the host, which then launches vLLM's kernels one by one. On an H100 that
took 13 ms per token of a model of 6 layers, of which the bytes take 4; with ``decisions=device`` it took 3.7, and 5.6
with CPU experts. So that is the default, unless our kernel does not compute the model, or another knob needs the host.
Then formats that vLLM's kernel does not read from slots get ``kernel=table``, our kernel over slots.

vLLM's own choice of MoE backend depends on the GPU, and on some it is one that finds no slots, or builds no layer that
our kernels read. So the options of ``quantisation.flags`` are set, as a plan prints them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm_spac import components
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO, ONLY_OURS_ON_A_GPU, ROUNDED_ON_A_GPU
from vllm_spac.errors import ConfigError, printable
from vllm_spac.execution.address_table import ACTIVATIONS, ALIGNMENT
from vllm_spac.integration.hooks import device
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.integration.hooks.device import DeviceFacts

logger = logging.getLogger("vllm.spac")

_CAPABILITY = (8, 0)  # from which the kernels were compiled
_WEIGHS_INPUT = ("Llama4",)  # architectures whose router weights multiply the input
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}  # names of transformers


def apply(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    """Returns the configuration with kernel and decisions, and adds it and vLLM's options to ``engine_args``.

    One line of the log says what was set, and why.
    """
    if device.is_cpu():
        return config
    model = engine_args.create_model_config()
    entry = quant_config.of(model.hf_config.to_dict())
    facts = device.query()
    planes = {} if config.has_workers else _planes(engine_args, config, model, entry, facts)
    if planes:
        spac = {**engine_args.additional_config["spac"], **{name: value for name, (value, _) in planes.items()}}
        engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
        config = SpacConfig.parse(spac)
    said = [f"{name}={value}{why and f': {why}'}" for name, (value, why) in planes.items()]
    said += _set_kernels(engine_args, config, model, entry, facts)
    if said:
        logger.info("%s", printable(f"spac: {'; '.join(said)}"))
    return config


def _set_kernels(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> Iterator[str]:
    """Sets ``--moe-backend`` and ``--quantization`` where neither the user nor the checkpoint decides them.

    Yields what was set, and why.
    """
    if entry is None and model.quantization is not None:
        return  # quantised while it is loaded, which is refused
    ours = config.execution_class.layout == "plain"
    kernels = FormatKernels.OURS if ours else FormatKernels.GPU
    options = quantisation.flags(entry, kernels, None if facts is None else facts.capability)
    wanted = dict(option.split() for option in options)
    named = {engine_args.moe_backend, engine_args.kernel_config.moe_backend} - {AUTO}
    if (backend := wanted.get("--moe-backend")) is not None and not named:
        engine_args.moe_backend = cast("Any", backend)
        yield f"--moe-backend {backend}: vLLM's own choice for a GPU may be a kernel that finds no slots"
    if (loader := wanted.get("--quantization")) is not None and engine_args.quantization is None:
        engine_args.quantization = loader
        yield f"--quantization {loader}, which keeps experts as slots need them"


def _planes(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> dict[str, tuple[str, str]]:
    """Returns the knobs that are left to the plugin, each with its value and, where there is a choice, the reason."""
    found: dict[str, tuple[str, str]] = {}
    decided = config.decided_on
    only_ours = facts is not None and quantisation.only_ours(entry, facts.capability)
    if decided == AUTO:
        reason = _of_engine(engine_args, config) or reason_for_host(model, entry, facts)
        decided = "device" if reason is None else "host"
        why = reason or f"no layer waits for the host; {ONLY_OURS_ON_A_GPU if only_ours else ROUNDED_ON_A_GPU}"
        found["decisions"] = decided, why
    if config.kernel == AUTO:
        on_device = decided == "device"
        why = "vLLM's kernel for these experts reads no slots, and ours does" if only_ours and not on_device else ""
        found["kernel"] = "table" if on_device or only_ours else "vllm", why
    return found


def _of_engine(engine_args: EngineArgs, config: SpacConfig) -> str | None:
    if config.kernel == "vllm":
        return "vLLM's kernel reads experts in slots (--spac-kernel vllm)"
    if config.parsed_slots.share == 1:
        return "each expert has a slot, and vLLM's own kernel runs"
    if config.votes_alpha is not None:
        return "with decisions=device, votes=path (--spac-budget) ran on a GPU without CUDA graphs only"
    given = engine_args.additional_config["spac"]
    try:
        other = SpacConfig.parse({**given, "decisions": "device"})
    except ConfigError as error:
        return str(error).removeprefix("spac: ")
    if other.store_on("cuda") != config.store_on("cuda"):
        return f"experts are in store={config.store_on('cuda')}"
    if not _ran_on_device(config.prefetch):
        return f"prefetch={config.prefetch} (--spac-prefetch) ran on no GPU with decisions=device"
    return None


def _ran_on_device(prefetch: str) -> bool:
    """Whether reads ahead by this predictor gave stock's tokens on a GPU where the device decides, in CUDA graphs."""
    name, _, _ = prefetch.partition("@")
    return name == "off" or components.find("predictors", prefetch).on_device


def reason_for_host(model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None) -> str | None:
    """Returns why the host of an engine with a GPU decides; None if the device can.

    That experts are quantised is no reason. With INT4 and INT8 by group rows stay as they are. With FP8 our kernel and
    vLLM's round them by the same operations: with scales by channel they gave the same bits on an H100. By block half
    of the rows did, and what moved the others, found by reading vLLM's machine code, is the same since.

    Args:
        entry: how the checkpoint's experts are quantised; None: not at all.
    """
    if facts is None or not (facts.cuda and facts.pinned and facts.unified):
        return "this device does not read host memory in place"
    if facts.capability < _CAPABILITY:
        return f"our kernel needs compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if model.quantization is not None:
        if entry is None:
            return "experts are quantised while they are loaded"
        if quantisation.only_ours(entry, facts.capability):
            return None  # no slots can hold them
    text = model.hf_text_config
    name = str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None))
    if _ACTIVATIONS.get(name, name) not in ACTIVATIONS:
        return f"our kernel does not compute the activation {name}"
    if any(architecture.startswith(_WEIGHS_INPUT) for architecture in model.architectures):
        return "our kernel weighs outputs, and this model weighs inputs"
    widths = [getattr(text, each, None) for each in ("moe_intermediate_size", "intermediate_size")]
    odd = [width for width in (model.get_hidden_size(), *widths) if width and width * model.dtype.itemsize % ALIGNMENT]
    if odd:
        return f"rows of {odd[0]} weights are no multiple of {ALIGNMENT} bytes"
    return None
