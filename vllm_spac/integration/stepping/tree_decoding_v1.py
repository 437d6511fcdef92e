"""Draft trees in vLLM's V1 model runner: drafted with EAGLE, verified by the stock kernels, a chain to all others.

The drafter runs vLLM's own first pass, then one forward per level over the expanded nodes. vLLM's own sampler verifies:
one call per level, on the rows that the requests have reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.tree_guard import TreeGuard
from vllm_spac.integration.stepping import tree_attention
from vllm_spac.integration.stepping.tree_scratch import Scratch
from vllm_spac.methods.trees.draft_tree import DraftTree, Walk
from vllm_spac.methods.trees.growth import Growth
from vllm_spac.methods.trees.tree_counters import TreeCounters
from vllm_spac.methods.trees.virtual_batch import (
    BlockCopies,
    Scattered,
    TreeRows,
    VirtualBatch,
    after_walk,
    before_forward,
    level_batch,
    scattered,
    virtual_batch,
)

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


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


class TreeDecoding:
    """The trees of one model runner.

    In each step: ``begin`` when vLLM has prepared the batch, the hooks of ``tree_attention`` during the forward,
    ``verify`` in place of its rejection sampler, ``restore`` before its drafter, ``propose`` in place of its drafter's.

    Args:
        runner: V1's, its KV cache initialised.
        shape: of the trees.
        scratch: blocks that no request uses.
        guard: learns which nodes are accepted, if it chooses the number of nodes.
    """

    def __init__(
        self, runner: GPUModelRunner, shape: TreeShape, scratch: Scratch, guard: TreeGuard | None = None
    ) -> None:
        self._guard = guard
        self._runner, self._shape, self.scratch = runner, shape, scratch
        self.counters = TreeCounters()
        self._drafted: dict[str, DraftTree] = {}  # by request, until the next step
        self._trees: list[DraftTree] | None = None  # one per request of the batch, until they are verified
        self._known: dict[str, DraftTree] = {}  # those of the step that the drafter proposed, by request
        self._rows: list[TreeRows] = []  # of those that branch
        self._paths: list[list[int]] = []  # accepted rows of each of ``_rows``
        self.accepted: list[list[int]] | None = None  # drafts of each request of the step; None if none had any
        self.scattered: Scattered | None = None  # while the target runs
        self._drafting: list[int] = []  # requests that the drafter continues
        drafter = runner.drafter
        names = [*runner.kv_cache_config.kv_cache_groups[0].layer_names]
        self._layers = [name for name in names if name not in drafter._draft_attn_layer_names]
        tree_attention.install(runner, self._layers, self)
        self._verify_plainly = runner.rejection_sampler.forward
        runner.rejection_sampler.forward = self.verify
        self._propose = drafter.propose
        drafter.propose = self.propose
        runner._input_fits_in_drafter = self.drafts_at_all

    @property
    def _block_size(self) -> int:
        return self._runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size

    @property
    def _block_table(self) -> Tensor:
        batch = self._runner.input_batch
        return batch.block_table[0].get_device_tensor(batch.num_reqs)

    def _tree_of(self, request: str, drafts: Sequence[int]) -> DraftTree:
        """The tree whose first drafts a request verifies; drafts that were not ours are verified as a chain."""
        tree = self._drafted.pop(request, None) if drafts else None
        if tree is not None and tuple(drafts) == tree.tokens[: len(drafts)]:
            self._known[request] = tree.cut(len(drafts))
            return self._known[request]
        self.counters.unknown += bool(drafts)
        return DraftTree.chain(drafts)

    # -- the target's forward --------------------------------------------------------------------------------

    def begin(self, scheduled: SchedulerOutput) -> None:
        """Takes up the trees of a prepared batch: positions, scratch, and what the hooks of attention need."""
        batch = self._runner.input_batch
        drafts = scheduled.scheduled_spec_decode_tokens
        self._known = {}
        self._trees = [self._tree_of(request, drafts.get(request, ())) for request in batch.req_ids]
        for request in scheduled.finished_req_ids:
            self._drafted.pop(request, None)
        self._rows, self._paths, self.accepted = [], [], None
        stop = 0
        for index, (request, tree) in enumerate(zip(batch.req_ids, self._trees, strict=True)):
            count = scheduled.num_scheduled_tokens[request]
            stop += count
            if tree.branches:
                places = self.scratch.trees(len(batch.req_ids))[len(self._rows), : len(tree.paths) - 1]
                base = int(batch.num_computed_tokens_cpu[index]) + count - tree.rows
                self._rows.append(TreeRows(index, stop - tree.rows, base, tree, tree.paths, places))
        self.scattered = None
        for rows in self._rows:
            self._runner.positions[rows.start : rows.start + rows.tree.rows] = rows.positions()
        if self._rows:
            self.scattered = scattered(self._rows, self._block_table, self._block_size)
            self._copy(before_forward(self._rows, self._block_table, self._block_size))

    def weights(self, request: str, drafts: Sequence[int], rows: int) -> tuple[float, ...] | None:
        """``RequestRows.weights`` of a request of the step; arguments as of ``DraftProbabilities.weights``."""
        tree = self._known.get(request)
        return None if tree is None else (1.0,) * (rows - tree.rows) + tree.reached

    def parents(self, request: str) -> tuple[int, ...] | None:
        """``RequestRows.parents`` of a request of the step."""
        tree = self._known.get(request)
        return tree.parents[1:] if tree is not None and tree.branches else None

    def virtual(self, metadata: CommonAttentionMetadata) -> VirtualBatch | None:
        if self.scattered is None:
            return None
        table = metadata.block_table_tensor
        return virtual_batch(metadata.query_start_loc_cpu, metadata.seq_lens, table, self._rows, self._block_size)

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
        trees, self._trees, self.scattered = self._trees, None, None
        if trees is None:  # vLLM warms up its sampler
            return self._verify_plainly(metadata, draft_probs, logits, sampling)
        assert [len(tree.tokens) for tree in trees] == list(metadata.num_draft_tokens)
        outputs = self._runner.input_batch.req_output_token_ids
        walk, output = verified(self._runner.sampler, logits, sampling, trees, outputs)
        self._paths = [walk.paths[rows.request] for rows in self._rows]
        self.accepted = [[row - 1 for row in path] for path in walk.paths]
        self._copy(after_walk(self._rows, self._paths, self._block_table, self._block_size))
        for tree, path in zip(trees, walk.paths, strict=True):
            if tree.tokens:
                self.counters.verified(tree, path)
        if self._guard is not None:
            self._guard.accepted(walk.paths)
        return output

    def restore(self, sampled: Sequence[Sequence[int]], states: Sequence[Tensor]) -> None:
        """Makes the step a chain for all that follows: the accepted rows come first, at consecutive positions.

        Args:
            sampled: tokens that each request emitted; none for a prompt that goes on.
            states: hidden states of the rows of the step, [rows, d] each; changed in place.
        """
        self._drafting = [number for number, tokens in enumerate(sampled) if tokens]
        runner = self._runner
        for rows, path in zip(self._rows, self._paths, strict=True):
            source = rows.start + torch.tensor([0, *path])
            target = slice(rows.start, rows.start + len(source))
            for state in (*states, runner.input_ids.gpu):
                state[target] = state[source]
            runner.positions[rows.start : rows.start + rows.tree.rows] = rows.base + torch.arange(rows.tree.rows)

    # -- its drafts ------------------------------------------------------------------------------------------

    def drafts_at_all(self, metadata: CommonAttentionMetadata | None) -> bool:
        """In place of ``_input_fits_in_drafter``, which ends all drafts n tokens before a request is full.

        ``propose`` leaves out requests without room for a path, and the scheduler cuts trees at the maximum length.
        """
        return metadata is not None

    @torch.inference_mode()
    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """In place of ``EagleProposer.propose``: the draft tokens of each request, at most that many."""
        start = first_pass(self._runner.drafter, self._propose, *args, **kwargs)
        requests = self._runner.input_batch.req_ids
        drafts: list[list[int]] = [[] for _ in requests]
        room = self._runner.effective_drafter_max_model_len - self._shape.depth - 1
        drafting = [number for number in self._drafting if int(start.positions[number]) < room]
        if not drafting or num_speculative_tokens < 1:
            return drafts
        options = self._runner.drafter, self._shape, self.scratch, start
        trees = grow(*options, drafting, num_speculative_tokens)
        for number, tree in zip(drafting, trees, strict=True):
            chosen = tree.best_chain() if self._needs_chain(requests[number]) else tree
            self._drafted[requests[number]] = chosen
            drafts[number] = list(chosen.tokens)
        return drafts

    def _needs_chain(self, request: str) -> bool:
        """Whether vLLM's masks for a request, of structured output, assume that its drafts follow one another."""
        parameters = self._runner.requests[request].sampling_params
        return parameters is not None and parameters.structured_outputs is not None
