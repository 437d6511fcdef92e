"""How much fast memory the experts may take, leaving room for the KV cache."""

from __future__ import annotations

import logging
from pathlib import Path

import psutil
import torch

from vllm_spac.memory import available_host_bytes

logger = logging.getLogger("vllm.spac")

_WORKSPACE = 1 << 30  # activations, sampler, allocator slack
_FULL_REQUESTS = 4  # requests of the maximal length whose KV cache must fit beside the experts


def budget(vllm_config, device: torch.device, other_weights: int) -> int:
    """Bytes for slots: what vLLM may use, less what the rest of the model, a draft, the KV cache and activations need.

    Args:
        other_weights: bytes of the weights that are no experts. On a GPU they are allocated by now; on a machine
            without one, where fast memory is RAM, they become real when they are loaded.
    """
    utilization = vllm_config.cache_config.gpu_memory_utilization
    if device.type == "cpu":
        used, total = psutil.Process().memory_info().rss, psutil.virtual_memory().total
        free = min(utilization * total - used, available_host_bytes())
        if vllm_config.cache_config.kv_cache_memory_bytes is not None:  # the KV cache has its own share
            free = available_host_bytes()
        free -= other_weights
    else:
        available, total = torch.cuda.mem_get_info(device)
        free = available - (1 - utilization) * total
    return int(free) - draft_bytes(vllm_config) - _kv_bytes(vllm_config) - _WORKSPACE


def draft_bytes(vllm_config) -> int:
    """Bytes of the draft model, which is loaded after the target: those of its files.

    Prediction layers of the target's own checkpoint (MTP) count as so many of its layers.
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
            "spac: how large the draft %s is cannot be told before it is loaded, so no fast memory is left for it; if "
            "it does not fit, use fewer --spac-slots or a lower --gpu-memory-utilization",
            draft.model,
        )
    return nbytes


def _kv_bytes(vllm_config) -> int:
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        return explicit
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    requests = min(_FULL_REQUESTS, vllm_config.scheduler_config.max_num_seqs)
    return token * model.dtype.itemsize * model.max_model_len * requests
