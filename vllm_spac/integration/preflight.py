"""What cannot work is refused here, with the flag that helps, before a worker starts."""

from __future__ import annotations

from pathlib import Path

from vllm_spac import quantisation, slots
from vllm_spac.budgets.base import validate
from vllm_spac.config import SpacConfig
from vllm_spac.config import flag as knob_flag
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.integration import device, runners
from vllm_spac.integration.plugin import WORKER_EXTENSION

_LOAD_FORMATS = {"auto", "hf", "safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"}


def worker_extension(asked: str) -> str:
    """The worker extension to use: ours, unless the user's own is built on ours.

    Raises:
        UnsupportedError: the user named an extension that is not.
    """
    if not asked or asked == WORKER_EXTENSION:
        return WORKER_EXTENSION
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_spac.integration.worker import SpacWorker

    if issubclass(resolve_obj_by_qualname(asked), SpacWorker):
        return asked
    raise UnsupportedError(
        f"spac: --worker-extension-cls {asked} leaves the plugin without its own; derive it from {WORKER_EXTENSION}"
    )


def check(config: SpacConfig, vllm_config) -> None:
    """Refuse a model or an option that the plugin cannot serve exactly.

    Raises:
        ConfigError: a knob cannot be met.
        UnsupportedError: the model or a vLLM option is not supported; says which flag helps.
    """
    model = vllm_config.model_config
    if not model.get_num_experts():
        raise UnsupportedError(
            f"spac: {model.model} is a dense model: it has no experts to keep outside; drop --plugin spac"
        )
    if top_k := model.get_num_experts_per_tok():
        slots.check(config.parsed_slots, model.get_num_experts(), top_k)
        if config.budget is not None:
            validate(config.budget, model.get_num_experts(), top_k, config.budget_coverage)
    _check_quantisation(model)
    for refused, flag, instead in _refusals(vllm_config):
        if refused:
            raise UnsupportedError(f"spac: {flag} is not supported; {instead}")
    check_guard(config, vllm_config)
    if (facts := device.query()) is not None:
        device.check(
            facts,
            pinned=keeps_on_the_host(config, model.get_num_experts()),
            unified=config.execution == "pointers",
        )
    _check_folder(config)
    _check_cpu_experts(config)
    for name in ("calibration", "budget_file"):
        path = getattr(config, name)
        if path is not None and not path.expanduser().is_file():
            raise ConfigError(f"spac: {name}={path} ({knob_flag(name)}): there is no such file")


def _refusals(vllm_config):
    model, parallel, load = vllm_config.model_config, vllm_config.parallel_config, vllm_config.load_config
    yield parallel.tensor_parallel_size > 1, "--tensor-parallel-size above 1", "use 1: experts are not sharded yet"
    yield parallel.pipeline_parallel_size > 1, "--pipeline-parallel-size above 1", "use 1"
    yield parallel.data_parallel_size > 1, "--data-parallel-size above 1", "use 1, or one server a replica"
    yield parallel.enable_expert_parallel, "--enable-expert-parallel", "drop it"
    yield parallel.enable_eplb, "--enable-eplb", "drop it: placement is what spac decides"
    yield vllm_config.lora_config is not None, "--enable-lora", "merge the adapter into the checkpoint"
    yield model.enable_sleep_mode, "--enable-sleep-mode", "drop it"
    yield str(load.load_format) not in _LOAD_FORMATS, f"--load-format {load.load_format}", "use --load-format auto"
    yield (
        getattr(vllm_config.cache_config, "cpu_offload_gb", 0) > 0 or _offloads(vllm_config),
        "vLLM's own weight offloading (--cpu-offload-gb, --offload-*)",
        "drop it: spac keeps the experts outside",
    )


def _check_quantisation(model) -> None:
    if model.quantization is None:
        return
    if (checkpoint := quantisation.of(model.hf_config.to_dict())) is None:
        raise UnsupportedError(
            f"spac: --quantization {model.quantization} quantises experts while they are loaded: not "
            "supported; drop it, or use a checkpoint that is quantised already"
        )
    if (reason := quantisation.refusal(checkpoint)) is not None:
        raise UnsupportedError(f"spac: {model.model} has {reason}")
    if quantisation.loader(checkpoint) not in (None, model.quantization):
        raise UnsupportedError(
            f"spac: --quantization {model.quantization} gives the experts of {model.model} to kernels that keep no "
            f"slots; add {' '.join(quantisation.flags(checkpoint))}"
        )


def _offloads(vllm_config) -> bool:
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    return getattr(uva, "cpu_offload_gb", 0) > 0 or getattr(prefetch, "offload_group_size", 0) > 0


def check_guard(config: SpacConfig, vllm_config) -> None:
    """``UnsupportedError`` where the guard was asked for and cannot change draft lengths."""
    asked = config.guard == "on" and "guard" in config.model_fields_set
    if asked and vllm_config.speculative_config is not None and (reason := runners.unguarded(vllm_config)):
        raise UnsupportedError(f"spac: guard=on (--spac-guard) cannot work here: {reason}, or use --spac-guard off")


def keeps_on_the_host(config: SpacConfig, experts: int) -> bool:
    """Whether experts may lie in host memory on a machine with a GPU."""
    slots = config.parsed_slots
    return config.store != "disk" and slots.share != 1 and slots.per_layer != experts


def _check_cpu_experts(config: SpacConfig) -> None:
    from vllm.platforms import current_platform

    store = config.store_on("cpu" if current_platform.is_cpu() else "cuda")
    if config.cpu_experts != "off" and store == "disk":
        raise ConfigError(
            f"spac: cpu_experts={config.cpu_experts} (--spac-cpu-experts) computes experts where they lie, and with "
            "store=disk that is no memory; add --spac-store host"
        )


def _check_folder(config: SpacConfig) -> None:
    folder = config.disk_dir
    if folder is None:
        return
    if config.store == "host":
        raise ConfigError("spac: disk_dir (--spac-disk-dir) means nothing with store=host; drop it or use store=disk")
    existing = next(path for path in (folder.expanduser(), *folder.expanduser().absolute().parents) if path.exists())
    if not Path(existing).is_dir():
        raise ConfigError(f"spac: disk_dir={folder} (--spac-disk-dir): {existing} is not a folder; name another")
