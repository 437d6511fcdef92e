"""How much fast memory the experts may take, leaving room for the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from vllm_spac.cache.working import Batch, MoEWidths, Widths, Working
from vllm_spac.integration import graphs
from vllm_spac.integration.loading import kv_cache
from vllm_spac.system.host_memory import available_host_bytes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.spac")


def working(vllm_config: VllmConfig, device: torch.device, layers: Iterable[MoEWidths]) -> Working:
    """Computes the run-time buffers from a checked configuration; ``layers``: the kinds of MoE layers of the model."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    scheduler, speculation = vllm_config.scheduler_config, vllm_config.speculative_config
    compilation = vllm_config.compilation_config
    most = graphs.most_rows(vllm_config)
    drafts = 0 if speculation is None else speculation.num_speculative_tokens or 0
    captured, sizes = 0, 0
    mode = compilation.cudagraph_mode
    if device.type != "cpu" and mode is not None and mode.name != "NONE":
        captured = compilation.max_cudagraph_capture_size or 0
        kinds = {mode.decode_mode().name, mode.mixed_mode().name} - {"NONE"}
        sizes = len(compilation.cudagraph_capture_sizes or ()) * len(kinds)
    widths = Widths(
        hidden=model.get_hidden_size(),
        heads=model.get_num_attention_heads(parallel),
        kv_heads=model.get_num_kv_heads(parallel),
        head=model.get_head_size(),
        dense=getattr(model.hf_text_config, "intermediate_size", None) or 0,
        moe=tuple(layers),
        itemsize=model.dtype.itemsize,
    )
    sampled = min(most, scheduler.max_num_seqs * (1 + drafts))
    return Working.of(widths, model.get_vocab_size(), Batch(most, sampled, captured, sizes))


def budget(
    vllm_config: VllmConfig,
    device: torch.device,
    other_weights: int,
    working: int,
    host_memory: int = 0,
    ranks: int = 1,
) -> int:
    """Bytes available for slots: what vLLM may use, less what the other weights, a draft, the KV cache and steps need.

    Args:
        vllm_config: of the engine.
        device: the fast memory's.
        other_weights: bytes of the weights that are not experts. On a GPU they are already allocated; on a machine
            without one, where fast memory is RAM, they occupy memory only when they are loaded.
        working: ``Working.total``, bytes.
        host_memory: bytes of experts between slots and disk, a part of fast memory where that is RAM.
        ranks: processes that share RAM equally. A GPU is of one rank alone.
    """
    utilization = vllm_config.cache_config.gpu_memory_utilization
    if device.type == "cpu":
        used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        available = available_host_bytes() // ranks
        free = min(utilization * total / ranks - used, available)
        if vllm_config.cache_config.kv_cache_memory_bytes is not None:  # the KV cache has its own share
            free = available
        free -= other_weights + host_memory
    else:
        available, total = torch.cuda.mem_get_info(device)
        free = available - (1 - utilization) * total
    return int(free) - draft_bytes(vllm_config) - kv_cache.beside_slots(vllm_config) - working


def draft_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the draft model, which is loaded after the target; estimated by the size of its files.

    Prediction layers in the target's own checkpoint (MTP) count like as many of its layers.
    """
    speculation, target = vllm_config.speculative_config, vllm_config.model_config
    draft = None if speculation is None else speculation.draft_model_config
    if draft is None or draft is target:
        return 0
    files = [path for path in Path(draft.model).glob("*.safetensors") if not path.name.startswith("consolidated")]
    nbytes = sum(path.stat().st_size for path in files or Path(draft.model).glob("*.bin"))
    if draft.model == target.model and speculation.method != "draft_model":
        if speculation.method != "mtp":
            return 0
        layers = target.get_num_layers(vllm_config.parallel_config)
        predicting = getattr(draft.hf_config, "n_predict", None) or 1
        nbytes = -(-nbytes * predicting // (layers + predicting))
    if nbytes == 0:
        logger.warning(
            "spac: the size of the draft %s is unknown before it is loaded, so no fast memory is reserved for it; if "
            "it does not fit, use fewer --spac-slots or a lower --gpu-memory-utilization",
            draft.model,
        )
    return nbytes
