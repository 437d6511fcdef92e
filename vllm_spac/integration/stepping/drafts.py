"""Who decides how many tokens are drafted, and whether the guard can change that."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def unguarded(vllm_config: VllmConfig) -> str | None:
    """Why the guard cannot change draft lengths, and what helps; None where it can."""
    if plans_drafts(vllm_config):
        if vllm_config.parallel_config.distributed_executor_backend != "uni":
            return "V2's scheduler plans drafts in another process; add --distributed-executor-backend uni"
    elif vllm_config.scheduler_config.async_scheduling:
        return "V1 plans the drafts of a step before the last one is over; add --no-async-scheduling"
    return None


def plans_drafts(vllm_config: VllmConfig) -> bool:
    """Whether the scheduler says how many tokens are drafted (V2, see ``draft_planning``) rather than the runner."""
    return getattr(vllm_config, "use_v2_model_runner", False)
