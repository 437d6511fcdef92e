"""Drafts return with the tokens of their step, where vLLM asks the worker for them in a call of their own.

V1's engine core asks after every step as soon as a drafter is configured, also while the guard drafts nothing. With a
worker in another process such a call takes as long as sampling does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.integration.hooks import patches
from vllm_spac.integration.hooks.drafts import plans_drafts
from vllm_spac.integration.hooks.runner_hooks import managed_experts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor
    from vllm.v1.worker.gpu_worker import Worker

_ENCLOSED = "spac_drafts"  # attribute of a ModelRunnerOutput, and of an executor between the two calls


def install_in_worker() -> None:
    """Lets a worker enclose the drafts; a second call does nothing."""
    patches.install(f"{patches.WORKER}.sample_tokens", _enclosing)


def install_in_engine_core() -> None:
    """Lets an executor of workers in other processes look for enclosed drafts; inert where vLLM has not imported it."""
    if patches.EXECUTOR.partition(":")[0] in sys.modules:
        patches.install(f"{patches.EXECUTOR}.sample_tokens", _opening)
        patches.install(f"{patches.EXECUTOR}.take_draft_token_ids", _taking)


def _enclosing(sample_tokens: Callable):
    def sampled(self: Worker, *args: Any, **kwargs: Any):
        output = sample_tokens(self, *args, **kwargs)
        if _is_asked(self.vllm_config) and getattr(output, "req_ids", None) and managed_experts(self.model_runner):
            vars(output)[_ENCLOSED] = self.take_draft_token_ids()
        return output

    return sampled


def _is_asked(vllm_config: VllmConfig) -> bool:
    """Whether vLLM's engine core asks for drafts after a step."""
    scheduled_ahead = vllm_config.scheduler_config.async_scheduling or plans_drafts(vllm_config)
    return vllm_config.speculative_config is not None and not scheduled_ahead


def _opening(sample_tokens: Callable):
    def sampled(self: MultiprocExecutor, grammar_output: GrammarOutput | None, non_block: bool = False):
        output = sample_tokens(self, grammar_output, non_block)
        if hasattr(output, _ENCLOSED):
            vars(self)[_ENCLOSED] = vars(output)[_ENCLOSED]
        return output

    return sampled


def _taking(take_draft_token_ids: Callable):
    def taken(self: MultiprocExecutor):
        if _ENCLOSED in vars(self):
            return vars(self).pop(_ENCLOSED)
        return take_draft_token_ids(self)

    return taken
