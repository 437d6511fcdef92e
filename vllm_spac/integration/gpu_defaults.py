"""What an engine on a GPU gets where its user named nothing: an execution, and vLLM's kernels that go with it.

With ``slots`` every layer waits for the host, which then launches vLLM's kernels one by one. On an H100 that took 13 ms
a token of a model of 6 layers, of which the bytes take 4; ``pointers`` took 3.7. So ``pointers`` is the default, unless
its kernel does not compute the model, or another knob is not for it. Then formats that vLLM's kernel does not read from
slots get ``table``, our kernel over slots.

vLLM's own choice of MoE backend depends on the GPU, and on some it is one that finds no slots, or builds no layer that
our kernels read. So the options of ``quantisation.flags`` are set, as a plan prints them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm_spac.config.config import SpacConfig
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

POINTERS, TABLE = "pointers", "table"
_AUTO = "auto"  # --moe-backend
_CAPABILITY = (8, 0)  # from which the kernels were compiled
_WEIGHS_INPUT = ("Llama4",)  # architectures whose router weights multiply the input
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}  # names of transformers


def apply(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    """Returns the configuration with an execution, and adds it and vLLM's options to ``engine_args``."""
    if config.has_workers or device.is_cpu():
        return config
    model = engine_args.create_model_config()
    entry = quant_config.of(model.hf_config.to_dict())
    facts = device.query()
    config = _with_execution(engine_args, config, model, entry, facts)
    _set_kernels(engine_args, config, model, entry, facts)
    return config


def _set_kernels(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> None:
    """Sets ``--moe-backend`` and ``--quantization`` where neither the user nor the checkpoint decides them."""
    if entry is None and model.quantization is not None:
        return  # quantised while it is loaded, which is refused
    ours = config.execution_class.layout == "plain"
    kernels = FormatKernels.OURS if ours else FormatKernels.GPU
    options = quantisation.flags(entry, kernels, None if facts is None else facts.capability)
    wanted = dict(option.split() for option in options)
    named = {engine_args.moe_backend, engine_args.kernel_config.moe_backend} - {_AUTO}
    if (backend := wanted.get("--moe-backend")) is not None and not named:
        engine_args.moe_backend = cast("Any", backend)
        logger.info("spac: --moe-backend %s: vLLM's own choice for a GPU may be a kernel that finds no slots", backend)
    if (loader := wanted.get("--quantization")) is not None and engine_args.quantization is None:
        engine_args.quantization = loader
        logger.info("spac: --quantization %s, which keeps experts as slots need them", loader)


def _with_execution(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> SpacConfig:
    if "execution" in config.model_fields_set:
        return config
    reason = _of_engine(engine_args, config) or reason_for_slots(model, entry, facts)
    if reason is None:
        name = POINTERS
        logger.info(
            "spac: execution=pointers, the default on a GPU: no layer waits for the host; exact up to rounding "
            "(--spac-execution slots runs vLLM's own kernel, and is slower)"
        )
    elif entry is not None and facts is not None and quantisation.only_ours(entry, facts.capability):
        name = TABLE
        what = "vLLM's kernel for these experts reads no slots, and ours does"
        logger.info("%s", printable(f"spac: execution=table: {reason}; {what}"))
    else:
        logger.info("%s", printable(f"spac: execution=slots: {reason}"))
        return config
    spac = {**engine_args.additional_config["spac"], "execution": name}
    engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
    return SpacConfig.parse(spac)


def _of_engine(engine_args: EngineArgs, config: SpacConfig) -> str | None:
    if config.parsed_slots.share == 1:
        return "each expert has a slot, and vLLM's own kernel runs"
    if engine_args.enable_expert_parallel:
        return "pointers do not divide experts (--enable-expert-parallel)"
    if config.votes_alpha is not None:
        return "pointers count each row as one (--spac-budget-votes)"
    given = engine_args.additional_config["spac"]
    try:
        other = SpacConfig.parse({**given, "execution": POINTERS})
    except ConfigError as error:
        return str(error).removeprefix("spac: ")
    if other.store_on("cuda") != config.store_on("cuda"):
        return f"experts are in store={config.store_on('cuda')}"
    return None


def reason_for_slots(model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None) -> str | None:
    """Returns why an engine with a GPU loads experts into slots for vLLM's kernel; None if pointers serve it.

    Args:
        model: vLLM's.
        entry: how the checkpoint's experts are quantised; None: not at all.
        facts: the GPU's.
    """
    if facts is None or not (facts.cuda and facts.pinned and facts.unified):
        return "this device does not read host memory in place"
    if facts.capability < _CAPABILITY:
        return f"the kernel of pointers needs compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if model.quantization is not None:
        if entry is not None and quantisation.only_ours(entry, facts.capability):
            return None  # no slots can hold them
        if entry is None or not quantisation.computes_as_vllm(entry):
            return "the kernel of pointers was not seen to compute what vLLM's does with these quantised experts"
    text = model.hf_text_config
    name = str(getattr(text, "hidden_act", None) or getattr(text, "hidden_activation", None))
    if _ACTIVATIONS.get(name, name) not in ACTIVATIONS:
        return f"the kernel of pointers does not compute the activation {name}"
    if any(architecture.startswith(_WEIGHS_INPUT) for architecture in model.architectures):
        return "the kernel of pointers weighs outputs, and this model weighs inputs"
    widths = [getattr(text, each, None) for each in ("moe_intermediate_size", "intermediate_size")]
    odd = [width for width in (model.get_hidden_size(), *widths) if width and width * model.dtype.itemsize % ALIGNMENT]
    if odd:
        return f"rows of {odd[0]} weights are no multiple of {ALIGNMENT} bytes"
    return None
