"""Draft trees in vLLM's V2 model runner, whose drafts stay on the device: nothing of them is read on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac.integration.stepping.trees.attention import updating
from vllm_spac.integration.stepping.trees.growing_v2 import Drafter
from vllm_spac.integration.stepping.trees.sampling_v2 import TreeSampler
from vllm_spac.integration.stepping.trees.scratch import Scratch, to_device
from vllm_spac.speculation.trees.counters import DeviceCounters
from vllm_spac.speculation.trees.kv_compaction import BlockCopies
from vllm_spac.speculation.trees.shape import TreeShape
from vllm_spac.speculation.trees.tensors import Rows, StepTrees, TreeTensors, Walked
from vllm_spac.speculation.trees.virtual_batch import Scattered

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


class TreeDecodingV2:
    """The trees of one V2 model runner.

    In each step: ``begin`` when vLLM has prepared the batch, ``prepare_attn`` in place of its model state's, the hook
    of the KV cache during the forward, ``accepted`` from the sampler, ``propose`` around the drafter.

    Args:
        runner: V2's, its KV cache initialised.
        shape: of the trees.
        scratch: blocks that no request uses.
    """

    def __init__(self, runner: GPUModelRunner, shape: TreeShape, scratch: Scratch) -> None:
        self._runner, self._scratch, device = runner, scratch, runner.device
        self.block_size = runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.counters = DeviceCounters(shape.depth, device)
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
            layers[name].impl.do_kv_cache_update = updating(layers[name].impl.do_kv_cache_update, self)
        caches = [layers[name].kv_cache for name in speculator.draft_attn_layer_names]
        self._drafter = Drafter(speculator, shape, scratch, caches, self._keep)
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
        if not self._is_of_requests(input_batch):
            return chains
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is None:
            return chains
        drafting = drafts > 0
        self.counters.host.unknown += int((drafting & input_batch.is_prefilling_np).sum())
        requests = np.flatnonzero(drafting & ~input_batch.is_prefilling_np)
        if not len(requests):
            return chains
        layout = Layout.of(input_batch.query_start_loc_np[: input_batch.num_reqs + 1], drafts, requests)
        step = self._take_up(input_batch, layout, block_tables[0])
        sequences = expanded(input_batch, step, layout, block_tables[0], self.block_size)
        input_batch.positions[step.rows.token] = step.positions
        self.scattered = step.scattered(self.block_size)
        self._copy(step.before_forward(self.block_size))
        trees = self._prepare_attn(sequences[0], cudagraph_mode, (sequences[1],), *args, **kwargs)
        return chains | {name: trees[name] for name in self._layers}

    def _take_up(self, batch: InputBatch, layout: Layout, table: Tensor) -> StepTrees:
        self._requests = to_device(layout.requests, table.device)
        self._step = StepTrees(
            self._drafted.take(batch.idx_mapping[self._requests]),
            Rows(*to_device(layout.rows, table.device)),
            batch.positions[to_device(layout.roots, table.device)].long(),
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

    def accepted(self, walked: Walked, trees: TreeTensors, rows: Tensor) -> None:
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
        self.counters.verified(trees.parents, rows, walked.emitted.long() - 1)

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
        chain = None if dummy_run else self._as_chain[input_batch.idx_mapping_np]
        with self._drafter.growing(chain):
            return self._propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                *args,
                dummy_run=dummy_run,
                **kwargs,
            )


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


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the rows of trees are in a batch; all that is known on the host.

    Attributes:
        requests: int64 [T], those whose drafts are trees.
        rows: int64 [4, N], as ``Rows``.
        roots: int64 [T], row of the forward of each root.
        owner: int64 [S], request of each sequence that attention sees.
        starts: int32 [S + 1], first row of each.
    """

    requests: np.ndarray
    rows: np.ndarray
    roots: np.ndarray
    owner: np.ndarray
    starts: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, drafts: np.ndarray, requests: np.ndarray) -> Layout:
        """The layout of a batch.

        Args:
            starts: int [R + 1], first row of each request.
            drafts: int [R], drafts of each.
            requests: int [T], ascending, those whose drafts are trees; each of their rows is one of a tree.
        """
        sequences = np.ones(len(drafts), dtype=np.int64)
        sequences[requests] = drafts[requests] + 1
        owner = np.repeat(np.arange(len(drafts)), sequences)
        first = np.cumsum(sequences) - sequences
        row = np.arange(len(owner)) - first[owner]  # 0 for plain requests
        begins = starts[:-1][owner] + row
        tree = np.full(len(drafts), -1)
        tree[requests] = np.arange(len(requests))
        sequence = np.flatnonzero(tree[owner] >= 0)
        rows = np.stack([tree[owner][sequence], row[sequence], begins[sequence], sequence])
        return cls(
            requests,
            rows.astype(np.int64),
            starts[requests].astype(np.int64),
            owner,
            np.append(begins, starts[-1]).astype(np.int32),
        )


def expanded(
    batch: InputBatch, step: StepTrees, layout: Layout, table: Tensor, block_size: int
) -> tuple[InputBatch, Tensor]:
    """(the batch whose requests are the sequences that attention sees, their block table)."""
    owner, count = to_device(layout.owner, table.device), len(layout.owner)
    lengths, tables = step.sequences(owner, batch.seq_lens, table, block_size)
    return dataclasses.replace(
        batch,
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=batch.idx_mapping[owner],
        idx_mapping_np=batch.idx_mapping_np[layout.owner],
        num_scheduled_tokens=np.diff(layout.starts),
        query_start_loc=to_device(layout.starts, table.device),
        query_start_loc_np=layout.starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[torch.from_numpy(layout.owner)],
        is_prefilling_np=batch.is_prefilling_np[layout.owner],
    ), tables
