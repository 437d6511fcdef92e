"""Refuses, before a worker starts, what cannot have room: slots for one token, a KV cache in RAM."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import psutil

from vllm_spac.cache import sizing
from vllm_spac.checkpoint.headers import find_folder, read_checkpoint
from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.integration.loading import kv_cache
from vllm_spac.knobs.types import Slots
from vllm_spac.system.host_memory import available_host_bytes, gib

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check(config: SpacConfig, vllm_config: VllmConfig, on_cpu: bool) -> None:
    """Checks what is known without weights; the rest is checked when they are loaded.

    Raises:
        ConfigError: names the flag and what would fit.
    """
    parallel = vllm_config.parallel_config
    ranks_of_experts = parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1
    check_slots(config.parsed_slots, vllm_config.model_config.model, ranks_of_experts)
    if on_cpu:
        check_kv_cache(vllm_config)


def check_slots(slots: Slots, model: str, ranks: int = 1) -> None:
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


def check_kv_cache(vllm_config: VllmConfig) -> None:
    """Refuses a KV cache that is larger than the RAM that is available to a worker."""
    ranks, needed = vllm_config.parallel_config.tensor_parallel_size, kv_cache.beside_slots(vllm_config)
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
    raise ConfigError(
        f"spac: the KV cache of {kv_cache.least_requests(vllm_config)} of --max-model-len {model.max_model_len} takes "
        f"{problem}; lower --max-model-len, or bound it with --kv-cache-memory-bytes"
    )
