"""Blocks of the KV cache that trees are verified and grown in: taken from the pool before any request gets one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.trees.tensors import scratch_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler

MOST_SHARE = 0.2  # of the KV cache


class Scratch:
    """The scratch blocks of an engine: the ids 1 to ``count``, which a new pool hands out first (0 is vLLM's own).

    Args:
        shape: of the trees.
        requests: most requests of a step.
        block_size: tokens per block.
        device: where the ids are used.
    """

    def __init__(self, shape: TreeShape, requests: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.each = scratch_blocks(shape.depth, block_size)
        self._rows, self._front = shape.nodes + 1, shape.front
        self.count = requests * self.each * max(self._rows, 2 * self._front)
        self._ids = torch.arange(1, self.count + 1, device=device)

    def trees(self, count: int) -> Tensor:
        """Blocks of all rows of ``count`` trees of a step, int64 [count, n + 1, blocks of each]."""
        return self._of(count, self._rows)

    def levels(self, requests: int) -> Tensor:
        """Blocks of two levels of growth, int64 [2, requests, front, blocks of each]."""
        return self._of(2, requests, self._front)

    def _of(self, *parts: int) -> Tensor:
        return self._ids[: math.prod(parts) * self.each].view(*parts, self.each)


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


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of ``array`` on the device, which neither waits for it nor makes it wait for the host."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(array, device=device)
