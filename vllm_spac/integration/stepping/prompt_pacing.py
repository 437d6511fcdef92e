"""Steps of a server that leave prompts out, so that running requests keep a share of their speed.

vLLM's scheduler computes prompts and tokens in the same steps. It can leave prompts out of a step, which data-parallel
engines use (``schedule(throttle_prefills=True)``), and asks its engine core whether to; that is where these steps are
chosen. Engines of several replicas have an answer of their own, and are refused by the plugin.
"""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_spac.config.config import SpacConfig, config_of
from vllm_spac.decisions.prompt_chunks import SHARE, ChunkPacing
from vllm_spac.integration.hooks import patches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger("vllm.spac")

_PACED = "spac_paced"  # attribute of the scheduler's configuration
_PACER = "spac_pacer"  # attribute of an engine core


def request(vllm_config: VllmConfig, config: SpacConfig, usage: UsageContext | None) -> None:
    """Asks for it, of a server whose experts may not all have slots: its workers know once they have loaded them.

    Not of a program's own engine (``LLM``): nobody reads its tokens as they come, and its steps stay stock's.
    """
    from vllm.usage.usage_lib import UsageContext

    if config.parsed_slots.share == 1 or usage in (None, UsageContext.LLM_CLASS) or patches.is_off(patches.THROTTLE):
        return
    patches.install(patches.THROTTLE, _throttling)  # an engine core that is forked from here loads no plugin again
    setattr(vllm_config.scheduler_config, _PACED, True)


def install() -> None:
    """Lets engine cores of this process ask; inert where vLLM has not imported them, and without ``request``."""
    if patches.THROTTLE.partition(":")[0] in sys.modules:
        patches.install(patches.THROTTLE, _throttling)


def _throttling(throttles: Callable[[EngineCore], bool]):
    def throttled(self: EngineCore) -> bool:
        return throttles(self) or _leaves_prompts_out(self)

    return throttled


def _leaves_prompts_out(core: Any) -> bool:
    config = core.vllm_config
    if not getattr(config.scheduler_config, _PACED, False) or config_of(config.additional_config) is None:
        return False
    if _PACER not in vars(core):
        vars(core)[_PACER] = _pacer_of(core)
    pacer = vars(core)[_PACER]
    return pacer is not None and pacer.leaves_out()


def _pacer_of(core: Any) -> PromptPacer | None:
    """None if each expert has a slot on every worker, which are asked once: then no chunk reads any."""
    if all(core.collective_rpc("spac_holds_all")):
        return None
    logger.info(
        "spac: prompts wait between their chunks, so that running requests keep %.0f %% of their speed", 100 * SHARE
    )
    return PromptPacer(core.scheduler)


class PromptPacer:
    """Asks a ``ChunkPacing`` before each step of a scheduler, and reports its steps to it.

    Args:
        clock: monotonic clock in seconds.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.perf_counter) -> None:
        self._scheduler, self._clock = scheduler, clock
        self._pacing = ChunkPacing()
        self._began: deque[float] = deque()  # when steps that have not ended were planned
        self._over = 0.0  # when the last step ended
        update = scheduler.update_from_output

        @functools.wraps(update)
        def updated(plan: SchedulerOutput, result: ModelRunnerOutput, *args: Any, **kwargs: Any):
            self._ended(plan)
            return update(plan, result, *args, **kwargs)

        scheduler.update_from_output = updated

    def leaves_out(self) -> bool:
        """Whether the step that is about to be planned has to leave prompts out."""
        running = self._scheduler.running
        _, waiting = self._scheduler.get_request_counts()
        decoding = any(not request.is_prefill_chunk for request in running)
        prompts = waiting > 0 or any(request.is_prefill_chunk for request in running)
        out = decoding and prompts and self._pacing.waits
        if out:  # else vLLM would leave none out while another prompt waits
            self._scheduler.prefill_capacity_bound = False
        self._pacing.begin_step(decoding and prompts and not out)
        self._began.append(self._clock())
        return out

    def _ended(self, plan: SchedulerOutput) -> None:
        now, began = self._clock(), self._began.popleft()
        seconds, self._over = now - max(began, self._over), now
        drafts = plan.scheduled_spec_decode_tokens
        decoding = [rows == 1 + len(drafts.get(request, ())) for request, rows in plan.num_scheduled_tokens.items()]
        self._pacing.end_step(not all(decoding), any(decoding), seconds)
