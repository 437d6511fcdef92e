"""vLLM's scheduler for requests that take turns (``decisions/guard/slices``); named by ``--scheduler-cls``.

A request that is set aside stays in vLLM's list of running requests, and keeps its KV cache, its place in the runner
and its order. vLLM skips a request in a step before ``next_decode_eligible_step``, and this is what is set. So prompts,
admission, preemption, aborts and everything behind the plan of a step are vLLM's own.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_spac.config.config import config_of
from vllm_spac.decisions.guard.slices import Slices
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.hooks.runner_hooks import ASIDE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger("vllm.spac")
_SKIPS = "next_decode_eligible_step"  # attribute of a request


class SliceScheduler(Scheduler):
    """Sets running requests aside while others have their turn; one step at a time (no async scheduling).

    Raises:
        UnsupportedError: this vLLM's scheduler does not skip requests in the way this one relies on.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        if _SKIPS not in Scheduler.schedule.__code__.co_names:
            from vllm import __version__

            raise UnsupportedError(
                f"spac: the scheduler of vLLM {__version__} does not look at Request.{_SKIPS}, by which requests take "
                "turns; use --spac-guard without gap"
            )
        super().__init__(vllm_config, *args, **kwargs)
        config = config_of(vllm_config.additional_config)
        assert config is not None and config.longest_gap is not None
        self._slices = Slices(config.longest_gap)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's; requests that have left their prompts and have no turn are not in the plan."""
        decoding = {request.request_id: request for request in self.running if not request.is_prefill_chunk}
        names = self._slices.plan(list(decoding), time.perf_counter())
        aside = [(decoding[name], decoding[name].next_decode_eligible_step) for name in names]
        for request, _ in aside:
            request.next_decode_eligible_step = self.current_step + 2  # the step of this plan is the next one
        try:
            plan = super().schedule(*args, **kwargs)
        finally:
            for request, eligible in aside:
                request.next_decode_eligible_step = eligible
        vars(plan)[ASIDE] = len(names - plan.num_scheduled_tokens.keys())
        return plan

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """As vLLM's; the time since ``schedule`` is that of the step."""
        ran, tokens = scheduler_output.num_scheduled_tokens, sum(map(len, model_runner_output.sampled_token_ids))
        if ran and (verdict := self._slices.end_step(ran, tokens, time.perf_counter())) is not None:
            (fewer, more), pays = self._slices.sizes, "do not pay" if verdict.stop else "pay"
            logger.info("spac: steps of %d requests rather than of %d %s: %s", fewer, more, pays, verdict)
        return super().update_from_output(scheduler_output, model_runner_output)
