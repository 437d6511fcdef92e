"""Which execution an engine gets whose user named none: on a GPU the one that waits for nobody, where it can serve.

With ``slots`` every layer waits for the host, which then launches vLLM's kernels one by one. On an H100 that took 20 ms
a token of a model of 6 layers, where the bytes took 4.6; ``pointers`` took 3.8. So ``pointers`` is the default, unless
its kernel does not compute the model, another knob is not for it, or slots give other bits than rounding.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import ConfigError, printable
from vllm_spac.execution.pointers_execution import ACTIVATIONS, ALIGNMENT
from vllm_spac.integration.hooks import device

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.integration.hooks.device import DeviceFacts

logger = logging.getLogger("vllm.spac")

POINTERS = "pointers"
_CAPABILITY = (8, 0)  # from which the kernels were compiled
_WEIGHS_INPUT = ("Llama4",)  # architectures whose router weights multiply the input
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "swish": "silu"}  # names of transformers


def apply(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    """Returns the configuration with an execution, which is also added to ``engine_args``."""
    if "execution" in config.model_fields_set or config.has_workers or device.is_cpu():
        return config
    reason = _of_engine(engine_args, config)
    if reason is None:
        reason = reason_for_slots(config, engine_args.create_model_config(), device.query())
    if reason is not None:
        logger.info("%s", printable(f"spac: execution=slots: {reason}"))
        return config
    spac = {**engine_args.additional_config["spac"], "execution": POINTERS}
    engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
    logger.info(
        "spac: execution=pointers, the default on a GPU: no layer waits for the host; exact up to rounding "
        "(--spac-execution slots runs vLLM's own kernel, and is slower)"
    )
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


def reason_for_slots(config: SpacConfig, model: ModelConfig, facts: DeviceFacts | None) -> str | None:
    """Returns why an engine with a GPU loads experts into slots for vLLM's kernel; None if pointers serve it.

    Args:
        config: allows pointers.
        model: vLLM's.
        facts: the GPU's.
    """
    if facts is None or not (facts.cuda and facts.pinned and facts.unified):
        return "this device does not read host memory in place"
    if facts.capability < _CAPABILITY:
        return f"the kernel of pointers needs compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]}"
    if model.quantization is not None:
        return "pointers do not quantise activations, as vLLM does for quantised checkpoints"
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
