"""Sets up draft trees for a model runner once its KV cache exists, and what cuts and leaves out drafts on a device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.decisions.guard.guard import Guard
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.draft_cutting import DraftCutter
from vllm_spac.integration.hooks.draft_reading import DraftReading
from vllm_spac.integration.hooks.drafter_forwards import DrafterForwards
from vllm_spac.integration.hooks.drafts import plans_drafts, weighs_there
from vllm_spac.integration.hooks.runner_hooks import managed_experts
from vllm_spac.integration.stepping.tree_decoding_v1 import TreeDecoding
from vllm_spac.integration.stepping.tree_decoding_v2 import TreeDecodingV2
from vllm_spac.methods.trees.tensors import Scratch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

logger = logging.getLogger("vllm.spac")


def install(vllm_config: VllmConfig) -> None:
    """Wraps ``initialize_kv_cache`` of the model runner that an engine uses; a second call does nothing."""
    runner = patches.RUNNER_V2 if plans_drafts(vllm_config) else patches.RUNNER_V1
    patches.wrap(f"{runner}.initialize_kv_cache", _initializing)


def trees_of(runner: RunnerV1) -> TreeDecoding | None:
    """The trees of a V1 runner; None if it drafts chains, or has not been initialised."""
    return getattr(runner, "_spac_trees", None)


def device_trees_of(runner: RunnerV2) -> TreeDecodingV2 | None:
    """The trees of a V2 runner; None as of ``trees_of``."""
    return getattr(runner, "_spac_trees", None)


def _initializing(initialize: Callable):
    def initialized(self, kv_cache_config: KVCacheConfig, is_profiling: bool = False, *args: Any, **kwargs: Any):
        result = initialize(self, kv_cache_config, is_profiling, *args, **kwargs)
        experts = managed_experts(self)
        if is_profiling or experts is None:
            return result
        if experts.config.draft_tree is not None:
            _plant(self, experts, kv_cache_config)
        weighs = experts.config.votes_alpha is not None and weighs_there(self.vllm_config)
        if (chooser := experts.serving.cuts) is not None or weighs:
            experts.cutter = DraftCutter(self, chooser, experts.runtime, experts.trees, weighs)
        _follow(self, experts)
        return result

    return initialized


def _follow(runner: RunnerV2, experts: Any) -> None:
    """Has a V2 drafter run as often as the guard plans; last, around what else is around it."""
    guard = experts.serving.guard
    if not isinstance(guard, Guard) or patches.is_off(f"{patches.SPECULATOR}.propose"):
        return
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    drafter, runtime = runner.speculator, experts.runtime
    if isinstance(drafter, DraftModelSpeculator):
        loops = isinstance(drafter, StandaloneARSpeculator)
        experts.forwards = DrafterForwards(drafter, lambda: guard.rests, lambda: not runtime.warms_up, loops)


def _plant(runner: Any, experts: Any, kv_cache_config: KVCacheConfig) -> None:
    _check(runner, kv_cache_config)
    shape, block_size = experts.config.draft_tree, kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    scratch = Scratch(shape, runner.vllm_config.scheduler_config.max_num_seqs, block_size, runner.device)
    share = 100 * scratch.count / kv_cache_config.num_blocks
    logger.info(
        "spac: draft trees of up to %d nodes and %d levels; their scratch takes %d of %d KV cache blocks (%.1f%%)",
        shape.nodes,
        shape.depth,
        scratch.count,
        kv_cache_config.num_blocks,
        share,
    )
    if plans_drafts(runner.vllm_config):
        runner._spac_trees = TreeDecodingV2(runner, shape, scratch)
    else:
        runtime = experts.runtime
        runner._spac_trees = TreeDecoding(runner, shape, scratch, lambda: runtime.chooser, DraftReading(experts))
    experts.trees = runner._spac_trees


def _check(runner: RunnerV1 | RunnerV2, kv_cache_config: KVCacheConfig) -> None:
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
