"""Checks before a worker starts: refuses what cannot work, and names the flag that helps.

``check_room`` refuses what cannot have room: slots for one token, a KV cache in RAM.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_spac import components
from vllm_spac.cache import sizing
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import SlotCount
from vllm_spac.config.types import flag as knob_flag
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.predictor_file import PredictorFile
from vllm_spac.errors import ConfigError, Remedy, SpacError, UnsupportedError, brief, drop, printable, use
from vllm_spac.integration import compatibility
from vllm_spac.integration.hooks import device, patches, ranks
from vllm_spac.integration.hooks.device import WORKER_EXTENSION
from vllm_spac.integration.hooks.ranks import several
from vllm_spac.integration.loading import expert_workers, fast_memory, head_experts
from vllm_spac.integration.loading.fingerprint import content_of, model_fingerprint
from vllm_spac.integration.stepping import tree_arguments as trees
from vllm_spac.methods.moe_spec.settings import check_budget
from vllm_spac.recording.timeline_file import check_target as check_timeline
from vllm_spac.recording.trace_writer import check_target
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.contents import no_weights, weight_files
from vllm_spac.storage.checkpoint.headers import (
    CONFIG,
    INDEX,
    LAYERS,
    check_shards,
    find_folder,
    first_number,
    is_hub_name,
    no_checkpoint,
    no_folder,
    read_checkpoint,
    read_config,
)
from vllm_spac.storage.checkpoint.packed_folder import HEADER, scan
from vllm_spac.storage.disk import check_room as check_disk_room
from vllm_spac.system import files
from vllm_spac.system.host_memory import available_host_bytes, gib
from vllm_spac.system.machine import spinning

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.spac")
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_SAFETENSORS = {"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer"}  # load formats that prefer these
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of an element
_LARGEST_BLOCK = 128  # tokens: vLLM's own on a CPU
NO_MODEL = "Invalid repository ID or local directory specified:"  # vLLM's words, which the name follows
_NO_HEAD = re.compile(r"architectures \['?(Eagle\w+|\w+Eagle3?)'?\] are not supported")
_LOAD_FORMATS = {"auto", "hf", "safetensors", "pt", "npcache", "dummy", "fastsafetensors", "runai_streamer"}


def worker_extension(asked: str) -> str:
    """Returns the worker extension to use: ours, or the user's if it is derived from ours.

    Raises:
        UnsupportedError: the user's extension is not derived from ours, or cannot be imported.
    """
    if not asked or asked == WORKER_EXTENSION:
        return WORKER_EXTENSION
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from vllm_spac.integration.serving.worker_extension import SpacWorker

    try:
        found = resolve_obj_by_qualname(asked)
    except (Exception, SystemExit) as error:  # whatever its module does when it is imported
        raise UnsupportedError(
            f"spac: --worker-extension-cls {asked} cannot be imported: {type(error).__name__}: {error}; name "
            f"package.module.Class, derived from {WORKER_EXTENSION}"
        ) from error
    if isinstance(found, type) and issubclass(found, SpacWorker):
        return asked
    raise UnsupportedError(
        f"spac: --worker-extension-cls {asked} would replace the plugin's own; derive it from {WORKER_EXTENSION}"
    )


def check_knobs(config: SpacConfig) -> None:
    """Refuses knobs that are invalid for any model: components that cannot be built, unusable files.

    Raises:
        ConfigError: names the knob.
    """
    with _naming(config, "policy"):
        try:
            components.build("policies", config.policy)
        except ConfigError:
            raise
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise ConfigError(f"it cannot be built without arguments: {problem}; give them defaults") from error
    path = config.predictor_file
    if path is not None and not os.path.isfile(path):
        raise ConfigError(
            f"spac: prefetch={path} ({knob_flag('prefetch')}): there is no such file; "
            "vllm-spac predictors train writes one"
        )
    if config.profile is not None:
        with _naming(config, "profile"):
            Costs.read(config.profile)
    expert_workers.check_places(config)
    if config.trace is not None:
        with _naming(config, "record"):
            replaced = check_target(config.trace)
        if replaced is not None:
            held = printable(f"{config.trace} holds a trace of {replaced.model or 'an unnamed model'}")
            logger.warning("spac: %s; the trace of this engine replaces it", held)
    if config.timeline is not None:
        with _naming(config, "record"):
            check_timeline(config.timeline)


def check_engine(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Refuses a model or an option that the plugin cannot serve exactly.

    Raises:
        ConfigError: a knob cannot be satisfied for this model or machine.
        UnsupportedError: the model or a vLLM option is not supported; names the flag that helps.
    """
    model = vllm_config.model_config
    if not model.get_num_experts():
        raise UnsupportedError(
            f"spac: {model.model} is a dense model: it has no experts to keep outside; drop --plugin spac"
        )
    if top_k := model.get_num_experts_per_tok():
        parallel = vllm_config.parallel_config
        ranks_of_experts = parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1
        sizing.check_per_layer(config.parsed_slots, model.get_num_experts() // ranks_of_experts, top_k)
        knob = config.parsed_budget
        if knob.experts is not None:
            check_budget(knob.experts, model.get_num_experts(), top_k, knob.coverage, knob)
    _check_quantisation(model, config)
    compatibility.check(config, vllm_config, gpu=not device.is_cpu())
    for refused, flag, instead in _refusals(config, vllm_config):
        if refused:
            raise UnsupportedError.refused(f"spac: {flag} is not supported", *instead)
    trees.check(config, vllm_config)
    if (facts := device.query()) is not None:
        device.check_device(
            facts,
            pinned=keeps_on_the_host(config, model.get_num_experts()),
            unified=config.execution_class.reads_in_place,
            disk=_on_a_disk(config),
        )
    check_weights(vllm_config)
    check_room(config, vllm_config, device.is_cpu())
    _check_folder(config, model.get_num_experts())
    _check_disk(config, vllm_config)
    _check_files(config, vllm_config)
    warn_of_sampling(config, vllm_config)
    warn_of_spinning(os.environ)
    if getattr(vllm_config.speculative_config, "method", None) == "ngram" and device.is_cpu():
        warn_of_numba(os.environ)


def _on_a_disk(config: SpacConfig) -> Remedy:
    """Returns the remedy of experts on a disk, without what reads them in place."""
    changes: dict[str, str | None] = {"store": "disk"}
    if config.execution_class.reads_in_place:
        changes["plane"] = "slots"
    return use(**changes | ({} if config.cpu_experts == "off" else {"cpu_experts": None}))


def warn_of_sampling(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Logs that chains of drafts spoil sampled requests on a CPU, in stock vLLM as here.

    ``cpu_triton_utils._expand_kernel_impl`` of vLLM 0.32 writes to a copy unless its output is int64, so that rows with
    drafts are sampled at a temperature, top-k and top-p that were never written. Trees do not pass through it.
    """
    if vllm_config.speculative_config is not None and not config.tree_nodes and device.is_cpu():
        logger.warning(
            "spac: with drafts, vLLM's CPU build samples wrong tokens at temperature > 0, also without this plugin; "
            "send temperature 0, or use a draft tree (--spac-tree) with EAGLE, or no drafts"
        )


def warn_of_spinning(environment: Mapping[str, str]) -> None:
    """Logs each variable that keeps idle OpenMP threads on the processors that read missed experts."""
    for name in spinning(environment):
        logger.warning(
            "spac: %s=%s: idle OpenMP threads take the processors that read missed experts; unset it",
            name,
            environment[name],
        )


def warn_of_numba(environment: Mapping[str, str]) -> None:
    """Logs that n-grams, in stock vLLM as here, give OpenMP more threads than were asked for.

    vLLM drafts them by numba, which sets the number of OpenMP's threads to that of its own. On a machine of two cores
    with ``OMP_NUM_THREADS=1``, tokens then took up to 2.5 times as long.
    """
    name = "OMP_NUM_THREADS"
    if (asked := environment.get(name)) is not None and environment.get("NUMBA_NUM_THREADS") != asked:
        logger.warning(
            "spac: vLLM's n-grams give OpenMP as many threads as there are processors, in spite of %s=%s; "
            "set NUMBA_NUM_THREADS=%s too",
            name, asked, asked,
        )  # fmt: skip


def _refusals(config: SpacConfig, vllm_config: VllmConfig) -> Iterator[ranks.Refusal]:
    """Yields (whether it is in use, the option, what to do instead) for each option of vLLM that is not supported."""
    merge = Remedy("merge the adapter into the checkpoint", {"--enable-lora": None})
    named, auto = f"--load-format {vllm_config.load_config.load_format}", use(vllm_load_format="auto")
    model, load = vllm_config.model_config, vllm_config.load_config
    yield from ranks.refusals(vllm_config)
    yield (
        (nodes := vllm_config.parallel_config.nnodes) > 1 and config.execution_class.reads_in_place,
        f"--nnodes {nodes} with plane={config.plane} (a word that ranks of one machine see keeps tokens back)",
        (use(plane="slots"), use(plane="table"), use(vllm_nnodes=1)),
    )
    yield vllm_config.parallel_config.enable_eplb, "--enable-eplb", (drop("vllm_enable_eplb"),)
    yield vllm_config.lora_config is not None, "--enable-lora", (merge,)
    yield model.enable_sleep_mode, "--enable-sleep-mode", (drop("vllm_enable_sleep_mode"),)
    yield (
        getattr(vllm_config, "weight_transfer_config", None) is not None,
        "--weight-transfer-config",
        (
            drop("vllm_weight_transfer_config").but(
                ", and restart the engine with the new checkpoint: the experts are packed when it starts"
            ),
        ),
    )
    yield str(load.load_format) not in _LOAD_FORMATS, named, (auto,)
    yield (
        getattr(vllm_config.cache_config, "cpu_offload_gb", 0) > 0 or _offloads(vllm_config),
        "vLLM's own weight offloading (--cpu-offload-gb, --offload-*)",
        (drop("vllm_cpu_offload_gb", "vllm_offload_backend").but(": spac keeps the experts outside"),),
    )


def _check_quantisation(model: ModelConfig, config: SpacConfig) -> None:
    if model.quantization is None:
        return
    if (checkpoint := quant_config.of(model.hf_config.to_dict())) is None:
        raise UnsupportedError(
            f"spac: --quantization {model.quantization} quantises experts while they are loaded: not "
            "supported; drop it, or use a checkpoint that is quantised already"
        )
    ours, on_cpu = config.execution_class.repacks, device.is_cpu()
    kernels = (
        quantisation.FormatKernels.OURS
        if ours
        else quantisation.FormatKernels.CPU
        if on_cpu
        else quantisation.FormatKernels.GPU
    )
    layers = first_number(model.hf_config.to_dict(), LAYERS)
    built = ours and not patches.is_off(patches.SUPPORTED)
    if on_cpu and not (built or quant_config.spares_experts(checkpoint, layers) or device.runs_quantised_experts()):
        raise UnsupportedError(f"spac: {model.model} has {quantisation.refusal_without_amx(checkpoint)}")
    capability = None if (facts := device.query()) is None else facts.capability
    reason = quantisation.refusal(checkpoint, kernels, capability)
    if reason is None and ours and (told := quantisation.activation_refusal(model.hf_config.to_dict())) is not None:
        reason = f"{told}; {quantisation.IN_SLOTS}"
    if reason is not None:
        raise UnsupportedError(f"spac: {model.model} has {reason}")
    if on_cpu and (reason := _beside(model.model, checkpoint)) is not None:
        raise UnsupportedError(f"spac: {model.model} has {reason}")
    loader = quantisation.loader(checkpoint)
    if kernels is quantisation.FormatKernels.GPU and loader not in (None, model.quantization):
        raise UnsupportedError(
            f"spac: --quantization {model.quantization} runs the experts of {model.model} in kernels that cannot use "
            f"slots; add {' '.join(quantisation.flags(checkpoint))}"
        )
    if kernels is quantisation.FormatKernels.CPU and loader is not None and model.quantization == loader:
        raise UnsupportedError(f"spac: --quantization {loader} selects kernels of a GPU; drop it on a CPU")


def _beside(model: str, quantised: Mapping) -> str | None:
    """Returns why vLLM cannot run the layers beside the experts on this CPU, as far as headers tell."""
    try:
        beside = read_checkpoint(find_folder(model)).fp8_beside
    except (SpacError, OSError):  # not downloaded, or not safetensors: vLLM says so when it builds the first of them
        return None
    return quantisation.refusal_beside(quantised, beside, device.runs_quantised_experts())


def _offloads(vllm_config: VllmConfig) -> bool:
    offload = getattr(vllm_config, "offload_config", None)
    uva, prefetch = getattr(offload, "uva", None), getattr(offload, "prefetch", None)
    return getattr(uva, "cpu_offload_gb", 0) > 0 or getattr(prefetch, "offload_group_size", 0) > 0


def keeps_on_the_host(config: SpacConfig, experts: int) -> bool:
    """Whether experts may be stored in host memory on a machine with a GPU."""
    staged = config.store_class_on("cuda").addressable or config.execution_class.reads_in_place
    return staged and not _holds_all(config, experts)


def _holds_all(config: SpacConfig, experts: int) -> bool:
    """Whether each expert has a slot, so that none is stored outside."""
    slots = config.parsed_slots
    return slots.share == 1 or slots.per_layer == experts


def _check_files(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Refuses trained predictors of another model; what depends on its layers is checked when they are built."""
    if config.predictor_file is None:
        return
    predictors = PredictorFile.read(config.predictor_file)
    model = model_fingerprint(content_of(vllm_config, config.folder))  # may read the whole checkpoint
    predictors.check_model(config.predictor_file, model)


def _check_folder(config: SpacConfig, experts: int) -> None:
    persistent = config.store_class_on("cpu" if device.is_cpu() else "cuda").persistent
    if config.disk_dir is not None and config.store is not None and not persistent:
        raise ConfigError.refused(
            f"spac: disk_dir (--spac-disk-dir) means nothing with store={config.store} (--spac-store)",
            drop("disk_dir"),
            use(store="disk"),
        )
    packs = persistent and not _holds_all(config, experts)
    if config.disk_dir is None and not packs:
        return
    folder = config.folder
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    what = f"spac: disk_dir={folder} (--spac-disk-dir)"
    if not there.is_dir():
        problem = "is a link to nothing" if there.is_symlink() and not there.exists() else "is not a folder"
        raise ConfigError(f"{what}: {there} {problem}; name another")
    if packs and there == folder and (refused := files.problem(folder, folder.stat(), around=True)):
        raise ConfigError(f"{what}: {refused}, or name another folder")
    if not packs or (there == folder and _holds_packed(folder)):  # a folder that is complete may be read-only
        return
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{what}: {there} cannot be written to: {error.strerror}; name a writable folder") from error


def _check_disk(config: SpacConfig, vllm_config: VllmConfig) -> None:
    """Refuses a disk without room for the experts that are not packed yet, as far as headers and folders tell.

    Which folder this engine uses is known once its layers are built: here it has whatever one of this model has at
    most, or one of a model that is not known. ``DiskStore.reserve`` checks again.
    """
    model, on_cpu = vllm_config.model_config, device.is_cpu()
    persistent = config.store_class_on("cpu" if on_cpu else "cuda").persistent
    if config.has_workers or not persistent or _holds_all(config, model.get_num_experts()):
        return
    try:
        checkpoint = read_checkpoint(find_folder(model.model))
    except (SpacError, OSError):  # not downloaded, or not safetensors
        return
    # An unquantised model may be served in fewer bits than it is stored in.
    widths = [_BYTES[dtype] for dtype in checkpoint.dtypes if dtype in _BYTES]
    stored = max(widths) if widths and checkpoint.quantisation is None else model.dtype.itemsize
    whole = sum(checkpoint.layer_bytes.values()) * min(stored, model.dtype.itemsize) // stored
    each = whole // checkpoint.total + HEADER
    found = [packed for packed in scan(config.folder) if packed.model in ("", model.model)]
    held = sorted(len(packed.experts) for packed in found)
    stages = vllm_config.parallel_config.pipeline_parallel_size  # each with a folder of its own
    missing = max(0, checkpoint.total - sum(held[-stages:]))
    speculation, ranks = vllm_config.speculative_config, vllm_config.parallel_config.tensor_parallel_size
    if getattr(speculation, "method", None) == "mtp" and (
        head_experts.kept_whole(config, vllm_config, speculation.draft_model_config, on_cpu, ranks) is None
    ):  # in a folder of its own
        missing += max(0, checkpoint.experts * len(checkpoint.draft_layer_bytes) - sum(held[-2:-1]))
    there = next(path for path in (config.folder, *config.folder.parents) if path.exists())
    check_disk_room(there, missing, missing * each)


def _holds_packed(folder: Path) -> bool:
    try:
        return any(map(_FINGERPRINT.fullmatch, os.listdir(folder)))
    except OSError:  # not readable; the attempt to write reports why
        return False


@contextmanager
def _naming(config: SpacConfig, name: str) -> Iterator[None]:
    """Prefixes an error raised inside with the knob ``name``."""
    try:
        yield
    except ConfigError as error:
        problem = str(error).removeprefix("spac: ")
        raise ConfigError(f"spac: {name}={getattr(config, name)} ({knob_flag(name)}): {problem}") from error


def check_model(model: str, option: str = "") -> None:
    """Refuses what is no checkpoint, and paths to nothing; ``UnsupportedError`` says what it is, after ``option``."""
    problem, config = no_checkpoint(model), Path(model) / CONFIG
    if not problem and model.startswith(("/", "./", "../", "~")) and not os.path.exists(model):
        problem = no_folder(model)
    try:
        if not problem and config.is_file():
            read_config(config)
    except UnsupportedError as error:
        problem = str(error)
    if problem:
        raise UnsupportedError(f"spac: {option}{problem}")


def check_drafter(speculation: Mapping | None) -> None:
    """As ``check_model``, of the model that drafts."""
    if isinstance(model := (speculation or {}).get("model"), str):
        check_model(model, "--speculative-config: ")


@contextmanager
def naming_model(model: str) -> Iterator[None]:
    """Says in one sentence that a model of the Hugging Face hub is not to be had, where a request to it fails."""
    try:
        yield
    except OSError as error:
        if not is_hub_name(model):
            raise
        raise _unknown_model(model, f": {brief(str(error).partition(chr(10))[0])}") from error


def _unknown_model(model: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"spac: {model} is not in the Hugging Face cache, and the hub does not give it{why}; check the name and the "
        "network, or name a folder"
    )


@contextmanager
def naming_drafter(speculation: Mapping | None) -> Iterator[None]:
    """Says in one sentence that the hub does not give a drafter, or that it is no head of the method.

    vLLM says then what a checkpoint is, or lists each architecture that it has.
    """
    try:
        yield
    except ValueError as error:
        method, model = ((speculation or {}).get(name) for name in ("method", "model"))
        if f"{NO_MODEL} '{model}'" in str(error) and is_hub_name(str(model)):
            raise _unknown_model(f"--speculative-config: {model}", "") from error
        if (found := _NO_HEAD.search(str(error))) is None or speculation is None:
            raise
        raise UnsupportedError.refused(
            f"spac: --speculative-config names {brief(model)} as {method} head, and it is none: vLLM has no {found[1]}",
            Remedy(f"name a head that was trained as {method} for this model"),
            drop("vllm_speculative_config"),
        ) from error


def check_weights(vllm_config: VllmConfig) -> None:
    """Refuses weights that are missing or cut off, of the model and its drafter; reads headers and sizes only.

    Raises:
        UnsupportedError: names the file, and the tensor that it lacks.
    """
    speculation = vllm_config.speculative_config
    models = [vllm_config.model_config, getattr(speculation, "draft_model_config", None)]
    if (load_format := str(vllm_config.load_config.load_format)) not in _SAFETENSORS:
        return
    for folder in {Path(model.model) for model in models if model is not None and os.path.isdir(model.model)}:
        if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
            try:
                check_shards(folder)
            except UnsupportedError as error:
                raise UnsupportedError(f"spac: {error}") from error
        elif not weight_files(folder, load_format):
            raise UnsupportedError(no_weights(str(folder), load_format))


def check_room(config: SpacConfig, vllm_config: VllmConfig, on_cpu: bool) -> None:
    """Checks what is known without weights; the rest is checked when they are loaded.

    Raises:
        ConfigError: names the flag and what would fit.
    """
    parallel = vllm_config.parallel_config
    ranks_of_experts = parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1
    check_slots(config.parsed_slots, vllm_config.model_config.model, ranks_of_experts)
    check_one_request(vllm_config)
    if on_cpu:
        check_kv_cache(vllm_config)


def check_slots(slots: SlotCount, model: str, ranks: int = 1) -> None:
    """Refuses a share of the experts of ``model`` that is too small for one token; ``ranks``: that divide them.

    The number of MoE layers is that of the checkpoint's headers; of a model that is not here yet, it is not known.
    """
    if slots.share is None:
        return
    try:
        checkpoint = read_checkpoint(find_folder(model))
    except (SpacError, OSError):  # not downloaded, or not safetensors: counted when the layers are built
        return
    layers = Counter(count // checkpoint.experts for count in checkpoint.layer_bytes.values())
    sizing.check_share(slots, min(layers.values()) * (checkpoint.experts // ranks), checkpoint.top_k)


def check_one_request(vllm_config: VllmConfig) -> None:
    """Refuses a KV cache of a size that the user named, and that one request of maximum length does not fit into."""
    given, needed = vllm_config.cache_config.kv_cache_memory_bytes, fast_memory.one_request(vllm_config)
    if given is None or needed is None or given >= needed:
        return
    longest = vllm_config.model_config.max_model_len
    blocks = 2 + longest // _LARGEST_BLOCK
    raise ConfigError.refused(
        f"spac: the KV cache (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE) has {given} bytes, and one request of "
        f"--max-model-len {longest} takes {needed}",
        use(vllm_kv_cache_memory_bytes=2 * blocks * _LARGEST_BLOCK * needed // longest).but(
            " or more, or lower --max-model-len"
        ),
    )


def check_kv_cache(vllm_config: VllmConfig) -> None:
    """Refuses a KV cache that is larger than the RAM that is available to a worker."""
    ranks, one = several(vllm_config)[0], fast_memory.by_config(vllm_config).request_bytes
    needed = fast_memory.beside_slots(vllm_config, one)
    asked = vllm_config.cache_config.kv_cache_memory_bytes is not None
    share = 1.0 if asked else vllm_config.cache_config.gpu_memory_utilization
    room = int(min(available_host_bytes(), share * psutil.virtual_memory().total) / ranks)
    if needed < room:
        return
    each = f" for each of {ranks} ranks" if ranks > 1 else ""
    problem = f"{gib(needed)}{each}, and {gib(room)} of RAM are available"
    if asked:
        raise ConfigError(
            f"spac: the KV cache (--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE) takes {problem}; ask for less, "
            "which leaves room for slots (--spac-slots) and other weights, too"
        )
    model = vllm_config.model_config
    requests = fast_memory.least_requests(vllm_config)
    raise ConfigError(
        f"spac: the KV cache of {requests} of --max-model-len {model.max_model_len} takes "
        f"{problem}; lower --max-model-len, or bound it with --kv-cache-memory-bytes"
    )
