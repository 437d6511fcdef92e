"""Sets up draft trees for a model runner once its KV cache exists, and what cuts and leaves out drafts on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.runner_hooks import managed_experts
from vllm_spac.integration.stepping.runner_adapter import RunnerAdapter
from vllm_spac.integration.stepping.tree_arguments import requests_at_once
from vllm_spac.methods.trees.tensors import Scratch
from vllm_spac.recording import last_words

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.spac")


def install(adapter: RunnerAdapter) -> None:
    """Wraps ``initialize_kv_cache`` of the model runner that an engine uses; a second call does nothing."""
    patches.install(f"{adapter.runner}.initialize_kv_cache", partial(_initializing, adapter))


def trees_of(runner: Any) -> Any:
    """What ``RunnerAdapter.plant`` returned for a runner; None if it drafts chains, or has not been initialised."""
    return getattr(runner, "_spac_trees", None)


def _initializing(adapter: RunnerAdapter, initialize: Callable):
    def initialized(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any):
        result = initialize(self, kv_cache_config, is_profiling, *args, **kwargs)
        experts = managed_experts(self)
        if is_profiling or experts is None:
            return result
        with last_words.reporting():
            if experts.config.draft_tree is not None:
                _plant(adapter, self, experts, kv_cache_config)
            adapter.install_draft_hooks(self, experts)
        return result

    return initialized


def _plant(adapter: RunnerAdapter, runner: Any, experts: Any, kv_cache_config: KVCacheConfig) -> None:
    _check(runner, kv_cache_config)
    shape, block_size = experts.config.draft_tree, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    scheduler, usable = runner.vllm_config.scheduler_config, kv_cache_config.num_blocks - 1  # block 0 is vLLM's own
    requests, asked = requests_at_once(shape, runner.vllm_config, usable, block_size), scheduler.max_num_seqs
    if requests < asked:
        scheduler.max_num_seqs = requests
        logger.warning(
            "spac: requests at once: %d, not the %d of --max-num-seqs, because scratch of draft trees takes at most a "
            "fifth of %d KV cache blocks; for more, use a smaller --spac-tree or a larger --kv-cache-memory-bytes",
            requests,
            asked,
            usable,
        )
    scratch = Scratch(shape, requests, block_size, runner.device)
    share = 100 * scratch.count / kv_cache_config.num_blocks
    logger.info(
        "spac: draft trees of up to %d nodes and %d levels; their scratch takes %d of %d KV cache blocks (%.1f%%)",
        shape.nodes,
        shape.depth,
        scratch.count,
        kv_cache_config.num_blocks,
        share,
    )
    runner._spac_trees = experts.trees = adapter.plant(runner, experts, shape, scratch)


def _check(runner: Any, kv_cache_config: KVCacheConfig) -> None:
    """Raises ``UnsupportedError`` if the model's attention cannot verify trees."""
    from vllm.platforms import current_platform

    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"spac: trees (--spac-tree) need one group of KV cache blocks, this model has {len(groups)}; "
            "add --disable-hybrid-kv-cache-manager, or drop --spac-tree"
        )
    layers = runner.compilation_config.static_forward_context
    for name in groups[0].layer_names:
        found = type(layers[name].impl).__name__
        if not hasattr(layers[name].impl, "do_kv_cache_update"):
            raise UnsupportedError(
                f"spac: trees (--spac-tree) need an attention backend that writes its cache before it attends, and "
                f"{found} of {name} does not; drop --spac-tree"
            )
        if not current_platform.is_cpu() and found != "TritonAttentionImpl":
            raise UnsupportedError(
                f"spac: trees (--spac-tree) were tried with TRITON_ATTN only on a GPU, and {name} has {found}; "
                "add --attention-backend TRITON_ATTN"
            )
    if any(size != groups[0].kv_cache_spec.block_size for size in getattr(runner, "kernel_block_sizes", ())):
        raise UnsupportedError(
            f"spac: trees (--spac-tree) copy blocks of {groups[0].kv_cache_spec.block_size} tokens, and the attention "
            f"kernel has blocks of {runner.kernel_block_sizes}; use --block-size {min(runner.kernel_block_sizes)}"
        )
