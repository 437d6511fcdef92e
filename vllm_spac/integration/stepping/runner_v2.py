"""Hooks of vLLM's V2 model runner, the default on CUDA: steps from its batches. The scheduler plans its drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_spac.core import Step
from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.runner_hooks import hook_steps, managed_experts, request_rows
from vllm_spac.integration.stepping.tree_install import device_trees_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def install() -> None:
    """Wraps the methods of V2's runner; a second call does nothing."""
    hook_steps(patches.RUNNER_V2, "prepare_inputs", _step)


def _step(runner: GPUModelRunner, scheduled: SchedulerOutput, batch: InputBatch) -> Step:
    if (trees := device_trees_of(runner)) is not None:
        trees.begin(batch)
    return step_of(batch, tokens=managed_experts(runner).runtime.looks_at_tokens)


def step_of(batch: InputBatch, *, tokens: bool = False) -> Step:
    """The requests of V2's ``InputBatch``, without the rows from ``num_tokens`` on, which pad a CUDA graph.

    ``tokens``: those of the rows as well. They stay on the device, where the last step may still sample them.
    """
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
        ),
        batch.input_ids[: batch.num_tokens].long() if tokens else None,
    )
