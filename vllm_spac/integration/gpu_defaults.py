"""What an engine gets where its user named nothing: the plane, and on a GPU vLLM's options for it.

With ``plane=slots`` every layer waits for the host, which then launches vLLM's kernels one by one. On an H100 that
took 13 ms per token of a model of 6 layers, of which the bytes take 4; with ``plane=pointers`` it took 3.7, and 5.6
with CPU experts. So that is the default, unless our kernel does not compute the model, or another knob needs the host.
Then formats that vLLM's kernel does not read from slots get ``plane=table``, our kernel over slots.

vLLM's own choice of MoE backend depends on the GPU, and on some it is one that finds no slots, or builds no layer that
our kernels read. So the options of ``quantisation.flags`` are set, as a plan prints them.

Where all experts fit there is no plane, or ``plane=slots`` with vLLM's own kernel and graphs: see ``whole_models``.
Where host memory is too small for them, they are on a disk: see ``store_choice``.

On a CPU vLLM's own kernel runs the experts, exactly, in slots. Where it has none for them, ours does: ``plane=table``.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

from vllm_spac import components
from vllm_spac.config import presets
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO, ONLY_OURS_ON_A_GPU, ROUNDED, ROUNDED_ON_A_GPU
from vllm_spac.errors import ConfigError, printable
from vllm_spac.execution.address_table import ALIGNMENT
from vllm_spac.integration import chunk_size, store_choice, whole_models
from vllm_spac.integration.hooks import device, patches
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import LAYERS, first_number
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from vllm_spac.integration.hooks.device import DeviceFacts

logger = logging.getLogger("vllm.spac")

_CAPABILITY = (8, 0)  # from which the kernels were compiled
_HEAD = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # layers that only drafts of the checkpoint use
_WEIGHS_INPUT = ("Llama4",)  # architectures whose router weights multiply the input


def apply(engine_args: EngineArgs, config: SpacConfig, usage: UsageContext | None = None) -> SpacConfig | None:
    """Returns the configuration with a plane, and adds it and vLLM's options to ``engine_args``.

    None: all experts fit, and stock vLLM serves the model. One line of the log says what was set, and why.

    Args:
        usage: how vLLM is used, on which its own defaults depend.
    """
    if device.is_cpu():
        return _on_a_cpu(engine_args, config)
    model = engine_args.create_model_config()
    entry = quant_config.of(model.hf_config.to_dict())
    facts = device.query()
    choices = []
    if (whole := whole_models.serve(engine_args, config, model)) is not None:
        served, fits = whole
        choices.append(fits)
        if served is None:
            logger.info("%s", printable(f"spac: {fits}"))
            return None
        config = served
    by_default = config.plane == AUTO and _plane(engine_args, config, model, entry, facts)[0] == "pointers"
    in_place = by_default or config.plane == "pointers"
    if (chosen := store_choice.choose(engine_args, config, model, entry, in_place)) is not None:
        knobs, why = chosen
        choices.append(why)
        config = _with(engine_args, **knobs)
    if config.plane == AUTO and not config.has_workers:
        plane, why = _plane(engine_args, config, model, entry, facts)
        host = config.preset is not None and plane != "pointers"
        choices.append(f"preset={config.preset} is served by plane={plane}: {why}" if host else f"plane={plane}: {why}")
        config = _with(engine_args, plane=plane)
    choices += _set_kernels(engine_args, config, model, entry, facts)
    if engine_args.speculative_config is None and (layers := first_number(model.hf_config.to_dict(), _HEAD)):
        drafts = json.dumps({"method": "mtp", "num_speculative_tokens": layers})
        choices.append(f"no drafts: no plan counts the checkpoint's own, which are --speculative-config '{drafts}'")
    choices += chunk_size.choose(engine_args, config, usage)
    if choices:
        logger.info("%s", printable(f"spac: {'; '.join(choices)}"))
    return config


def _on_a_cpu(engine_args: EngineArgs, config: SpacConfig) -> SpacConfig:
    if config.plane != AUTO or config.has_workers or patches.is_off(patches.SUPPORTED):
        return config
    facts = engine_args.create_model_config().hf_config.to_dict()
    entry, amx = quant_config.of(facts), device.runs_quantised_experts()
    if entry is None or not quantisation.only_ours_on_cpu(entry, first_number(facts, LAYERS), amx):
        return config
    name, where = quant_config.method(entry), "a CPU" if amx else "a CPU without AMX"
    logger.info("spac: plane=table, %s: stock vLLM has no kernel for these experts (%s) on %s", ROUNDED, name, where)
    return _with(engine_args, plane="table")


def _with(engine_args: EngineArgs, **knobs: object) -> SpacConfig:
    spac = {**engine_args.additional_config["spac"], **knobs}
    engine_args.additional_config = {**engine_args.additional_config, "spac": spac}
    return SpacConfig.parse(spac)


def _set_kernels(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> Iterator[str]:
    """Sets ``--moe-backend`` and ``--quantization`` where neither the user nor the checkpoint decides them.

    Yields what was set, and why.
    """
    if entry is None and model.quantization is not None:
        return  # quantised while it is loaded, which is refused
    ours = config.execution_class.repacks
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


def _plane(
    engine_args: EngineArgs, config: SpacConfig, model: ModelConfig, entry: Mapping | None, facts: DeviceFacts | None
) -> tuple[str, str]:
    """Returns the plane of an engine whose user left it to the plugin, and the reason."""
    only_ours = facts is not None and quantisation.only_ours(entry, facts.capability)
    reason = _of_engine(engine_args, config) or reason_for_host(model, entry, facts)
    if reason is None:
        return "pointers", f"no layer waits for the host; {ONLY_OURS_ON_A_GPU if only_ours else ROUNDED_ON_A_GPU}"
    if only_ours:
        return "table", f"{reason}; vLLM's kernel for these experts reads no slots, and ours does"
    if config.parsed_slots.share == 1 and not whole_models.acting_inside(config):
        return "slots", f"{reason}: vLLM's kernel and CUDA graphs, as without the plugin"
    return "slots", reason


def _of_engine(engine_args: EngineArgs, config: SpacConfig) -> str | None:
    graphs = not {"budget", "http"}.isdisjoint(inside := whole_models.acting_inside(config)) and "record" not in inside
    if config.parsed_slots.share == 1 and (config.tree_nodes or not graphs):  # else only graphs of ours hold a budget
        return "each expert has a slot"
    if config.parsed_budget.alpha is not None:
        return "with plane=pointers, votes=path (--spac-budget) ran on a GPU without CUDA graphs only"
    if engine_args.nnodes > 1:
        return f"{engine_args.nnodes} machines, of whose ranks none learns in time that another's read has failed"
    given = engine_args.additional_config["spac"]
    refused = dict(refused_of(given))
    # Others gave stock's tokens on no GPU where the device decides, in CUDA graphs.
    unseen = config.prefetch != "off" and not components.find("predictors", config.prefetch).on_device
    if unseen and "prefetch" not in refused:
        named = f"prefetch={config.prefetch} (--spac-prefetch)"
        refused["prefetch"] = f"{named} ran on no GPU with plane=pointers; --spac-plane pointers tries it"
    return "; ".join(refused.values()) or None


def refused_of(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields what the device cannot decide: each knob with the reason, as if those before it were not set.

    Knobs of a preset are among them. ``plane``: no knob alone is the reason.
    """
    left = {**presets.filled(given), "plane": "pointers"}
    left.pop("preset", None)
    for _ in range(len(left)):
        try:
            SpacConfig.parse(left)
            return
        except ConfigError as error:
            problem = error.problem.removeprefix("spac: ")
            other = next((each for each in error.remedies if left.keys() & each.changes.keys() - {"plane"}), None)
            if other is None:
                yield "plane", problem
                return
            yield " and ".join(sorted(left.keys() & other.changes.keys())), f"{problem} (or {other.text})"
            left |= other.changes
            left = {name: value for name, value in left.items() if value is not None}


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
    said = {key: getattr(text, key, None) for key in quantisation.ACTIVATION_KEYS}
    if not any(said.values()):
        return "its configuration names no activation"
    said |= {"swiglu_limit": getattr(text, "swiglu_limit", None)}
    if (reason := quantisation.activation_refusal(said, model.architectures)) is not None:
        return reason
    if any(architecture.startswith(_WEIGHS_INPUT) for architecture in model.architectures):
        return "our kernel weighs outputs, and this model weighs inputs"
    widths = [getattr(text, each, None) for each in ("moe_intermediate_size", "intermediate_size")]
    odd = [width for width in (model.get_hidden_size(), *widths) if width and width * model.dtype.itemsize % ALIGNMENT]
    if odd:
        return f"rows of {odd[0]} weights are no multiple of {ALIGNMENT} bytes"
    return None
