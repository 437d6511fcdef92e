"""vLLM's schedulers without the KV cache blocks that trees use as scratch; named by ``--scheduler-cls``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_spac.config.config import config_of
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.stepping.tree_arguments import requests_at_once
from vllm_spac.methods.trees.tensors import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_spac.config.tree_shape import TreeShape


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
    reserve(scheduler, vllm_config, config.draft_tree)


def reserve(scheduler: Scheduler, vllm_config: VllmConfig, shape: TreeShape) -> None:
    """Takes the scratch blocks out of a new scheduler's pool, for good; bounds the requests at once to those that fit.

    ``tree_arguments`` has bounded them where the size of the KV cache was known before; workers bound them as here.

    Raises:
        ConfigError: the trees of one request would take too much of the KV cache; says what helps.
    """
    pool, size = scheduler.kv_cache_manager.block_pool, vllm_config.cache_config.block_size
    asked, usable = vllm_config.scheduler_config.max_num_seqs, pool.get_num_free_blocks()
    fit = requests_at_once(shape, vllm_config, usable, size)
    scratch = Scratch(shape, fit, size)
    if fit < asked:
        scheduler.max_num_running_reqs = scheduler.max_num_active_reqs = fit
    taken = [block.block_id for block in pool.get_new_blocks(scratch.count)]
    if taken != list(range(1, scratch.count + 1)):
        raise UnsupportedError(
            f"spac: trees (--spac-tree) need the first blocks of the KV cache, and this vLLM gave {taken[:4]}...; "
            "use a vLLM that the plugin was tested with (see the README)"
        )
