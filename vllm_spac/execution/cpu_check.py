"""Whether steps are shorter with the CPU's share of the missing experts: asked again while an engine serves."""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm_spac.decisions.guard.payback import Payback
from vllm_spac.recording.metrics import Counters

logger = logging.getLogger("vllm.spac")

# Slots change slowly: without the CPU, what it computed before is loaded step by step.
BLOCK, SETTLE, MOST = 40, 8, 16
CLEAR = 1.2  # the mean of a block's steps varies by much less


class CpuCheck:
    """Decides before each step whether the CPU may compute experts in it.

    Args:
        counters: receives the times that the CPU was stopped.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters, self._clock = counters, clock
        self._payback = Payback(BLOCK, SETTLE, MOST, CLEAR)
        self._rows, self._began = 0, 0.0

    @property
    def stopped(self) -> bool:
        """Whether the CPU computes no experts in the next step."""
        return self._payback.stopped

    def begin_step(self, rows: int) -> None:
        """A step of ``rows`` rows begins; 0: it is not compared, as one with prompts."""
        self._rows, self._began = rows, self._clock()

    def end_step(self) -> None:
        """All layers of the step have run."""
        if not self._rows:
            return
        verdict = self._payback.end_step(self._rows, self._clock() - self._began)
        if verdict is None:
            return
        self._counters.cpu_stops += verdict.stop
        if verdict.changes:
            does = "stops computing" if verdict.stop else "goes on to compute"
            logger.warning("spac: cpu_experts=auto %s experts on the CPU: %s", does, verdict)
