"""How large the KV cache should be: what slots leave for it, and what requests can use."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_FULL_REQUESTS = 4  # requests of maximum length whose KV cache must fit next to the experts


def sized_by_user(vllm_config: VllmConfig) -> bool:
    """Whether the user said how large the KV cache is, or how much memory vLLM may take."""
    from vllm.config import CacheConfig

    cache = vllm_config.cache_config
    given = cache.kv_cache_memory_bytes, cache.num_gpu_blocks_override
    return given != (None, None) or cache.gpu_memory_utilization != CacheConfig.gpu_memory_utilization


def usable(vllm_config: VllmConfig, specs: Collection[KVCacheSpec]) -> int | None:
    """Bytes of KV cache that requests can use; None if layers of several kinds share its blocks.

    These are ``max_num_seqs`` requests of ``max_model_len`` tokens, and with a prefix cache as much again for what
    earlier requests left, and the block that vLLM keeps empty.

    Args:
        specs: of each layer with a KV cache, the draft model's included.
    """
    if len({type(spec) for spec in specs}) != 1:
        return None
    each = sum(spec.max_memory_usage_bytes(vllm_config) for spec in specs)
    return _times(vllm_config) * each + sum(spec.page_size_bytes for spec in specs)


def _times(vllm_config: VllmConfig) -> int:
    kept = 2 if vllm_config.cache_config.enable_prefix_caching else 1
    return kept * vllm_config.scheduler_config.max_num_seqs


def requests(vllm_config: VllmConfig) -> str:
    """Those that ``usable`` counts, for the log."""
    count, tokens = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
    prefixes = " and as many prefixes of earlier ones" if vllm_config.cache_config.enable_prefix_caching else ""
    return f"--max-num-seqs {count} requests of --max-model-len {tokens} tokens{prefixes}"


def beside_slots(vllm_config: VllmConfig) -> int:
    """Bytes that slots leave for it: the configured size, else enough for ``_FULL_REQUESTS`` of maximum length."""
    explicit = vllm_config.cache_config.kv_cache_memory_bytes
    if explicit is not None:
        return explicit
    return _reserved(vllm_config) * _request_bytes(vllm_config)


def least_requests(vllm_config: VllmConfig) -> str:
    """Those that ``beside_slots`` leaves room for, for an error."""
    count = _reserved(vllm_config)
    return f"{count} requests" if count > 1 else "one request"


def _reserved(vllm_config: VllmConfig) -> int:
    return min(_FULL_REQUESTS, vllm_config.scheduler_config.max_num_seqs)


def _request_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of a request of maximum length, from the configuration; layers may keep a window of its tokens only."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    tokens = sum(
        model.max_model_len if window is None else min(model.max_model_len, window + scheduler.max_num_batched_tokens)
        for window in _windows(model, vllm_config)
    )
    values = model.get_num_kv_heads(vllm_config.parallel_config) * model.get_head_size()
    return tokens * values * (1 if model.use_mla else 2) * model.dtype.itemsize  # MLA: one vector for keys and values


def _windows(model: ModelConfig, vllm_config: VllmConfig) -> list[int | None]:
    """Returns the tokens that each attention layer keeps; None: all."""
    layers, text = model.get_num_layers(vllm_config.parallel_config), model.hf_text_config
    kinds, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    if not kinds or not window or vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return [None] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds[:layers]]
