"""Verifies trees with V2's sampler, which draws once at every row.

Its noise depends on the request's seed and the row's position only. So the draws along the accepted path are those of
an engine that does not speculate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from vllm_spac.speculation.trees.tensors import TreeTensors, Walked, walk

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class Trees(Protocol):
    """What the sampler asks and tells."""

    def trees(self, batch: InputBatch) -> TreeTensors: ...

    def accepted(self, walked: Walked, trees: TreeTensors, rows: Tensor) -> None: ...


class TreeSampler:
    """In place of V2's ``RejectionSampler``.

    Args:
        plain: vLLM's; its sampler draws, and it gathers log-probabilities.
        trees: of the runner.
    """

    enable_adaptive_verification = False  # vLLM's warm-up asks

    def __init__(self, plain: RejectionSampler, trees: Trees) -> None:
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
        self._trees.accepted(walked, trees, at.rows)
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
