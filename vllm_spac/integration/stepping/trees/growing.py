"""Drafts trees with vLLM's EAGLE drafter: its own first pass, then one forward per level over the expanded nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.integration.stepping.trees.scratch import Scratch
from vllm_spac.speculation.trees.draft_tree import DraftTree
from vllm_spac.speculation.trees.growth import Growth
from vllm_spac.speculation.trees.shape import TreeShape
from vllm_spac.speculation.trees.virtual_batch import level_batch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.eagle import EagleProposer


@dataclasses.dataclass
class FirstPass:
    """What vLLM's first pass of the drafter leaves: its outputs at the last token of each request.

    Attributes:
        last: [requests, d], hidden states that logits are computed from.
        hidden: [requests, d], hidden states that the next forward takes.
        positions: int64 [requests], of these tokens.
        metadata: of the pass; its block tables are the requests'.
    """

    last: Tensor
    hidden: Tensor
    positions: Tensor
    metadata: CommonAttentionMetadata


def first_pass(drafter: EagleProposer, propose: Callable, *args: Any, **kwargs: Any) -> FirstPass:
    """Runs vLLM's ``propose`` for one token, which writes the drafter's keys and values of all accepted tokens."""
    found: dict[str, Any] = {}
    prepare = drafter.set_inputs_first_pass

    def prepared(*given: Any, **named: Any):
        result = prepare(*given, **named)
        found["rows"], found["metadata"] = result[1], result[2]
        return result

    handle = drafter.model.register_forward_hook(lambda module, given, output: found.update(output=output))
    drafter.set_inputs_first_pass = prepared
    try:
        propose(1, *args, **kwargs)
    finally:
        del drafter.set_inputs_first_pass
        handle.remove()
    rows, (last, hidden) = found["rows"], found["output"]
    return FirstPass(last[rows], hidden[rows].clone(), drafter.positions[rows].clone(), found["metadata"])


def grow(
    drafter: EagleProposer, shape: TreeShape, scratch: Scratch, start: FirstPass, requests: Sequence[int], nodes: int
) -> list[DraftTree]:
    """Drafts one tree for each of ``requests``, numbers of the batch, with at most ``nodes`` draft tokens."""
    chosen = torch.tensor(requests)
    caches = _caches(drafter)
    table = start.metadata.block_table_tensor[chosen]
    bases = start.positions[chosen] + 1
    growth = Growth(shape, drafter.model.compute_logits(start.last[chosen]).float().log_softmax(-1))
    hidden = start.hidden[chosen]
    places, previous = scratch.levels(len(requests)), None
    size = drafter.block_size
    while not growth.over:
        front = growth.expanded.shape[1]
        here = places[growth.level % 2, :, :front]
        parents = growth.parent[..., None]
        if previous is None:
            before = hidden[:, None].expand(-1, front, -1)
            own = table.gather(1, (bases // size)[:, None].long()).long()
            _copy(caches, own.expand(-1, front).flatten(), here[..., 0].flatten())
        else:
            before = hidden.gather(1, parents.expand(-1, -1, hidden.shape[-1]))
            there = previous.gather(1, parents.expand(-1, -1, scratch.each))
            _copy(caches, there.flatten(), here.flatten())
        batch = level_batch(table, bases, growth.level, here, size)
        last, hidden = _forward(drafter, growth, batch, before, start.metadata)
        growth.add(drafter.model.compute_logits(last).float().log_softmax(-1).view(len(requests), front, -1))
        hidden, previous = hidden.view(len(requests), front, -1), here
    return growth.trees(nodes)


def _forward(drafter: EagleProposer, growth: Growth, batch, hidden: Tensor, metadata: CommonAttentionMetadata):
    """Runs the drafter on one level: (hidden states for logits, hidden states for the next level), [R * F, d]."""
    from vllm.forward_context import set_forward_context

    count = len(batch.lengths)
    starts = torch.arange(count + 1, dtype=torch.int32)
    level = dataclasses.replace(
        metadata,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=batch.lengths,
        seq_lens_cpu_upper_bound=batch.lengths.clone(),
        num_reqs=count,
        num_actual_tokens=count,
        max_query_len=1,
        max_seq_len=int(batch.lengths.max()),
        block_table_tensor=batch.block_table,
        slot_mapping=batch.slots,
        is_prefilling=None,
        positions=None,
    )
    _, per_layer = drafter.build_per_group_and_layer_attn_metadata(level, draft_index=growth.level)
    with set_forward_context(
        per_layer, drafter.vllm_config, num_tokens=count, slot_mapping=drafter._get_slot_mapping(count, batch.slots)
    ):
        return drafter.model(
            input_ids=growth.tokens.flatten().int(),
            positions=batch.positions,
            inputs_embeds=None,
            hidden_states=hidden.flatten(0, 1).contiguous(),
        )


def _caches(drafter: EagleProposer) -> list[Tensor]:
    layers = drafter.vllm_config.compilation_config.static_forward_context
    return [layers[name].kv_cache for name in drafter._draft_attn_layer_names]


def _copy(caches: Sequence[Tensor], sources: Tensor, targets: Tensor) -> None:
    for cache in caches:
        cache[targets] = cache[sources]
