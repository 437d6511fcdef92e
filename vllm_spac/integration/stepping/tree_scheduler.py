"""vLLM's schedulers without the KV cache blocks that trees use as scratch; named by ``--scheduler-cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_spac.config.config import config_of
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.trees.tensors import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

MOST_SHARE = 0.2  # of the KV cache


class TreeScheduler(Scheduler):
    """Reserves the scratch blocks when it is created; schedules as vLLM's does."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        _reserve(self, vllm_config)


class AsyncTreeScheduler(AsyncScheduler):
    """As ``TreeScheduler``, for steps that are planned while the one before them runs."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        _reserve(self, vllm_config)


def _reserve(scheduler: Scheduler, vllm_config: VllmConfig) -> None:
    config = config_of(vllm_config.additional_config)
    assert config is not None and config.draft_tree is not None
    block_size = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    requests = vllm_config.scheduler_config.max_num_seqs
    reserve(scheduler, vllm_config, Scratch(config.draft_tree, requests, block_size))


def reserve(scheduler: Scheduler, vllm_config: VllmConfig, scratch: Scratch) -> None:
    """Takes the scratch blocks out of a new scheduler's pool, for good.

    Raises:
        ConfigError: they would take too much of the KV cache; says what helps.
    """
    pool, size = scheduler.kv_cache_manager.block_pool, vllm_config.cache_config.block_size
    usable = pool.get_num_free_blocks()
    left = usable - scratch.count
    if scratch.count > MOST_SHARE * usable or left * size < vllm_config.model_config.max_model_len:
        requests = vllm_config.scheduler_config.max_num_seqs
        fit = int(MOST_SHARE * usable * requests // scratch.count)
        raise ConfigError(
            f"spac: trees (--spac-tree) of {requests} requests at once need {scratch.count} of {usable} KV cache blocks"
            f" of {size} tokens as scratch, at most a fifth is given to them; use --max-num-seqs {max(1, fit)}, a "
            "smaller --spac-tree, a smaller --block-size, or a larger KV cache"
        )
    taken = [block.block_id for block in pool.get_new_blocks(scratch.count)]
    if taken != list(range(1, scratch.count + 1)):
        raise UnsupportedError(
            f"spac: trees (--spac-tree) need the first blocks of the KV cache, and this vLLM gave {taken[:4]}...; "
            "use a vLLM that the plugin was tested with (see the README)"
        )
