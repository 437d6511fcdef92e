"""Verifies trees with vLLM's own sampler: one call per level, on the rows that the requests have reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.speculation.trees.draft_tree import DraftTree
from vllm_spac.speculation.trees.verification import Walk

if TYPE_CHECKING:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata


def verified(
    sampler: Callable[..., SamplerOutput],
    logits: Tensor,
    metadata: SamplingMetadata,
    trees: Sequence[DraftTree],
    outputs: Sequence[list[int]],
) -> tuple[Walk, SamplerOutput]:
    """Walks the trees of a step with the target's choices.

    At each level the sampler sees the batch as it is without speculation after as many tokens: one row per request, the
    tokens accepted so far appended to its output, one draw from its generator. So penalties, bad words, minimum
    lengths, log-probabilities and seeds work as they do without speculation.

    Args:
        sampler: vLLM's sampler without speculation.
        logits: [rows, V], the rows of each tree one after the other.
        metadata: of the batch.
        trees: one per request.
        outputs: the output tokens of each request, the lists that vLLM's sampler and its processors read.

    Returns:
        (the finished walk, tokens as int32 [requests, levels] with -1 behind the last of each request, and their
        log-probabilities).
    """
    rows = torch.tensor([tree.rows for tree in trees])
    first = (rows.cumsum(0) - rows).to(logits.device)
    walk, lengths = Walk(trees), [len(output) for output in outputs]
    logprobs: list[LogprobsTensors | None] = []
    try:
        while not walk.over:
            level = dataclasses.replace(
                metadata,
                generators={i: generator for i, generator in metadata.generators.items() if walk.walking[i]},
                spec_token_ids=None,
            )
            at = first + torch.tensor(walk.at, device=logits.device)
            output = sampler(logits=logits[at], sampling_metadata=level)
            walk.advance(output.sampled_token_ids[:, 0].tolist())
            logprobs.append(output.logprobs_tensors)
            if not walk.over:
                _append(walk, outputs, metadata)
    finally:
        for tokens, length in zip(outputs, lengths, strict=True):
            del tokens[length:]
    return walk, dataclasses.replace(
        output, sampled_token_ids=_padded(walk, logits.device), logprobs_tensors=_by_request(logprobs)
    )


def _append(walk: Walk, outputs: Sequence[list[int]], metadata: SamplingMetadata) -> None:
    """Appends what the last level emitted to the output of each request that goes on."""
    for walking, tokens, emitted in zip(walk.walking, outputs, walk.tokens, strict=True):
        if walking:
            tokens.append(emitted[-1])
    for processor in metadata.logitsprocs.all:
        processor.update_state(None)


def _padded(walk: Walk, device: torch.device) -> Tensor:
    levels = max(map(len, walk.tokens))
    rows = [[*tokens, *[-1] * (levels - len(tokens))] for tokens in walk.tokens]
    return torch.tensor(rows, dtype=torch.int32, device=device)


def _by_request(levels: Sequence[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Log-probabilities of all levels, in the order of requests; each level: one row per request."""
    if levels[0] is None or len(levels) == 1:
        return levels[0]
    parts = zip(*(level[:3] for level in levels if level is not None), strict=True)
    return type(levels[0])(*(torch.stack(part, 1).flatten(0, 1) if len(part[0]) else part[0] for part in parts))
