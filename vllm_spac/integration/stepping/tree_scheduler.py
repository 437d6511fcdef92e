"""vLLM's schedulers without the KV cache blocks that trees use as scratch; named by ``--scheduler-cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_spac.config.config import config_of
from vllm_spac.integration.stepping.tree_scratch import Scratch, reserve

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
