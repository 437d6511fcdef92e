"""Draft trees in vLLM's V2 model runner, whose drafts stay on the device: nothing of them is read on the host.

The drafter runs V2's own first pass, then one forward per level over the expanded nodes. V2's sampler draws once at
every row. Its noise depends on the request's seed and the row's position only, so the draws along the accepted path are
those of an engine that does not speculate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.integration.stepping.tree_attention import updating
from vllm_spac.methods.trees.captured_trees import CapturedBatch, CapturedTrees, every_row
from vllm_spac.methods.trees.growth import Growth
from vllm_spac.methods.trees.levels import Level, Start, grow
from vllm_spac.methods.trees.tensors import (
    BlockCopies,
    Layout,
    LevelBatch,
    Scattered,
    Scratch,
    StepTrees,
    TensorRows,
    TreeTensors,
    Walked,
    trees_of,
    walk,
)
from vllm_spac.methods.trees.tree_counters import TreeCounters

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class TreeSampler:
    """In place of V2's ``RejectionSampler``.

    Args:
        plain: vLLM's; its sampler draws, and it gathers log-probabilities.
        trees: of the runner.
    """

    enable_adaptive_verification = False  # vLLM's warm-up asks

    def __init__(self, plain: RejectionSampler, trees: TreeDecodingV2) -> None:
        self._plain, self._trees = plain, trees

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Samples a batch that has drafts.

        Args:
            logits: [rows that are sampled, V].
            input_batch: of the step; positions of tree rows are those in their trees.
            draft_logits: not used: trees hold the drafter's best tokens, and the target alone decides.
            invalid_drafts: bool [rows that are sampled], drafts that a grammar excludes.
        """
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.metrics.logits import get_num_nans
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        sampler, trees = self._plain.sampler, self._trees.trees(input_batch)
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        at = Sampled.of(input_batch, trees.parents.shape[1])
        drafts = input_batch.input_ids[input_batch.logits_indices]
        chosen, processed = sampler.sample(
            logits,
            input_batch.expanded_idx_mapping,
            input_batch.idx_mapping,
            input_batch.idx_mapping_np,
            input_batch.positions[input_batch.logits_indices],
            drafts,
            input_batch.expanded_local_pos,
            input_batch.seq_lens_cpu_upper_bound.numpy(),
            return_logprobs=True,
        )
        roots = input_batch.positions[input_batch.logits_indices[at.first]]
        known = roots >= sampler.req_states.prefill_len.gpu[input_batch.idx_mapping]  # vLLM pads prompts with drafts
        tokens = drafts if invalid_drafts is None else drafts.masked_fill(invalid_drafts, -1)
        tokens = tokens[at.logits].long().masked_fill(~known[:, None], -1)
        walked = walk(trees, tokens, at.rows, chosen[at.logits].long())
        self._trees.apply_accepted(walked, trees, at.rows)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            walked.emitted.clone(),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=walked.tokens,
            logprobs_tensors=self._logprobs(walked, at, num_sampled, logits, processed, input_batch),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _logprobs(
        self, walked: Walked, at: Sampled, counts: Tensor, logits: Tensor, processed: Tensor, batch: InputBatch
    ) -> Any:
        """vLLM's log-probabilities, from the logits of accepted rows in place of the first ones."""
        from vllm.config.model import PROCESSED_LOGPROBS_MODES
        from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

        sampler = self._plain.sampler
        if (most := sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np)) == NO_LOGPROBS:
            return None
        shown = processed if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits
        order = at.along(walked.path, len(shown))
        return self._plain._get_logprobs_tensors(
            walked.tokens, counts, shown[order], batch.cu_num_logits, batch.cu_num_logits_np, most
        )


class Sampled:
    """Where the rows of each request are among those that are sampled.

    Attributes:
        first: int64 [requests], that of the root.
        rows: int64 [requests], how many there are.
        logits: int64 [requests, n + 1], that of each row; those behind the last one repeat it.
    """

    def __init__(self, first: Tensor, rows: Tensor, nodes: int) -> None:
        self.first, self.rows = first, rows
        row = torch.arange(nodes, device=first.device)
        self.logits = first[:, None] + torch.minimum(row, rows[:, None] - 1)

    @classmethod
    def of(cls, batch: InputBatch, nodes: int) -> Sampled:
        starts = batch.cu_num_logits.long()
        return cls(starts[:-1], starts.diff(), nodes)

    def along(self, path: Tensor, total: int) -> Tensor:
        """Order of all ``total`` sampled rows in which each request's accepted ones come first, int64 [total]."""
        level = torch.arange(path.shape[1], device=path.device)
        target = torch.where(path < 0, total, self.first[:, None] + level)
        order = torch.arange(total + 1, device=path.device)
        order[target.flatten()] = (self.first[:, None] + path.clamp(min=0)).flatten()
        return order[:total]


class Drafter:
    """Replaces what follows the first pass of a V2 speculator; in a CUDA graph too, for memory is at fixed addresses.

    Args:
        speculator: its attention has been set up.
        shape: of the trees.
        scratch: blocks that no request uses.
        caches: KV cache of each of the drafter's attention layers, [blocks, ...].
        keep: gets (requests of the runner's state, int64 [R], their trees).

    Attributes:
        chances: gets (requests of the runner's state, int64 [R], the drafter's probability of each node given its
            parent, [R, n]); None: nobody asks.
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
        self._keep, requests, device = keep, speculator.max_num_reqs, speculator.device
        self.chances: Callable[[Tensor, Tensor], None] | None = None
        self._chain = torch.zeros(requests, dtype=torch.bool, device=device)  # which get a chain
        self._logits: Tensor | None = None  # [requests, V], of the first pass
        # What was grown, by place in the drafter's batch; the tokens are in the speculator's own buffer.
        self._trees = TreeTensors.chains(requests, shape.nodes, shape.depth, device)
        self._joint = torch.zeros(requests, shape.nodes, device=device)
        self._starts = torch.arange(speculator.max_num_tokens + 1, dtype=torch.int32)
        self._starts_on_device = self._starts.to(device)
        speculator.sample_draft = self.sample_draft
        name = "_generate_fused_drafts" if speculator.supports_decode_metadata_update else "_multi_step_decode"
        self._decode = getattr(speculator, name)
        vars(speculator)[name] = self.draft_trees if name == "_multi_step_decode" else self.draft_trees_in_graph

    def begin(self, chain: np.ndarray) -> None:
        """The speculator's ``propose`` is called; ``chain``: bool [requests], which get a chain."""
        self._chain[: len(chain)] = _to_device(chain, self._chain.device)

    def end(self, requests: Tensor) -> None:
        """It has grown trees for ``requests`` of the runner's state, int64 [R]; a graph may have grown more."""
        trees = TreeTensors(*(part[: len(requests)] for part in self._trees))
        if self.chances is not None:
            self.chances(requests, conditional(self._joint[: len(requests)], trees.parents))
        self._keep(requests, trees)

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In place of the speculator's: keeps the logits that the first level is drawn from."""
        logits = self._speculator.compute_draft_logits(hidden_states, 0)
        if self._logits is None:
            self._logits = logits.new_zeros(self._speculator.max_num_reqs, logits.shape[1])
        self._logits[: len(logits)] = logits
        return logits.argmax(-1)

    def draft_trees(self, num_reqs: int, skip_attn: bool, *args: Any, **kwargs: Any) -> None:
        """In place of the speculator's further steps, where these are not captured."""
        if skip_attn:
            return self._decode(num_reqs, skip_attn, *args, **kwargs)
        self._grow(num_reqs)

    def draft_trees_in_graph(
        self, num_reqs: int, num_tokens_padded: int, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        """In place of the speculator's further steps, where a graph may hold them; without metadata there is no KV
        cache yet."""
        if attn_metadata is None:
            return self._decode(num_reqs, num_tokens_padded, attn_metadata, *args, **kwargs)
        self._grow(num_reqs)

    def _grow(self, requests: int) -> None:
        """Fills the speculator's ``draft_tokens`` with trees, of ``requests`` places of its batch; some may be padding
        of a graph."""
        speculator, logits = self._speculator, self._logits
        assert logits is not None, "the first pass comes first"
        start = Start(
            logits[:requests],
            speculator.hidden_states[:requests].clone(),
            speculator.input_buffers.positions[:requests].clone(),  # vLLM has advanced them
            speculator.block_tables.input_block_tables[0][:requests],
        )
        size = speculator.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        chosen = grow(self._shape, self._scratch, start, size, self._caches, self._forward)
        tokens, joint, trees = trees_of(chosen, self._shape.depth, self._chain[:requests])
        speculator.draft_tokens[:requests], self._joint[:requests] = tokens, joint
        for mine, theirs in zip(self._trees, trees, strict=True):
            mine[:requests] = theirs

    def _forward(self, growth: Growth, batch: LevelBatch, hidden: Tensor) -> Level:
        """Runs the drafter over a level, see ``levels.grow``."""
        from vllm.v1.worker.gpu.attn_utils import build_attn_metadata, build_slot_mappings_by_layer

        speculator, count = self._speculator, len(batch.lengths)
        most, buffers = speculator.max_model_len, speculator.input_buffers
        buffers.input_ids[:count] = growth.tokens.flatten().to(buffers.input_ids.dtype)
        # A request that is nearly full gets nodes behind its end: the scheduler does not verify them.
        buffers.positions[:count] = batch.positions.clamp(max=most - 1)
        speculator.hidden_states[:count] = hidden
        slots = batch.slots[None]
        metadata = build_attn_metadata(
            attn_groups=speculator.attn_groups,
            num_reqs=count,
            num_tokens=count,
            query_start_loc_gpu=self._starts_on_device[: count + 1],
            query_start_loc_cpu=self._starts[: count + 1],
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
        last = last[:count]
        logits = speculator.compute_draft_logits(last, growth.level)
        return Level(following[:count].clone(), logits)  # the speculator's buffer is written again


class TreeDecodingV2:
    """The trees of one V2 model runner.

    In each step: ``begin`` when vLLM has prepared the batch, ``prepare_attn`` in place of its model state's, the hook
    of the KV cache during the forward, ``apply_accepted`` from the sampler, ``propose`` around the drafter.

    Args:
        runner: V2's, its KV cache initialised.
        shape: of the trees.
        scratch: blocks that no request uses.
    """

    def __init__(self, runner: GPUModelRunner, shape: TreeShape, scratch: Scratch) -> None:
        self._runner, self._scratch, device = runner, scratch, runner.device
        self._captured = _captured(runner, shape)  # what full graphs read; None: there are none
        self._rows = shape.nodes + 1  # of a request in such a graph
        self.block_size = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.counters = TreeCounters(shape.depth, device)
        self._drafted = TreeTensors.chains(runner.max_num_reqs, shape.nodes, shape.depth, device)
        self._as_chain = np.zeros(runner.max_num_reqs, dtype=bool)  # by request state
        self._batch: InputBatch | None = None  # a real batch, until its metadata is built
        self._step: StepTrees | None = None  # from then until the drafter runs
        self._requests: Tensor  # int64 [T], those of the step whose drafts are trees
        self._last: Tensor | None = None  # last accepted row of each tree of the step
        self.scattered: Scattered | None = None  # while the target runs
        speculator, layers = runner.speculator, runner.compilation_config.static_forward_context
        names = runner.kv_cache_config.kv_cache_groups[0].layer_names
        self._layers = [name for name in names if name not in speculator.draft_attn_layer_names]
        self._caches = [layers[name].kv_cache for name in self._layers]
        for name in self._layers:
            layers[name].impl.do_kv_cache_update = updating(
                layers[name].impl.do_kv_cache_update, lambda: self.scattered
            )
        caches = [layers[name].kv_cache for name in speculator.draft_attn_layer_names]
        self.drafter = Drafter(speculator, shape, scratch, caches, self._keep)
        self._propose, speculator.propose = speculator.propose, self.propose
        self._prepare_attn, runner.model_state.prepare_attn = runner.model_state.prepare_attn, self.prepare_attn
        self._add_request, runner.sampler.add_request = runner.sampler.add_request, self.add_request
        runner.rejection_sampler = TreeSampler(runner.rejection_sampler, self)

    def add_request(self, index: int, parameters: SamplingParams) -> None:
        """In place of the sampler's: notes which requests need chains."""
        self._as_chain[index] = needs_chain(parameters)
        self._add_request(index, parameters)

    def _keep(self, requests: Tensor, trees: TreeTensors) -> None:
        self._drafted.put(requests, trees)

    # -- the target's forward --------------------------------------------------------------------------------

    def begin(self, batch: InputBatch) -> None:
        """Takes note of a batch of requests; others are made up to profile and to warm up."""
        self._batch, self._step, self._last, self.scattered = batch, None, None, None

    def _is_of_requests(self, batch: InputBatch) -> bool:
        begun, self._batch = self._batch, None
        return begun is batch

    def prepare_attn(
        self, input_batch: InputBatch, cudagraph_mode: Any, block_tables: Sequence[Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """In place of the model state's: the target sees rows of trees as sequences, the drafter sees chains.

        vLLM has computed the slots of the rows from their positions in a chain; from here on they have those in a tree.
        """
        chains = self._prepare_attn(input_batch, cudagraph_mode, block_tables, *args, **kwargs)
        in_graph = self._in_graph(input_batch)
        if not self._is_of_requests(input_batch):
            self.scattered = None
            if not (in_graph and kwargs.get("for_capture")):
                return chains
            assert self._captured is not None
            self._captured.reset()
            memory = self._captured.batch(input_batch.num_tokens_after_padding)
            self.scattered = memory.scattered
            sequences = captured(input_batch, memory), memory.table
            return chains | self._target(sequences, cudagraph_mode, *args, **kwargs)
        in_graph, drafts = in_graph and cudagraph_mode.name == "FULL", input_batch.num_draft_tokens_per_req
        if drafts is None:
            if not in_graph:
                return chains
            drafts = np.zeros(input_batch.num_reqs, dtype=np.int32)
        drafting = drafts > 0
        self.counters.add_unknown(int((drafting & input_batch.is_prefilling_np).sum()))
        requests = np.flatnonzero(drafting & ~input_batch.is_prefilling_np)
        if not (len(requests) or in_graph):
            return chains
        layout = Layout.of(input_batch.query_start_loc_np[: input_batch.num_reqs + 1], drafts, requests)
        if in_graph:
            self._replay(input_batch, layout, block_tables[0])
            return chains  # the target's graph has its own
        step = self._take_up(input_batch, layout, block_tables[0])
        sequences = expanded(input_batch, step, layout, block_tables[0], self.block_size)
        input_batch.positions[step.rows.token] = step.positions
        self.scattered = step.scattered(self.block_size)
        self._copy(step.before_forward(self.block_size))
        return chains | self._target(sequences, cudagraph_mode, *args, **kwargs)

    def _target(self, sequences: tuple[InputBatch, Tensor], mode: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The metadata of the target's layers, of (a batch of sequences, their block table)."""
        found = self._prepare_attn(sequences[0], mode, (sequences[1],), *args, **kwargs)
        return {name: found[name] for name in self._layers}

    def _in_graph(self, batch: InputBatch) -> bool:
        """Whether a batch has the shape of the graphs that verify trees: all drafts of each request, or padding."""
        rows = batch.num_reqs_after_padding * self._rows
        return self._captured is not None and batch.num_tokens_after_padding == rows

    def _replay(self, batch: InputBatch, layout: Layout, table: Tensor) -> None:
        """Writes what the graph of a step reads, of whose requests those of ``layout`` have trees."""
        assert self._captured is not None
        rows, owner = every_row(layout, batch.num_reqs)
        step = None
        if len(layout.requests):
            step = self._take_up(batch, dataclasses.replace(layout, rows=rows), table)
            batch.positions[step.rows.token] = step.positions
            self._copy(step.before_forward(self.block_size))
        positions = batch.positions[: batch.num_tokens].long()
        self._captured.write(positions, _to_device(owner, table.device), table, step, self.block_size)

    def _take_up(self, batch: InputBatch, layout: Layout, table: Tensor) -> StepTrees:
        self._requests = _to_device(layout.requests, table.device)
        self._step = StepTrees(
            self._drafted.take(batch.idx_mapping[self._requests]),
            TensorRows(*_to_device(layout.rows, table.device)),
            batch.positions[_to_device(layout.roots, table.device)].long(),
            table[self._requests],
            self._scratch.trees(len(layout.requests)),
        )
        return self._step

    def _copy(self, copies: BlockCopies) -> None:
        for cache in self._caches:
            copies.apply(cache)

    # -- its tokens ------------------------------------------------------------------------------------------

    def trees(self, batch: InputBatch) -> TreeTensors:
        """The trees of all requests of a batch, [requests, ...]; those without drafts have any."""
        return self._drafted.take(batch.idx_mapping)

    def apply_accepted(self, walked: Walked, trees: TreeTensors, rows: Tensor) -> None:
        """Moves the keys of accepted rows into place.

        Args:
            walked: of all requests of the batch.
            trees: theirs.
            rows: int64 [requests], rows of each tree that were verified.
        """
        self.scattered = None
        if self._step is not None:
            self._last = walked.last[self._requests]
            self._copy(self._step.after_walk(self._last, self.block_size))
        self.counters.add_step(trees.parents, rows, walked.emitted.long() - 1)

    # -- its drafts ------------------------------------------------------------------------------------------

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """Around the drafter's: what it gets is a chain, and it grows trees."""
        if not dummy_run and self._step is not None and self._last is not None:
            order = self._step.as_chains(self._last, input_batch.num_tokens)
            input_batch.positions[self._step.rows.token] = self._step.linear
            tokens = input_batch.input_ids[: len(order)]
            tokens.copy_(tokens[order])
            last_hidden_states = reordered(last_hidden_states, order)
            aux_hidden_states = [reordered(state, order) for state in aux_hidden_states or ()] or None
        self.drafter.begin(self._as_chain[input_batch.idx_mapping_np])
        given = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        drafts = self._propose(*given, *args, dummy_run=dummy_run, **kwargs)
        planned = kwargs.get("num_speculative_tokens")
        if not dummy_run and (planned is None or planned > 1):
            self.drafter.end(input_batch.idx_mapping[: input_batch.num_reqs])
        return drafts


def _captured(runner: GPUModelRunner, shape: TreeShape) -> CapturedTrees | None:
    """The memory that graphs of steps with trees read; None: no step has one."""
    compilation = runner.compilation_config
    if not compilation.cudagraph_mode.has_full_cudagraphs():
        return None
    rows = min(runner.max_num_reqs * (shape.nodes + 1), compilation.max_cudagraph_capture_size or 0)
    blocks = runner.block_tables.input_block_tables[0].shape[1]
    return CapturedTrees(rows, blocks, shape.depth, runner.device)


def conditional(joint: Tensor, parents: Tensor) -> Tensor:
    """The probability of each node given its parent, [R, n].

    Args:
        joint: [R, n], logarithm of the probability of each node's path.
        parents: int64 [R, n + 1], as of ``TreeTensors``.
    """
    along = torch.cat([torch.zeros_like(joint[:, :1]), joint], 1)
    return (joint - along.gather(1, parents[:, 1:].clamp(min=0))).exp()


def needs_chain(parameters: SamplingParams) -> bool:
    """Whether vLLM processes a request's logits by the drafts before a row, which it takes for a chain."""
    plain = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    others = ("bad_words", "structured_outputs", "thinking_token_budget")
    return any(getattr(parameters, name) != value for name, value in plain.items()) or any(
        getattr(parameters, name, None) for name in others
    )


def reordered(state: Tensor, order: Tensor) -> Tensor:
    """``state``, [rows, d], with its first rows in ``order``; rows behind them pad a CUDA graph."""
    return torch.cat([state[order], state[len(order) :]])


def captured(batch: InputBatch, memory: CapturedBatch) -> InputBatch:
    """The batch whose requests are the sequences that attention sees in a graph of as many rows as ``batch`` has."""
    count = len(memory.lengths)
    one, owner = np.ones(count, dtype=np.int32), np.zeros(count, dtype=np.int64)
    return dataclasses.replace(
        batch,
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=batch.idx_mapping[:1].expand(count),
        idx_mapping_np=batch.idx_mapping_np[owner],
        num_scheduled_tokens=one,
        query_start_loc=memory.starts,
        query_start_loc_np=np.arange(count + 1, dtype=np.int32),
        seq_lens=memory.lengths,
        seq_lens_cpu_upper_bound=torch.from_numpy(one),
        is_prefilling_np=batch.is_prefilling_np[owner],
        max_query_len=1,
    )


def expanded(
    batch: InputBatch, step: StepTrees, layout: Layout, table: Tensor, block_size: int
) -> tuple[InputBatch, Tensor]:
    """(the batch whose requests are the sequences that attention sees, their block table)."""
    owner, count = _to_device(layout.owner, table.device), len(layout.owner)
    lengths, tables = step.sequences(owner, batch.seq_lens, table, block_size)
    return dataclasses.replace(
        batch,
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=batch.idx_mapping[owner],
        idx_mapping_np=batch.idx_mapping_np[layout.owner],
        num_scheduled_tokens=np.diff(layout.starts),
        query_start_loc=_to_device(layout.starts, table.device),
        query_start_loc_np=layout.starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(layout.owner)],
        is_prefilling_np=batch.is_prefilling_np[layout.owner],
    ), tables


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of ``array`` on the device, which neither waits for it nor makes it wait for the host."""
    from vllm.utils.torch_utils import async_tensor_h2d

    return async_tensor_h2d(array, device=device)
