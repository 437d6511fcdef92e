"""Hooks of the target model's attention in V1's runner: rows of draft trees are sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_spac.integration.stepping.tree_attention import updating
from vllm_spac.methods.trees.tensors import Scattered, VirtualBatch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def install(
    runner: GPUModelRunner,
    names: list[str],
    scattered: Callable[[], Scattered | None],
    virtual: Callable[[CommonAttentionMetadata], VirtualBatch | None],
) -> None:
    """Sets the hooks on the attention layers of the target and on the builders of their metadata.

    Args:
        runner: its KV cache has been initialised.
        names: of the attention layers.
        scattered: as of ``updating``.
        virtual: asked in each forward for the batch that attention sees; None: the forward verifies no tree.
    """
    for builder in _builders(runner):
        builder.build = _building(builder.build, virtual)
    for name in names:
        impl = runner.compilation_config.static_forward_context[name].impl
        impl.do_kv_cache_update = updating(impl.do_kv_cache_update, scattered)


def _builders(runner: GPUModelRunner) -> Iterator[Any]:
    for groups in runner.attn_groups:
        for group in groups:
            yield from group.metadata_builders


def _building(build: Callable, virtual: Callable) -> Callable:
    def built(common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any):
        batch = virtual(common_attn_metadata)
        metadata = common_attn_metadata if batch is None else expanded(common_attn_metadata, batch)
        return build(common_prefix_len, metadata, *args, **kwargs)

    return built


def expanded(metadata: CommonAttentionMetadata, batch: VirtualBatch) -> CommonAttentionMetadata:
    """The metadata of a batch whose requests are the sequences of ``batch``."""
    queries = batch.query_start[1:] - batch.query_start[:-1]
    return dataclasses.replace(
        metadata,
        query_start_loc=batch.query_start,
        query_start_loc_cpu=batch.query_start,
        seq_lens=batch.lengths,
        seq_lens_cpu_upper_bound=batch.lengths.clone(),
        num_reqs=len(batch.lengths),
        max_query_len=int(queries.max()),
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.block_table,
        is_prefilling=None,
    )
