"""Leaves a model to stock vLLM where all of it fits the GPU: counted by headers and card, before a plane is chosen.

No plane is faster than stock where nothing is loaded: a layer of ours adds host work, other CUDA graphs and another
rounding, and saves no byte. So ``vllm serve --plugin spac`` with no other knob then replaces no layer. Its users lose
the counters (``GET /spac/stats``) and the live page; whoever names a knob keeps both, ``--spac-slots 100%`` included.
A program that makes an ``LLM`` with the plugin keeps it, too: it may read ``vllm_spac.stats``.

The count is that of ``--spac-slots auto``: other weights, run-time buffers, the KV cache of the requests that are to
fit, and the rest for experts. What it cannot count is not taken to fit: draft models, adapters, weights that are
quantised while they are loaded, and layers that several GPUs share by other ways than tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vllm_spac.cache.sizing import Batch, MoEWidths, Widths, Working
from vllm_spac.config.config import SpacConfig
from vllm_spac.errors import SpacError
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


def leave_to_stock(engine_args: EngineArgs, config: SpacConfig, model: ModelConfig) -> str | None:
    """Takes the plugin out of ``engine_args`` if all experts fit and no knob was named; returns what the log says.

    None: the plugin serves the model.
    """
    if not (getattr(engine_args, "spac_command", False) and config.model_dump() == SpacConfig().model_dump()):
        return None
    count = _count(engine_args, model)
    if count is None or not count.fits:
        return None
    others = {name: value for name, value in engine_args.additional_config.items() if name != "spac"}
    engine_args.additional_config = others
    if engine_args.max_model_len is None:
        engine_args.max_model_len = fast_memory.FITTED
    return (
        f"all experts fit: {gib(count.weights)} of weights, {gib(count.kv)} of KV cache and {gib(count.working)} of "
        f"run-time buffers, of {gib(count.usable)} of GPU memory; stock vLLM serves this as fast, so no layer is "
        "replaced and nothing is counted (GET /spac/stats); --spac-slots 100% keeps the plugin's layers"
    )


def _count(engine_args: EngineArgs, model: ModelConfig) -> Count | None:
    """Counts what a rank needs; None where that is not known."""
    entry = quant_config.of(model.hf_config.to_dict())
    uncounted = engine_args.speculative_config, engine_args.enable_lora, engine_args.enable_expert_parallel
    alone = engine_args.pipeline_parallel_size == engine_args.data_parallel_size == 1
    if any(uncounted) or not alone or (entry is None and model.quantization is not None):
        return None
    total, ranks = device.total_memory(), engine_args.tensor_parallel_size
    config = model.hf_config.to_dict()
    checkpoint = _checkpoint(str(engine_args.model), config)
    if total is None or checkpoint is None:
        return None
    weights = -(-(checkpoint.other_bytes + sum(checkpoint.layer_bytes.values())) // ranks)
    working = _working(engine_args, model, config, checkpoint)
    usable = int(engine_args.gpu_memory_utilization * total)
    return Count(usable, weights, _kv(engine_args, model, usable - weights - working), working)


def _checkpoint(model: str, config: dict) -> Checkpoint | None:
    """Returns the sizes by the headers, or by the configuration of a model that is not on this machine yet."""
    try:
        return read_checkpoint(find_folder(model), FormatKernels.GPU)
    except (SpacError, OSError):  # not on this machine, or damaged, which whoever loads it says
        pass
    try:
        return described(config, Path(model), FormatKernels.GPU)
    except SpacError:  # of an architecture whose sizes are not known: then the layers are built, and say it
        return None


def _working(engine_args: EngineArgs, model: ModelConfig, config: dict, checkpoint: Checkpoint) -> int:
    text = model.hf_text_config
    widths = Widths(
        hidden=model.get_hidden_size(),
        heads=text.num_attention_heads,
        kv_heads=model.get_total_num_kv_heads(),
        head=model.get_head_size(),
        dense=first_number(config, ("intermediate_size",)),
        moe=(MoEWidths(checkpoint.top_k, model.get_hidden_size(), first_number(config, INNER)),),
        itemsize=model.dtype.itemsize,
    )
    rows, sampled = engine_args.max_num_batched_tokens or _ROWS, engine_args.max_num_seqs or _REQUESTS
    graphs = (0, 0) if engine_args.enforce_eager else (_CAPTURED, _GRAPHS)
    return Working.of(widths, model.get_vocab_size(), Batch(max(rows, sampled), sampled, *graphs)).total


def _kv(engine_args: EngineArgs, model: ModelConfig, left: int) -> int:
    """Returns what slots would leave for it, as ``fast_memory.beside_slots``, of what is ``left``."""
    if engine_args.kv_cache_memory_bytes is not None:
        return engine_args.kv_cache_memory_bytes
    text: Mapping = model.hf_text_config.to_dict()
    layer = model.get_total_num_kv_heads() * model.get_head_size() * (1 if model.use_mla else 2) * model.dtype.itemsize
    layers = KVLayers.of_config(text, model.get_total_num_hidden_layers(), model.get_hidden_size(), layer)
    rows = engine_args.max_num_batched_tokens or _ROWS
    each = layers.blocks(Steps(model.max_model_len, 2 * rows)).request_bytes
    named = engine_args.max_model_len not in (None, fast_memory.FITTED)
    return fast_memory.kept(each, engine_args.max_num_seqs or _REQUESTS, named, left)
