"""Drives one step of the target model from its rows to its tokens and calls the parts involved, in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.draft_account import DraftAccount
from vllm_spac.decisions.predictors.base import DRAFTING
from vllm_spac.errors import SpacError
from vllm_spac.execution.base import Execution, LayerKernel, Rows
from vllm_spac.execution.exchange import CurrentCudaStream, capturing
from vllm_spac.execution.rerouting import Rerouter, Rerouting
from vllm_spac.recording.recordings import Recordings
from vllm_spac.recording.step_recorder import StepRecorder
from vllm_spac.recording.timeline_file import TimelineWriter
from vllm_spac.recording.timeline_recorder import Timeline
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.recording.watchdog import Watchdog
from vllm_spac.system.threads import Closer

logger = logging.getLogger("vllm.spac")


class Runtime:
    """Interface between one model's layers and runner and the components of this package.

    Call order: ``begin_step``, then each layer, then ``end_forward``, then ``end_step`` with the tokens.

    Args:
        executions: one per ``MoEShape``.
        budget: bounds the experts of a layer; exact until it is changed.
        saved: saves what each thread did and when, if given; ``watch`` begins to record it.
        clock: monotonic time in seconds.
        failed: called with the error of a layer before it is raised.

    Attributes:
        recorder: records events of the forward thread, and notes what was done last.
        recordings: the files that are recorded, and why one of them stopped.
        drafts: what drafts cost and bring.
        rerouter: what rows run in place of what the routers chose.
        warms_up: whether what looks like a step is not one.
    """

    def __init__(
        self,
        executions: Sequence[Execution],
        budget: Rerouting,
        trace: TraceWriter | None = None,
        chooser: Chooser | None = None,
        saved: TimelineWriter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        failed: Callable[[Exception], None] | None = None,
    ) -> None:
        assert trace is None or len(executions) == 1
        self.executions = list(executions)
        self.budget = budget
        self.drafts = DraftAccount(chooser, clock, partial(_missed, self.executions))
        self.rerouter = Rerouter(budget, self.executions)
        self.recordings = Recordings(trace, saved, clock)
        self.recorder = StepRecorder()
        self._failed = failed
        self._step: Step | None = None  # while its layers run
        self.warms_up = False
        self._first_layer: dict[int, int] = {}  # of all layers, by the id of the execution; for what is recorded
        self._unknown: torch.device | None = None  # whose stream is known once a step begins
        self._stream: CurrentCudaStream | None = None
        # Finishes the trace, stops threads and closes stores: once, when called, garbage-collected or at exit.
        self.close = Closer(self, partial(_close, self.recorder.watchdogs, self.recordings, tuple(executions)))

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Disables ``begin_step`` inside the block: vLLM warms up its kernels with batches that look like real ones."""
        self.warms_up = True
        try:
            yield
        finally:
            self.warms_up = False

    def watch(self, timeline: Timeline | None) -> None:
        """Records the following steps in ``timeline``; None ends that. Called between steps."""
        self.recorder.watch(timeline)
        self._number_layers()
        experts = 0
        for execution in self.executions:
            execution.watch(timeline, experts)
            experts += execution.shape.total

    def _number_layers(self) -> None:
        layers = 0
        for execution in self.executions:
            self._first_layer[id(execution)] = layers
            layers += len(execution.shape.layers)

    def report_stalls(self, folder: Path, device: torch.device) -> None:
        """Has a thread look from now on whether a step stands still; called once.

        Args:
            folder: of its reports.
            device: that runs the layers.
        """
        self._number_layers()
        self._unknown = device if device.type == "cuda" else None
        self.recorder.report_stalls(folder)

    def begin_step(self, step: Step) -> None:
        """Starts a forward for real requests."""
        if self.warms_up:
            return
        self.recorder.begin(step)
        if self._unknown is not None:
            self._stream, self._unknown = CurrentCudaStream(self._unknown), None
        self._step = step
        self.drafts.begin(step)
        votes = self.rerouter.begin_step(step)
        for execution in self.executions:
            execution.begin_step(votes)
        self.recordings.begin_step(step)

    def forward(
        self, execution: Execution, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel
    ) -> Tensor:
        """Computes the routed experts of one layer; arguments and result as in ``Execution.forward``.

        Raises:
            SpacError: the layer cannot be computed, or is being captured and waits for the host.
            UnsupportedError: as ``Rerouter.observe_capture``.
        """
        if capturing(x):
            if execution.waits_for_host(kernel):
                raise SpacError(
                    f"spac: {execution.shape.layers[layer]} is being captured into a CUDA graph, where nothing can be "
                    "loaded or counted; add --enforce-eager"
                )
            self.rerouter.observe_capture(traced=self.recordings.trace is not None)
        real = len(x) if self._step is None else self._step.rows
        as_routed = real == len(x) and self.rerouter.as_routed
        record = None if self.recordings.trace is None or self._step is None else self.recordings.observe_choice
        rows = Rows(real, as_routed, record, self.rerouter.cutting, self.budget.guess)
        number = self._first_layer.get(id(execution), 0) + layer
        entered = None if self._step is None else self.recorder.begin_layer(number)
        try:
            out = execution.forward(layer, x, weights, ids, kernel, rows)
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise
        if entered is not None:
            self.recorder.end_layer(entered, number, real)
        return out

    def end_forward(self) -> None:
        """Called when the layers have finished or failed; what runs until the next step (profiling, warm-up) is not
        counted."""
        step, self._step = self._step, None
        with self.recorder.ending(step):
            self.rerouter.end_step()
            for execution in self.executions:
                execution.end_forward()

    def check_results(self) -> None:
        """As ``Execution.check_results``."""
        for execution in self.executions:
            execution.check_results()

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended: its layers run, or drafts are made of its tokens."""
        return self.drafts.step is not None

    @property
    def observes_drafts(self) -> bool:
        """Whether ``observe_draft`` is to be called, and ``begin_step`` passed what the drafter computed."""
        return any(DRAFTING & execution.signals for execution in self.executions)

    def observe_draft(self, read: Tensor) -> None:
        """The drafter has read tokens of the next step; called after each of its forwards.

        Args:
            read: what was chosen for all of them since the last step, as ``PredictorInputs.draft_ids``, on
                the device that runs the layers.
        """
        for execution in self.executions:
            if DRAFTING & execution.signals:
                execution.draft(read)

    def end_drafts(self, drafts: int, seconds: float, forwards: int | None = None) -> None:
        """The drafter took ``seconds`` to propose up to ``drafts`` tokens for each request.

        Args:
            forwards: that it took, one after another; None: one for each of the drafts.
        """
        self.recorder.notes.add("drafts made", drafts)
        forwards = drafts if forwards is None else forwards
        self.drafts.add_forwards(forwards, seconds)
        if not (drafts and forwards) or self.drafts.in_prompt:  # whose rows the drafter reads, too
            return
        for execution in self.executions:
            if execution.balancer is not None:
                execution.balancer.observe_draft(seconds / drafts)

    @property
    def counts_tokens(self) -> bool:
        """Whether ``end_step`` uses the numbers of tokens, so that it is worth waiting for them."""
        recorded = self.recordings.trace is not None or self.recorder.timeline is not None
        return self.in_step and (recorded or self.drafts.chooser is not None)

    def end_step(self, tokens: Sequence[int] | None, paths: Sequence[Sequence[int]] | None = None) -> None:
        """Ends a step.

        Args:
            tokens: number of tokens that each request of the step emitted; None when it is not known on the host.
            paths: numbers of each request's accepted drafts, ascending; None: they are the first of its drafts.
        """
        self.recorder.end(self.drafts.step, tokens)
        if (said := self.drafts.end(tokens)) is not None:
            logger.info("spac: %s", said)
        saved = self.recordings.timeline
        self.recordings.end_step(tokens, paths)
        if self.recordings.timeline is not saved:  # nobody will read what is recorded; a live page begins anew
            self.watch(None)


def _missed(executions: Sequence[Execution]) -> int:
    return sum(execution.counters.misses + execution.counters.cpu_experts for execution in executions)


def _close(watchdogs: Sequence[Watchdog], recordings: Recordings, executions: Sequence[Execution]) -> None:
    for watchdog in watchdogs:
        watchdog.close()
    recordings.finish()
    for execution in executions:
        execution.close()
