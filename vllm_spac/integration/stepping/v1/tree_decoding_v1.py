"""Draft trees in vLLM's V1 model runner: drafted with EAGLE, verified by the stock kernels, a chain to all others.

vLLM's own sampler verifies: one call per level, on the rows that the requests have reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.integration.stepping.v1 import tree_attention_v1
from vllm_spac.integration.stepping.v1.tree_drafting_v1 import TreeDrafting, TreeDrafts
from vllm_spac.methods.trees.tensors import (
    FILLER,
    NOWHERE,
    BlockCopies,
    Layout,
    Scattered,
    Scratch,
    StepTrees,
    TensorRows,
    TreeTensors,
    VirtualBatch,
    descend,
)
from vllm_spac.methods.trees.tree_counters import TreeCounters

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Verified(NamedTuple):
    """What the target accepted in a step."""

    last: Tensor  # int64 [requests], last accepted row of each tree; 0: none but the root
    paths: list[list[int]]  # accepted rows per request, without the root
    output: SamplerOutput  # vLLM's; its tokens are int32 [requests, levels] with -1 behind the last of each request


def verified(
    sampler: Callable[..., SamplerOutput],
    logits: Tensor,
    metadata: SamplingMetadata,
    trees: TreeTensors,
    tokens: Tensor,
    rows: Tensor,
    outputs: Sequence[list[int]],
) -> Verified:
    """Walks the trees of a step with the target's choices.

    At each level the sampler sees the batch as it is without speculation after as many tokens: one row per request, the
    tokens accepted so far appended to its output, one draw from its generator. So penalties, bad words, minimum
    lengths, log-probabilities and seeds work as they do without speculation.

    Args:
        sampler: vLLM's sampler without speculation.
        logits: [all rows, V], the rows of each tree one after the other.
        metadata: of the batch.
        trees, tokens, rows: of each request, as for ``tensors.walk``.
        outputs: the output tokens of each request, the lists that vLLM's sampler and its processors read.
    """
    first, known = rows.cumsum(0) - rows, torch.arange(tokens.shape[1]) < rows[:, None]
    at, walking = torch.zeros_like(rows), [True] * len(outputs)
    said: list[list[int]] = [[] for _ in outputs]
    paths: list[list[int]] = [[] for _ in outputs]
    lengths = [len(output) for output in outputs]
    logprobs: list[LogprobsTensors | None] = []
    try:
        while any(walking):
            level = dataclasses.replace(
                metadata,
                generators={i: generator for i, generator in metadata.generators.items() if walking[i]},
                spec_token_ids=None,
            )
            output = sampler(logits=logits[first + at], sampling_metadata=level)
            chosen = output.sampled_token_ids[:, 0].long()
            at, on = descend(trees, tokens, known, at, chosen)
            walked, walking = walking, [before and after for before, after in zip(walking, on.tolist(), strict=True)]
            for request in range(len(outputs)):
                if walked[request]:
                    said[request].append(int(chosen[request]))
                if walking[request]:
                    paths[request].append(int(at[request]))
                    outputs[request].append(said[request][-1])
            logprobs.append(output.logprobs_tensors)
            if any(walking):
                for processor in metadata.logitsprocs.all:
                    processor.update_state(None)
    finally:
        for kept, length in zip(outputs, lengths, strict=True):
            del kept[length:]
    levels = max(map(len, said))
    padded = torch.tensor([[*each, *[-1] * (levels - len(each))] for each in said], dtype=torch.int32)
    output = dataclasses.replace(output, sampled_token_ids=padded, logprobs_tensors=_by_request(logprobs))
    return Verified(torch.tensor([path[-1] if path else 0 for path in paths]), paths, output)


def _by_request(levels: Sequence[LogprobsTensors | None]) -> LogprobsTensors | None:
    """Log-probabilities of all levels, in the order of requests; each level: one row per request."""
    if levels[0] is None or len(levels) == 1:
        return levels[0]
    parts = zip(*(level[:3] for level in levels if level is not None), strict=True)
    return type(levels[0])(*(torch.stack(part, 1).flatten(0, 1) if len(part[0]) else part[0] for part in parts))


class TreeDecoding:
    """The trees of one model runner.

    In each step: ``begin`` when vLLM has prepared the batch, the hooks of ``tree_attention_v1`` during the forward,
    ``verify`` in place of its rejection sampler, ``apply_accepted`` before ``drafting``.

    Args:
        runner: V1's, its KV cache initialised.
        shape: of the trees.
        scratch: blocks that no request uses.
        chooser: as of ``TreeDrafting``.
    """

    def __init__(
        self, runner: GPUModelRunner, shape: TreeShape, scratch: Scratch, chooser: Callable[[], Chooser | None]
    ) -> None:
        self._runner, self._shape, self.scratch = runner, shape, scratch
        self.drafting = TreeDrafting(runner, shape, scratch, chooser)
        self.counters = TreeCounters(shape.nodes)
        self._drafts: list[TreeDrafts] | None = None  # one per request of the batch, until they are verified
        self._known: dict[str, TreeDrafts] = {}  # those of the step that the drafter proposed, by request
        self._trees: TreeTensors | None = None  # of all requests of the batch, once they are needed
        self._step: StepTrees | None = None  # those that branch
        self._layout: Layout  # of the step, if it has such trees
        self._last: Tensor | None = None  # last accepted row of each tree of ``_step``
        self.accepted: list[list[int]] | None = None  # drafts of each request of the step; None if none had any
        self.scattered: Scattered | None = None  # while the target runs
        drafts = runner.drafter._draft_attn_layer_names
        names = runner.kv_cache_config.kv_cache_groups[0].layer_names
        self._layers = [name for name in names if name not in drafts]
        tree_attention_v1.install(runner, self._layers, lambda: self.scattered, self.virtual)
        self._verify_plainly = runner.rejection_sampler.forward
        runner.rejection_sampler.forward = self.verify

    @property
    def _block_size(self) -> int:
        return self._runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    @property
    def _block_table(self) -> Tensor:
        batch = self._runner.input_batch
        return batch.block_table[0].get_device_tensor(batch.num_reqs)

    # -- the target's forward --------------------------------------------------------------------------------

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Takes up the trees of a prepared batch: positions, scratch, and what the hooks of attention need."""
        batch = self._runner.input_batch
        drafts = scheduled.scheduled_spec_decode_tokens
        self._known = self.drafting.take(drafts)
        self.counters.unknown += sum(bool(tokens) and r not in self._known for r, tokens in drafts.items())
        self._drafts = [self._known.get(r) or TreeDrafts.chain(drafts.get(r, ())) for r in batch.req_ids]
        for request in scheduled.finished_req_ids:
            self.drafting.drafted.pop(request, None)
        self._trees = self._step = self._last = self.accepted = self.scattered = None
        if any(each.branches for each in self._drafts):
            self._take_up(self._drafts, [scheduled.num_scheduled_tokens[request] for request in batch.req_ids])

    def _tensors(self, drafts: Sequence[TreeDrafts]) -> TreeTensors:
        """The trees of all requests of the batch, made once per step."""
        if self._trees is None:
            nodes = max([self._shape.nodes, *(len(each.tokens) for each in drafts)])
            depth = max([self._shape.depth, *(len(each.tokens) for each in drafts if not each.branches)])
            parents = torch.tensor([[*each.parents, *[FILLER] * (nodes + 1 - each.rows)] for each in drafts])
            self._trees = TreeTensors.of(parents, depth)
        return self._trees

    def _take_up(self, drafts: Sequence[TreeDrafts], counts: list[int]) -> None:
        """Prepares the forward for the trees that branch; ``counts``: rows of each request of the batch."""
        requests = np.array([number for number, each in enumerate(drafts) if each.branches])
        lengths, starts = np.array([len(each.tokens) for each in drafts]), np.cumsum([0, *counts])
        assert all(counts[number] == lengths[number] + 1 for number in requests), "a tree's rows are a request's rows"
        computed = torch.as_tensor(self._runner.input_batch.num_computed_tokens_cpu[requests]).long()
        self._layout, chosen = Layout.of(starts, lengths, requests), torch.from_numpy(requests)
        self._step = StepTrees(
            self._tensors(drafts).take(chosen),
            TensorRows(*torch.from_numpy(self._layout.rows)),
            computed,
            self._block_table[chosen],
            self.scratch.trees(len(requests)),
        )
        self._runner.positions[self._step.rows.token] = self._step.positions
        also = self._step.scattered(self._block_size)
        there = also.slots != NOWHERE
        self.scattered = Scattered(also.rows[there], also.slots[there])
        self._copy(self._step.before_forward(self._block_size))

    def weights(self, request: str, drafts: Sequence[int], rows: int) -> tuple[float, ...] | None:
        """``RequestRows.weights`` of a request of the step; arguments as of ``DraftProbabilities.weights``."""
        tree = self._known.get(request)
        return None if tree is None else (1.0,) * (rows - tree.rows) + tree.reached

    def parents(self, request: str) -> tuple[int, ...] | None:
        """``RequestRows.parents`` of a request of the step."""
        tree = self._known.get(request)
        return tree.parents[1:] if tree is not None and tree.branches else None

    def virtual(self, metadata: CommonAttentionMetadata) -> VirtualBatch | None:
        if self.scattered is None or self._step is None:
            return None
        owner, table = torch.from_numpy(self._layout.owner), metadata.block_table_tensor
        lengths, tables = self._step.sequences(owner, metadata.seq_lens, table, self._block_size)
        return VirtualBatch(torch.from_numpy(self._layout.starts), lengths, tables)

    def caches(self) -> list[Tensor]:
        """The KV cache of each attention layer of the target, [blocks, ...]."""
        layers = self._runner.compilation_config.static_forward_context
        return [layers[name].kv_cache for name in self._layers]

    def _copy(self, copies: BlockCopies) -> None:
        for cache in self.caches():
            copies.apply(cache)

    # -- its tokens ------------------------------------------------------------------------------------------

    def verify(
        self, metadata: SpecDecodeMetadata, draft_probs: Tensor | None, logits: Tensor, sampling: SamplingMetadata
    ) -> SamplerOutput:
        """In place of ``RejectionSampler.forward``: accepts a path of each tree, and moves its keys into place."""
        drafts, self._drafts, self.scattered = self._drafts, None, None
        if drafts is None:  # vLLM warms up its sampler
            return self._verify_plainly(metadata, draft_probs, logits, sampling)
        assert [len(each.tokens) for each in drafts] == list(metadata.num_draft_tokens)
        outputs, trees = self._runner.input_batch.req_output_token_ids, self._tensors(drafts)
        width = trees.parents.shape[1]
        tokens = torch.tensor([[-1, *each.tokens, *[-1] * (width - each.rows)] for each in drafts])
        rows = torch.tensor([each.rows for each in drafts])
        found = verified(self._runner.sampler, logits, sampling, trees, tokens, rows, outputs)
        self.accepted = [[row - 1 for row in path] for path in found.paths]
        if self._step is not None:
            self._last = found.last[torch.from_numpy(self._layout.requests)]
            self._copy(self._step.after_walk(self._last, self._block_size))
        self.counters.add_step(trees.parents, rows, torch.tensor(list(map(len, found.paths))))
        return found.output

    def apply_accepted(self, sampled: Sequence[Sequence[int]], states: Sequence[Tensor]) -> None:
        """Makes the step a chain for all that follows: the accepted rows come first, at consecutive positions.

        Args:
            sampled: tokens that each request emitted; none for a prompt that goes on.
            states: hidden states of the rows of the step, [rows, d] each; changed in place.
        """
        self.drafting.requests = [number for number, tokens in enumerate(sampled) if tokens]
        if self._step is None or self._last is None:
            return
        tokens = self._step.rows.token
        source = self._step.as_chains(self._last, int(tokens.max()) + 1)[tokens]
        for state in (*states, self._runner.input_ids.gpu):
            state[tokens] = state[source]
        self._runner.positions[tokens] = self._step.linear
