"""Hooks of vLLM's V2 model runner, the default on CUDA: steps from its batches. The scheduler plans its drafts.

What the drafter computes stays on the device, where a predictor reads it, and where drafts are cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.integration.hooks import model_host, patches
from vllm_spac.integration.hooks.draft_reading import DraftReading
from vllm_spac.integration.hooks.runner_hooks import install_step_hooks, managed_experts, request_rows
from vllm_spac.integration.stepping import draft_routing
from vllm_spac.integration.stepping.tree_install import trees_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator


def install() -> None:
    """Wraps the methods of V2's runner; a second call does nothing."""
    install_step_hooks(patches.RUNNER_V2, "prepare_inputs", _step)
    patches.install(f"{patches.SPECULATOR}.load_model", _loading)


def _loading(load_model: Callable):
    """Hooks the loading of V2's draft model, for its routers and a head's experts."""

    def loaded(self: DraftModelSpeculator, target_model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        experts = model_host.experts_in(target_model)
        with model_host.drafting_for(experts):
            load_model(self, target_model, *args, **kwargs)
        draft_routing.install_hooks(experts, self.model)

    return loaded


def _step(runner: GPUModelRunner, scheduled: SchedulerOutput, batch: InputBatch) -> Step:
    if (trees := trees_of(runner)) is not None:
        trees.begin(batch)
    experts = managed_experts(runner)
    if experts.cutter is not None:
        experts.cutter.begin(scheduled, batch)
    step = step_of(batch)
    if not experts.runtime.observes_drafts:
        return step
    if not hasattr(runner, "_spac_reader"):
        vars(runner)["_spac_reader"] = SpeculatorReader(runner.speculator, experts)
    rows = [(id, slice(r.start, r.stop), r.drafts) for id, r in zip(batch.req_ids, step.requests, strict=True)]
    tokens = batch.input_ids[: batch.num_tokens].long()  # on the device, where the last step may still sample them
    return replace(step, draft=experts.serving.draft_states.take(rows, tokens))


class SpeculatorReader:
    """Keeps the experts that are chosen in each forward of V2's drafter, and passes those so far on to a predictor.

    None of it is read on the host.

    Args:
        speculator: V2's; two of its methods are replaced on this object.
        experts: ``ModelExperts`` of the target.
    """

    def __init__(self, speculator: Any, experts: Any) -> None:
        self._speculator, self._routing, self.reading = speculator, experts.draft_routing, DraftReading(experts)
        self._tokens: Tensor | None = None  # that the next forward reads, int [requests]; None outside of ``propose``
        self._propose, speculator.propose = speculator.propose, self.propose
        self._sample, speculator.sample_draft = speculator.sample_draft, self.sample_draft

    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        """Around the speculator's, of which each forward reads the token that the one before has drafted."""
        given = input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states
        sampled = num_sampled, num_rejected, last_sampled
        if kwargs.get("dummy_run") or not self.reading.wanted:
            return self._propose(*given, *sampled, *args, **kwargs)
        self.reading.begin(input_batch.req_ids)
        self._tokens = last_sampled[input_batch.idx_mapping[: input_batch.num_reqs]].flatten()
        try:
            with self._routing.observing():
                return self._propose(*given, *sampled, *args, **kwargs)
        finally:
            self._tokens = None

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Around the speculator's, which is called once in each forward."""
        if self._tokens is None:
            return self._sample(hidden_states, *args, **kwargs)
        requests = len(hidden_states)
        first = None if self.reading.forwards else self._speculator.last_token_indices[:requests]
        self.reading.read(self._tokens[:requests], self._routing.take(requests, first))
        self._tokens = drafts = self._sample(hidden_states, *args, **kwargs)
        return drafts


def step_of(batch: InputBatch) -> Step:
    """The requests of V2's ``InputBatch``, without the rows from ``num_tokens`` on, which pad a CUDA graph."""
    starts, drafts = batch.query_start_loc_np, batch.num_draft_tokens_per_req
    return Step(
        tuple(
            request_rows(
                int(starts[i]),
                int(starts[i + 1]),
                bool(batch.is_prefilling_np[i]),
                0 if drafts is None else int(drafts[i]),
            )
            for i in range(batch.num_reqs)
        )
    )
