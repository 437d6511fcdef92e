"""Grows trees with V2's EAGLE drafter: its own first pass, then one forward per level over the expanded nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.integration.stepping.trees.scratch import Scratch, to_device
from vllm_spac.speculation.trees.growth import Growth
from vllm_spac.speculation.trees.shape import TreeShape
from vllm_spac.speculation.trees.tensors import TreeTensors, trees_of
from vllm_spac.speculation.trees.virtual_batch import LevelBatch, level_batch

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator


class Drafter:
    """Replaces what follows the first pass of a V2 speculator.

    Args:
        speculator: its attention has been set up.
        shape: of the trees.
        scratch: blocks that no request uses.
        caches: KV cache of each of the drafter's attention layers, [blocks, ...].
        keep: gets (requests of the runner's state, int64 [R], their trees).
    """

    def __init__(
        self,
        speculator: EagleSpeculator,
        shape: TreeShape,
        scratch: Scratch,
        caches: Sequence[Tensor],
        keep: Callable[[Tensor, TreeTensors], None],
    ) -> None:
        self._speculator, self._shape, self._scratch, self._caches = speculator, shape, scratch, caches
        self._keep = keep
        self._chain: np.ndarray | None = None  # of the requests that are drafted for; None: made-up ones
        self._logits: Tensor | None = None  # of the first pass
        self._sample, speculator.sample_draft = speculator.sample_draft, self.sample_draft
        name = "_fused_multi_step_decode" if speculator.supports_decode_metadata_update else "_multi_step_decode"
        self._decode = getattr(speculator, name)
        vars(speculator)[name] = self.decode

    @contextmanager
    def growing(self, chain: np.ndarray | None) -> Iterator[None]:
        """Context of a call of the speculator's ``propose``.

        Args:
            chain: bool [requests], which get a chain; None: vLLM made the requests up, and drafts as it does.
        """
        self._chain = chain
        try:
            yield
        finally:
            self._chain = self._logits = None

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the speculator's: keeps the logits that the first level is drawn from."""
        if self._chain is None:
            return self._sample(hidden_states, *args, **kwargs)
        self._logits = self._speculator.compute_draft_logits(hidden_states, 0)
        return self._logits.argmax(-1)

    def decode(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """In place of the speculator's further steps: fills its ``draft_tokens`` with trees."""
        if self._chain is None or self._logits is None:
            return self._decode(num_reqs, *args, **kwargs)
        speculator = self._speculator
        chain = to_device(self._chain, speculator.device)
        tokens, trees = trees_of(self._grown(num_reqs, self._logits).chosen(), self._shape.depth, chain)
        speculator.draft_tokens[:num_reqs] = tokens
        self._keep(speculator.idx_mapping[:num_reqs], trees)

    def _grown(self, requests: int, logits: Tensor) -> Growth:
        speculator, size = (
            self._speculator,
            self._speculator.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
        )
        table = speculator.block_tables.input_block_tables[0][:requests]
        bases = speculator.input_buffers.positions[:requests].clone()  # vLLM has advanced them
        hidden = speculator.hidden_states[:requests].clone()
        growth = Growth(self._shape, logits.float().log_softmax(-1))
        places, previous = self._scratch.levels(requests), None
        while not growth.over:
            front = growth.expanded.shape[1]
            here, parents = places[growth.level % 2, :, :front], growth.parent[..., None]
            if previous is None:
                before = hidden[:, None].expand(-1, front, -1)
                own = table.gather(1, (bases // size)[:, None]).long()
                self._copy(own.expand(-1, front), here[..., 0])
            else:
                before = hidden.gather(1, parents.expand(-1, -1, hidden.shape[-1]))
                self._copy(previous.gather(1, parents.expand(-1, -1, self._scratch.each)), here)
            batch = level_batch(table, bases, growth.level, here, size)
            last, hidden = self._forward(growth, batch, before.flatten(0, 1))
            level = speculator.compute_draft_logits(last, growth.level).float().log_softmax(-1)
            hidden, previous = hidden.clone().view(requests, front, -1), here
            growth.add(level.view(requests, front, -1))
        return growth

    def _forward(self, growth: Growth, batch: LevelBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Runs the drafter on one level: (hidden states for logits, hidden states for the next level), [R * F, d]."""
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

        speculator, count = self._speculator, len(batch.lengths)
        most, buffers = speculator.max_model_len, speculator.input_buffers
        buffers.input_ids[:count] = growth.tokens.flatten().to(buffers.input_ids.dtype)
        # A request that is nearly full gets nodes behind its end: the scheduler does not verify them.
        buffers.positions[:count] = batch.positions.clamp(max=most - 1)
        speculator.hidden_states[:count] = hidden
        starts = torch.arange(count + 1, dtype=torch.int32)
        slots = batch.slots[None]
        metadata = build_attn_metadata(
            attn_groups=speculator.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=starts.to(speculator.device),
            query_start_loc_cpu=starts,
            max_query_len=1,
            seq_lens=batch.lengths.clamp(max=most),
            max_seq_len=most,
            block_tables=[batch.block_table],
            slot_mappings=slots,
            kv_cache_config=speculator.kv_cache_config,
            seq_lens_cpu_upper_bound=torch.full((count,), most, dtype=torch.int32),
            positions=buffers.positions[:count],
            is_prefilling=torch.zeros(count, dtype=torch.bool),
        )
        by_layer = build_slot_mappings_by_layer(slots, speculator.kv_cache_config)
        last, following = speculator._run_model(count, metadata, by_layer, num_tokens_across_dp=None)
        return last[:count], following[:count]

    def _copy(self, sources: Tensor, targets: Tensor) -> None:
        for cache in self._caches:
            cache[targets.flatten()] = cache[sources.flatten()]
