"""Drafts trees with EAGLE in vLLM's V1 model runner: vLLM's own first pass, then a forward per level."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.decisions.guard.chooser import Chooser, Drafted
from vllm_spac.methods.trees.growth import Chosen, Growth
from vllm_spac.methods.trees.levels import Level, Start, grow
from vllm_spac.methods.trees.tensors import FILLER, LevelBatch, Scratch, trees_of

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.spec_decode.eagle import EagleProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class TreeDrafts(NamedTuple):
    """The drafts of one request. Row 0 is the root, the last token of the request; row i > 0 is draft i - 1."""

    tokens: tuple[int, ...]  # draft tokens, [n]
    parents: tuple[int, ...]  # row that each row follows, [n + 1]; -1 for the root. A parent comes before its children.
    reached: tuple[float, ...]  # probability, by the drafter, that a row is reached, [n + 1]; 1 for the root

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TreeDrafts:
        """Draft tokens that follow one another."""
        return cls(tuple(tokens), tuple(range(-1, len(tokens))), (1.0,) * (len(tokens) + 1))

    @property
    def rows(self) -> int:
        """Number of rows, the root included."""
        return len(self.parents)

    @property
    def branches(self) -> bool:
        """Whether some draft token does not follow the one before it."""
        return any(parent != row for row, parent in enumerate(self.parents[1:]))

    @property
    def drafts(self) -> Drafted:
        """As what is worth verifying is chosen from."""
        before = [self.reached[parent] for parent in self.parents[1:]]
        chances = [
            reached / parent if parent else 0.0 for reached, parent in zip(self.reached[1:], before, strict=True)
        ]
        return Drafted(self.tokens, chances, self.parents[1:])

    def cut(self, drafts: int) -> TreeDrafts:
        """The first ``drafts`` draft tokens, which are a tree too."""
        return TreeDrafts(self.tokens[:drafts], self.parents[: drafts + 1], self.reached[: drafts + 1])


@dataclasses.dataclass
class FirstPass:
    """What vLLM's first pass of the drafter leaves: its outputs at the last token of each request."""

    last: Tensor  # [requests, d], hidden states that logits are computed from
    hidden: Tensor  # [requests, d], hidden states that the next forward takes
    positions: Tensor  # int64 [requests], of these tokens
    metadata: CommonAttentionMetadata  # of the pass; its block tables are the requests'


def first_pass(drafter: EagleProposer, propose: Callable, *args: Any, **kwargs: Any) -> FirstPass:
    """Runs vLLM's ``propose`` for one token, which writes the drafter's keys and values of all accepted tokens."""
    found: dict[str, Any] = {}
    prepare = drafter.set_inputs_first_pass

    def prepared(*args: Any, **named: Any):
        result = prepare(*args, **named)
        found["rows"], found["metadata"] = result[1], result[2]
        return result

    handle = drafter.model.register_forward_hook(lambda module, inputs, output: found.update(output=output))
    drafter.set_inputs_first_pass = prepared
    try:
        propose(1, *args, **kwargs)
    finally:
        del drafter.set_inputs_first_pass
        handle.remove()
    rows, (last, hidden) = found["rows"], found["output"]
    return FirstPass(last[rows], hidden[rows].clone(), drafter.positions[rows].clone(), found["metadata"])


def forward_of(drafter: EagleProposer, metadata: CommonAttentionMetadata) -> Callable[..., Level]:
    """Returns what runs the drafter over a level, as ``levels.grow`` needs it; ``metadata``: of its first pass."""
    from vllm.forward_context import set_forward_context

    def forward(growth: Growth, batch: LevelBatch, hidden: Tensor) -> Level:
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
        slots = drafter._get_slot_mapping(count, batch.slots)
        with set_forward_context(per_layer, drafter.vllm_config, num_tokens=count, slot_mapping=slots):
            last, following = drafter.model(
                input_ids=growth.tokens.flatten().int(),
                positions=batch.positions,
                inputs_embeds=None,
                hidden_states=hidden,
            )
        return Level(following, drafter.model.compute_logits(last))

    return forward


def _caches(drafter: EagleProposer) -> list[Tensor]:
    layers = drafter.vllm_config.compilation_config.static_forward_context
    return [layers[name].kv_cache for name in drafter._draft_attn_layer_names]


class TreeDrafting:
    """Drafts the trees of one model runner, in place of its drafter's chains.

    Args:
        chooser: what chooses among the nodes of a tree at the moment, if anything does.

    Attributes:
        drafted: the trees proposed last, by request.
        forwards: of the drafter, for these.
        requests: numbers of the requests of the batch that emitted tokens, so that they are continued.
    """

    def __init__(
        self, runner: GPUModelRunner, shape: TreeShape, scratch: Scratch, chooser: Callable[[], Chooser | None]
    ) -> None:
        self._runner, self._shape, self._scratch, self._chooser = runner, shape, scratch, chooser
        self.drafted: dict[str, TreeDrafts] = {}
        self.forwards = 0
        self.requests: list[int] = []
        self._propose = runner.drafter.propose
        runner.drafter.propose = self.propose
        runner._input_fits_in_drafter = _drafts_at_all

    def take(self, drafts: Mapping[str, Sequence[int]]) -> dict[str, TreeDrafts]:
        """The trees whose first drafts the requests of a step verify; those whose drafts are not ours are left out."""
        trees = {
            request: self.drafted.pop(request) for request in drafts if drafts[request] and request in self.drafted
        }
        cut = {request: tree.cut(len(drafts[request])) for request, tree in trees.items()}
        return {request: tree for request, tree in cut.items() if tree.tokens == tuple(drafts[request])}

    @torch.inference_mode()
    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """In place of ``EagleProposer.propose``: the draft tokens of each request, at most that many."""
        self.forwards = 0
        start = first_pass(self._runner.drafter, self._propose, *args, **kwargs)
        requests = self._runner.input_batch.req_ids
        drafts: list[list[int]] = [[] for _ in requests]
        room = self._runner.effective_drafter_max_model_len - self._shape.depth - 1
        drafting = [number for number in self.requests if int(start.positions[number]) < room]
        if not drafting or num_speculative_tokens < 1:
            return drafts
        chain = torch.tensor([self._needs_chain(requests[number]) for number in drafting])
        tokens, parents, logp = self._grown(start, drafting)
        nodes = num_speculative_tokens
        chosen = Chosen(tokens[:, :nodes], parents[:, : nodes + 1], logp[:, :nodes])
        tokens, logp, trees = trees_of(chosen, self._shape.depth, chain)
        reached, real = logp.double().exp().tolist(), (trees.parents != FILLER).sum(1).tolist()
        chooser = self._chooser()
        for place, number in enumerate(drafting):
            rows = real[place]
            mine = tuple(tokens[place, : rows - 1].tolist())
            tree = TreeDrafts(mine, tuple(trees.parents[place, :rows].tolist()), (1.0, *reached[place][: rows - 1]))
            self.drafted[requests[number]] = tree
            kept = len(mine) if chooser is None else chooser.keep(requests[number], tree.drafts)
            drafts[number] = list(mine[:kept])
        return drafts

    def _grown(self, start: FirstPass, drafting: Sequence[int]) -> Chosen:
        """Drafts one tree for each of the requests ``drafting``."""
        drafter, chosen = self._runner.drafter, torch.tensor(drafting)
        last, bases, table = start.last[chosen], start.positions[chosen] + 1, start.metadata.block_table_tensor[chosen]
        begun = Start(drafter.model.compute_logits(last), start.hidden[chosen], bases, table)
        run = forward_of(drafter, start.metadata)
        requests, chooser = [self._runner.input_batch.req_ids[number] for number in drafting], self._chooser()
        self.forwards = 1

        def goes_on(growth: Growth) -> bool:
            if chooser is None:
                return True
            paths = zip(requests, growth.chances.tolist(), strict=True)
            return chooser.goes_on((request, path) for request, mine in paths for path in mine)

        def forward(growth: Growth, batch: LevelBatch, hidden: Tensor) -> Level:
            self.forwards += 1
            return run(growth, batch, hidden)

        return grow(self._shape, self._scratch, begun, drafter.block_size, _caches(drafter), forward, goes_on)

    def _needs_chain(self, request: str) -> bool:
        """Whether vLLM's masks for a request, of structured output, assume that its drafts follow one another."""
        parameters = self._runner.requests[request].sampling_params
        return parameters is not None and parameters.structured_outputs is not None


def _drafts_at_all(metadata: CommonAttentionMetadata | None) -> bool:
    """In place of ``_input_fits_in_drafter``, which ends all drafts n tokens before a request is full.

    ``TreeDrafting.propose`` leaves out requests without room for a path, and the scheduler cuts trees at the maximum
    length.
    """
    return metadata is not None
