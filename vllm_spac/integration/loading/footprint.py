"""What a worker takes beside its slots on a CPU, where all of it is RAM."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from vllm_spac.integration import patches
from vllm_spac.integration.layers.host import experts_of
from vllm_spac.integration.loading import kv_cache
from vllm_spac.system.host_memory import gib, own_memory, release_freed_memory, release_zeros

logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Wraps the worker of a CPU: how large the KV cache is, and what follows once it exists. A second call is none."""
    patches.wrap(f"{patches.CPU_WORKER}.determine_available_memory", _bounded)
    patches.wrap(f"{patches.CPU_WORKER}.compile_or_warm_up_model", _settled)


def _bounded(determine: Callable[[Any], int]):
    def bounded(self) -> int:
        found = determine(self)
        experts, config = experts_of(self.model_runner), self.vllm_config
        if experts is None or experts.config.tree or kv_cache.sized_by_user(config):  # trees take a share as scratch
            return found
        most = kv_cache.usable(config, self.model_runner.get_kv_cache_spec().values())
        if most is None or most >= found:
            return found
        logger.info(
            "spac: the KV cache is %s, not the %s that are left, because %s can use no more; to choose its size, set "
            "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE or --gpu-memory-utilization",
            gib(most),
            gib(found),
            kv_cache.requests(config),
        )
        return most

    return bounded


def _settled(warm_up: Callable):
    def settled(self):
        result = warm_up(self)
        if (experts := experts_of(self.model_runner)) is not None:
            settle(experts, self.model_runner)
        return result

    return settled


def settle(experts: Any, runner: Any) -> None:
    """Returns memory that no request needs yet, and logs what the rest is; once vLLM has warmed up.

    vLLM fills the KV cache with zeros, which makes it resident. It is in no page until a request writes to it.

    Args:
        experts: the ``ModelExperts`` of the runner's model.
    """
    caches = list(_caches(runner))
    if experts.vllm_config.kv_transfer_config is None:  # a connector may have registered the pages
        for cache in caches:
            release_zeros(cache)
    release_freed_memory()
    if experts.ranks.rank == 0:
        logger.info("spac: %s", _described(experts, sum(cache.nbytes for cache in caches), runner))


def _caches(runner: Any) -> Iterator[torch.Tensor]:
    """Yields the memory of the KV cache, uint8 [bytes], each allocation once."""
    seen = set()
    for cache in runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else (cache,):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _described(experts: Any, kv: int, runner: Any) -> str:
    slots, weights, total = experts.fast_bytes, experts.other_weights, own_memory()
    text = (
        f"this worker takes {gib(total)}: {gib(slots)} of slots, {gib(weights)} of other weights, "
        f"{gib(max(0, total - slots - weights))} of vLLM, torch and buffers; requests take up to {gib(kv)} more for "
        "their KV cache"
    )
    most = kv_cache.usable(experts.vllm_config, runner.get_kv_cache_spec().values())
    if most is not None and most < kv:
        text += f", of which they can use {gib(most)}: --kv-cache-memory-bytes {most}"
    return text
