"""A model that fits the GPU is served as stock vLLM serves it: counted by headers and card, before a plane is chosen.

No plane is faster than stock where nothing is loaded: a layer of ours adds host work, other CUDA graphs and another
rounding, and saves no byte. So ``vllm serve --plugin spac`` then replaces no layer, and what knobs say of memory beside
the GPU's has no effect. Its users lose the counters (``GET /spac/stats``) and the live page. Whoever asks for these, or
for more, keeps the plugin with ``slots=100%``: vLLM's kernel and CUDA graphs, unless a knob acts inside of layers. So
does a program that makes an ``LLM`` with the plugin, which may read ``vllm_spac.stats``.

The count is that of ``--spac-slots auto``: other weights, run-time buffers, the KV cache of the requests that are to
fit, and the rest for experts. What it cannot count is not taken to fit: draft models, adapters, weights that are
quantised while they are loaded, and layers that several GPUs share by other ways than tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_spac.cache.sizing import Batch, MoEWidths, Working
from vllm_spac.config.config import SpacConfig
from vllm_spac.config.types import AUTO
from vllm_spac.errors import SpacError, flag
from vllm_spac.integration.hooks import device
from vllm_spac.integration.loading import fast_memory
from vllm_spac.storage.checkpoint import quant_config
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import INNER, Checkpoint, find_folder, first_number, read_checkpoint
from vllm_spac.storage.checkpoint.kv_layers import KVLayers, Steps
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import EngineArgs

_ROWS = 8192  # of a forward, by vLLM's defaults at most
_REQUESTS = 1024  # as many are sampled at once, by vLLM's defaults at most
_CAPTURED, _GRAPHS = 512, 2 * 67  # rows of the largest CUDA graph, and their number, by vLLM's defaults at most


class Count(NamedTuple):
    """Bytes of a GPU's memory."""

    usable: int  # that vLLM may take
    weights: int  # of all experts, and the others
    kv: int
    working: int

    @property
    def fits(self) -> bool:
        return self.weights + self.kv + self.working <= self.usable


# Knobs that do nothing where each expert has a slot and nothing drafts.
_IDLE = frozenset(
    {
        "store", "disk_dir", "host_memory", "policy", "prefetch", "guard", "cpu_experts", "profile", "cpu_kernel",
        "io_threads", "tuned",
    }
)  # fmt: skip


def serve(engine_args: EngineArgs, config: SpacConfig, model: ModelConfig) -> tuple[SpacConfig | None, str] | None:
    """Serves a model whose experts all fit, if the user named neither slots nor a kernel of ours.

    Returns:
        The configuration, which ``engine_args`` have too, and what the log says. No configuration: the plugin is out of
        ``engine_args``, and stock vLLM serves the model. None: nothing was changed.
    """
    if config.slots != AUTO or config.has_workers or config.plane not in (AUTO, "slots"):
        return None
    found = count(engine_args, model)
    if found is None or not found.fits:
        return None
    named = [name for name, value in SpacConfig().model_dump().items() if getattr(config, name) != value]
    idle = [name for name in named if name in _IDLE and (name != "prefetch" or config.speculate == "off")]
    fits = (
        f"all experts fit: {gib(found.weights)} of weights, {gib(found.kv)} of KV cache and {gib(found.working)} of "
        f"run-time buffers, of {gib(found.usable)} of GPU memory"
    )
    if idle:
        fits += f"; nothing is left to {' and '.join(map(flag, idle))}"
    if engine_args.max_model_len is None:
        engine_args.max_model_len = fast_memory.FITTED
    others = {name: value for name, value in engine_args.additional_config.items() if name != "spac"}
    if getattr(engine_args, "spac_command", False) and idle == named:
        engine_args.additional_config = others
        return None, (
            f"{fits}; stock vLLM serves this as fast, so no layer is replaced and nothing is counted "
            "(GET /spac/stats); --spac-slots 100% keeps the plugin's layers"
        )
    given = engine_args.additional_config["spac"]
    spac = {name: value for name, value in given.items() if name not in idle} | {"slots": "100%"}
    engine_args.additional_config = {**others, "spac": spac}
    asked = [flag(name) for name in named if name not in idle]
    keeps = " and ".join(asked) or "a program that may read its counters"
    return SpacConfig.parse(spac), f"slots=100%: {fits}; the plugin's layers stay for {keeps}"


def acting_inside(config: SpacConfig) -> list[str]:
    """Returns the knobs that act inside of layers also where each expert has a slot: vLLM's own graphs lack them."""
    found = {
        "record": config.trace is not None,
        "budget": config.parsed_budget.bounds,
        "http": config.control,
        "speculate": config.speculate != "off",
    }
    return [name for name, acts in found.items() if acts]


def count(engine_args: EngineArgs, model: ModelConfig) -> Count | None:
    """Counts what a rank needs; None where that is not known."""
    entry = quant_config.of(model.hf_config.to_dict())
    uncounted = engine_args.speculative_config, engine_args.enable_lora, engine_args.enable_expert_parallel
    alone = engine_args.pipeline_parallel_size == engine_args.data_parallel_size == 1
    if any(uncounted) or not alone or (entry is None and model.quantization is not None):
        return None
    if (total := device.total_memory()) is None:
        return None
    config, ranks = model.hf_config.to_dict(), engine_args.tensor_parallel_size
    if (checkpoint := sizes(str(engine_args.model), config, FormatKernels.GPU)) is None:
        return None
    tables = checkpoint.table_bytes - host_tables(engine_args, checkpoint)
    weights = -(-(checkpoint.other_bytes + tables + sum(checkpoint.layer_bytes.values())) // ranks)
    working = _working(engine_args, model, config, checkpoint)
    usable = int(engine_args.gpu_memory_utilization * total)
    return Count(usable, weights, _kv(engine_args, model, usable - weights - working), working)


def host_tables(engine_args: EngineArgs, checkpoint: Checkpoint) -> int:
    """Returns the bytes of n-gram tables that vLLM will pin in host memory when it builds the model."""
    engram = engine_args.engram_config
    return checkpoint.table_bytes if engram is None or engram.cpu_offload else 0


def sizes(model: str, config: dict, kernels: FormatKernels) -> Checkpoint | None:
    """Returns the sizes by the headers, or by the configuration of a model that is not on this machine yet.

    Args:
        kernels: whose format experts are kept in.
    """
    try:
        return read_checkpoint(find_folder(model), kernels)
    except (SpacError, OSError):  # not on this machine, or damaged, which whoever loads it says
        pass
    try:
        return described(config, Path(model), kernels)
    except SpacError:  # of an architecture whose sizes are not known: then the layers are built, and say it
        return None


def _working(engine_args: EngineArgs, model: ModelConfig, config: dict, checkpoint: Checkpoint) -> int:
    moe = MoEWidths(checkpoint.top_k, model.get_hidden_size(), first_number(config, INNER))
    widths = fast_memory.widths(model, _parallel(engine_args), [moe])
    rows, sampled = engine_args.max_num_batched_tokens or _ROWS, engine_args.max_num_seqs or _REQUESTS
    graphs = (0, 0) if engine_args.enforce_eager else (_CAPTURED, _GRAPHS)
    return Working.of(widths, model.get_vocab_size(), Batch(max(rows, sampled), sampled, *graphs)).total


def _parallel(engine_args: EngineArgs) -> Any:
    """Returns what sizes of a rank need of vLLM's parallel configuration, which does not exist yet."""
    return SimpleNamespace(tensor_parallel_size=engine_args.tensor_parallel_size)


def _kv(engine_args: EngineArgs, model: ModelConfig, left: int) -> int:
    """Returns what slots would leave for it, as ``fast_memory.beside_slots``, of what is ``left``."""
    if engine_args.kv_cache_memory_bytes is not None:
        return engine_args.kv_cache_memory_bytes
    text: Mapping = model.hf_text_config.to_dict()
    values = model.get_num_kv_heads(_parallel(engine_args)) * model.get_head_size()
    layer = values * (1 if model.use_mla else 2) * model.dtype.itemsize  # MLA: one vector for keys and values
    layers = KVLayers.of_config(text, model.get_total_num_hidden_layers(), model.get_hidden_size(), layer)
    rows = engine_args.max_num_batched_tokens or _ROWS
    each = layers.blocks(Steps(model.max_model_len, 2 * rows)).request_bytes
    named = engine_args.max_model_len not in (None, fast_memory.FITTED)
    return fast_memory.kept(each, engine_args.max_num_seqs or _REQUESTS, named, left)
