"""Which part of vLLM decides the draft length, and whether the guard can change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unguarded(vllm_config: VllmConfig) -> str | None:
    """Why the guard cannot change draft lengths, and what helps; None if it can."""
    if plans_drafts(vllm_config):
        if vllm_config.parallel_config.distributed_executor_backend != "uni":
            return "V2's scheduler plans drafts in another process; add --distributed-executor-backend uni"
    elif vllm_config.scheduler_config.async_scheduling:
        return "V1 plans the drafts of a step before the last one has finished; add --no-async-scheduling"
    return None


def plans_drafts(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler decides the draft length (V2, see ``draft_planning``) rather than the runner."""
    return getattr(vllm_config, "use_v2_model_runner", False)
