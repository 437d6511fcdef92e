"""The guard for the V2 runner, where vLLM's scheduler plans the draft length and drafts never leave the device.

The scheduler looks up the draft length of a step by its number of requests (vLLM's
``num_speculative_tokens_per_batch_size``), and later stages follow it. The guard replaces this lookup, and observes the
results that the scheduler receives, as does what cuts drafts on the device. A tree is drafted as a whole or not at all.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_spac.decisions.guard.lengths import LengthChooser, halved
from vllm_spac.integration.hooks import patches

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

logger = logging.getLogger("vllm.spac")


Ended = Callable[["SchedulerOutput", Mapping[str, Sequence[int]], float], None]


class PlannedDrafts:
    """Replacement of a scheduler's lookup: requests of a step -> draft tokens per request for the next one.

    Args:
        guard: chooses the length, and observes every step. None: the lookup is not replaced.
        most: the lookup that the user configured in vLLM, if any: an upper bound for the guard.
        clock: monotonic clock in seconds.
        ended: called with the plan of a step that has ended, the tokens that each request emitted which had left its
            prompt, and the step's seconds: 0 if they are not those of the drafts that were planned.
    """

    def __init__(
        self,
        guard: LengthChooser | None,
        most: Sequence[int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        ended: Ended | None = None,
    ) -> None:
        self.guard, self._most, self._clock, self._ended = guard, most, clock, ended
        # Plans, when they were made, and whether vLLM left drafts out by itself.
        self._running: deque[tuple[SchedulerOutput, float, bool]] = deque()
        self._left_out = False  # in the last plan
        self._over = 0.0  # when the last step finished

    def __getitem__(self, requests: int) -> int:
        assert self.guard is not None
        length = self.guard.choose(requests)
        return length if self._most is None else min(length, self._most[requests])

    def begin_step(self, plan: SchedulerOutput) -> None:
        """Records a ``SchedulerOutput`` that the scheduler has made.

        vLLM 0.33 makes no drafts in a step whose requests could not use them (``skip_drafts``). Neither that step,
        without the drafter's time, nor the next one, which then has nothing to verify, is what the guard chose.
        """
        before, self._left_out = self._left_out, getattr(plan, "skip_drafts", False)  # vLLM 0.32 never does
        left_out = self._left_out or (before and not plan.scheduled_spec_decode_tokens)
        self._running.append((plan, self._clock(), left_out))

    def end_step(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Reports the finished step of ``plan`` to the guard; ``result`` is its ``ModelRunnerOutput``.

        Its time counts from its planning or, with async scheduling, from the end of the previous step if that is later.
        """
        running, began, left_out = self._running.popleft()
        assert running is plan, "steps end in the order in which they were planned"
        now = self._clock()
        seconds, self._over = now - max(began, self._over), now
        drafts = plan.scheduled_spec_decode_tokens
        said = {
            request: result.sampled_token_ids[result.req_id_to_index[request]]
            for request, rows in plan.num_scheduled_tokens.items()
            if rows == 1 + len(drafts.get(request, ()))  # else it is in its prompt
        }
        if left_out:
            seconds = 0.0
            if self.guard is not None:
                self.guard.ignored += 1
        elif self.guard is not None:
            length, counts = max(map(len, drafts.values()), default=0), [len(tokens) for tokens in said.values()]
            requests = len(plan.num_scheduled_tokens)
            verdict = self.guard.observe(length, [count for count in counts if count], requests, seconds)
            if verdict is not None and verdict.changes:
                logger.info("spac: %s", verdict.of_drafts)
        if self._ended is not None:
            self._ended(plan, said, seconds)


def install(vllm_config: VllmConfig, guard: LengthChooser | None, ended: Ended | None = None) -> None:
    """Lets ``guard`` plan the drafts of an engine whose worker runs in this process, and ``ended`` hear of its steps.

    The scheduler is created after the worker, so they are kept until then; arguments as of ``PlannedDrafts``.
    """
    most = None if guard is None else _lengths(vllm_config, guard)
    _waiting[vllm_config.instance_id] = PlannedDrafts(guard, most, ended=ended)
    patches.install(f"{patches.SCHEDULER}.__init__", _starting)


def _lengths(vllm_config: VllmConfig, guard: LengthChooser) -> Sequence[int] | None:
    """Prepares an engine for the lengths that ``guard`` chooses; returns its lookup, if the user has set one."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    speculation, requests = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    in_graphs, most, asked = _has_decode_graphs(vllm_config), None, speculation.num_speculative_tokens_per_batch_size
    if asked:
        most = build_dynamic_sd_schedule_lookup(asked, requests, guard.most)
    elif guard.restricted or requests == 1:  # it chooses one length, and 0
        asked = [(1, requests, guard.most)] if in_graphs else None
    else:
        asked = schedule(guard.most, requests)
    if asked:
        speculation.num_speculative_tokens_per_batch_size = WithoutDrafts(asked) if in_graphs else asked
    if in_graphs:
        patches.install(patches.CAPTURED_LENGTHS, _capturing)
        guard.limit(_scheduled(vllm_config, guard.most))
        logger.info(
            "spac: the guard chooses among %s drafts, which all have full CUDA graphs",
            ", ".join(map(str, guard.lengths)),
        )
    return most


class WithoutDrafts(list):
    """A schedule of an engine that also runs steps without drafts, whatever its lengths are."""


def _capturing(lookup: Callable):
    """Around the lookup that vLLM's managers of graphs read their draft lengths from, and nobody else."""

    def looked_up(num_speculative_tokens_per_batch_size: Any, *args: Any, **kwargs: Any) -> list[int]:
        found = lookup(num_speculative_tokens_per_batch_size, *args, **kwargs)
        return [*found, 0] if isinstance(num_speculative_tokens_per_batch_size, WithoutDrafts) else found

    return looked_up


def schedule(most: int, requests: int) -> list[tuple[int, int, int]]:
    """Returns a schedule of vLLM that has as many draft lengths as batch sizes allow, ``most`` and 0 among them.

    vLLM captures full CUDA graphs for the lengths in its schedule, whatever batch sizes they stand beside: the guard
    takes the place of its lookup.

    Args:
        most: the greatest length.
        requests: the greatest batch size, at least 2.

    Returns:
        Ranges of batch sizes (first, last, length), for vLLM's ``num_speculative_tokens_per_batch_size``.
    """
    *fewer, last = [0, *halved(most)[1:][-(requests - 1) :]]
    return [*((size, size, length) for size, length in enumerate(fewer, 1)), (len(fewer) + 1, requests, last)]


def _has_decode_graphs(vllm_config: VllmConfig) -> bool:
    """Whether steps that only generate run in full graphs that are captured for one draft length each."""
    from vllm.config import CUDAGraphMode

    mode = vllm_config.compilation_config.cudagraph_mode
    return mode is not None and mode.separate_routine() and mode.decode_mode() == CUDAGraphMode.FULL


def _scheduled(vllm_config: VllmConfig, most: int) -> list[int]:
    """Returns the draft lengths that vLLM captures graphs for, but 0, which it always does for these engines."""
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    speculation, requests = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_seqs
    return build_dynamic_sd_schedule_lookup(speculation.num_speculative_tokens_per_batch_size, requests, most)[1:]


_waiting: dict[str, PlannedDrafts] = {}  # by id of the engine's configuration, until its scheduler is created


def _starting(start: Callable):
    def started(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any):
        start(self, vllm_config, *args, **kwargs)
        if (drafts := _waiting.pop(vllm_config.instance_id, None)) is not None:
            attach(self, drafts)

    return started


def attach(scheduler: Scheduler, drafts: PlannedDrafts) -> None:
    """Makes a scheduler use ``drafts`` as its lookup and report its steps to it."""
    schedule, update = scheduler.schedule, scheduler.update_from_output

    @functools.wraps(schedule)
    def scheduled(*args: Any, **kwargs: Any):
        plan = schedule(*args, **kwargs)
        drafts.begin_step(plan)
        return plan

    @functools.wraps(update)
    def updated(plan: SchedulerOutput, result: ModelRunnerOutput, *args: Any, **kwargs: Any):
        drafts.end_step(plan, result)
        return update(plan, result, *args, **kwargs)

    if drafts.guard is not None:
        scheduler.dynamic_sd_lookup = drafts
    scheduler.schedule, scheduler.update_from_output = scheduled, updated
