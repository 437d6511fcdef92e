"""Sets up ``TreeDecoding`` for a V1 model runner once its KV cache exists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration import patches
from vllm_spac.integration.stepping.runner_hooks import managed_experts
from vllm_spac.integration.stepping.trees.decoding import TreeDecoding
from vllm_spac.integration.stepping.trees.scratch import Scratch
from vllm_spac.speculation.tree_guard import TreeGuard

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger("vllm.spac")


def install() -> None:
    """Wraps V1's ``initialize_kv_cache``; a second call does nothing."""
    patches.wrap(f"{patches.RUNNER_V1}.initialize_kv_cache", _initializing)


def trees_of(runner: GPUModelRunner) -> TreeDecoding | None:
    """The trees of a runner; None if it drafts chains, or has not been initialised."""
    return getattr(runner, "_spac_trees", None)


def _initializing(initialize: Callable):
    def initialized(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any):
        result = initialize(self, kv_cache_config, is_profiling, *args, **kwargs)
        experts = managed_experts(self)
        if is_profiling or experts is None or (shape := experts.config.draft_tree) is None:
            return result
        _check(self, kv_cache_config)
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        requests = self.vllm_config.scheduler_config.max_num_seqs
        guard = experts.guard if isinstance(experts.guard, TreeGuard) else None
        scratch = Scratch(shape, requests, block_size)
        self._spac_trees = TreeDecoding(self, shape, scratch, guard)
        share = 100 * scratch.count / kv_cache_config.num_blocks
        logger.info(
            "spac: draft trees of up to %d nodes and %d levels; their scratch takes %d of %d KV cache blocks (%.1f%%)",
            shape.nodes,
            shape.depth,
            scratch.count,
            kv_cache_config.num_blocks,
            share,
        )
        experts.trees = self._spac_trees
        return result

    return initialized


def _check(runner: GPUModelRunner, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``UnsupportedError`` if the model's attention cannot verify trees."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"spac: trees (--spac-tree) need one group of KV cache blocks, this model has {len(groups)}; "
            "add --disable-hybrid-kv-cache-manager, or drop --spac-tree"
        )
    layers = runner.compilation_config.static_forward_context
    for name in groups[0].layer_names:
        if not hasattr(layers[name].impl, "do_kv_cache_update"):
            raise UnsupportedError(
                f"spac: trees (--spac-tree) need an attention backend that writes its cache before it attends, and "
                f"{type(layers[name].impl).__name__} of {name} does not; drop --spac-tree"
            )
