"""Drives one step of the target model from its rows to its tokens and calls the parts involved, in order."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vllm_spac.core import NO_EXPERT, Step
from vllm_spac.decisions.guard.chooser import Chooser
from vllm_spac.decisions.guard.draft_account import DraftAccount
from vllm_spac.decisions.predictors.base import DRAFTING
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.base import Execution, LayerKernel, Rows
from vllm_spac.execution.exchange import CurrentCudaStream, capturing
from vllm_spac.execution.rerouting import Rerouting
from vllm_spac.recording.recordings import Recordings
from vllm_spac.recording.step_recorder import StepRecorder
from vllm_spac.recording.timeline_file import TimelineWriter
from vllm_spac.recording.timeline_recorder import Timeline
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.recording.watchdog import Watchdog
from vllm_spac.system.threads import Closer

logger = logging.getLogger("vllm.spac")


class Listener(Protocol):
    """Receives a layer's routing before a budget is applied; for calibration and evaluation."""

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Receives the routing of one layer in one step, without padding.

        Args:
            hidden: hidden states, [rows, d].
            logits: router logits, [rows, N].
            weights, ids: what the router chose, [rows, k].
        """


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
        rerouted: chooses experts in place of the budget, outside of steps; arguments and result as of ``route``.
        cut_rows: bool [rows, 1] on the device, at a fixed address: rows of the step whose drafts were cut there and run
            no expert. None: nothing cuts any.
        cutting: whether some rows of the step may be among them.
        reached: float64 [rows] on the device, at a fixed address: the probability that each row of the step is reached,
            for weighted votes; None: it is known on the host, or votes are not weighted.
        weighed: whether it is that of the step.
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
        self.listeners: list[Listener] = []
        self.recordings = Recordings(trace, saved, clock)
        self.recorder = StepRecorder()
        self.rerouted: Callable[[int, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.cut_rows: Tensor | None = None
        self.cutting = False
        self.reached: Tensor | None = None
        self.weighed = False
        self._failed = failed
        self._step: Step | None = None  # while its layers run
        self._rows = 0  # of that step
        self._warming = False
        self._replayed = False
        self._first_layer: dict[int, int] = {}  # of all layers, by the id of the execution; for what is recorded
        self._unknown: torch.device | None = None  # whose stream is known once a step begins
        self._stream: CurrentCudaStream | None = None
        # Finishes the trace, stops threads and closes stores: once, when called, garbage-collected or at exit.
        self.close = Closer(self, partial(_close, self.recorder.watchdogs, self.recordings, tuple(executions)))

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Disables ``begin_step`` inside the block: vLLM warms up its kernels with batches that look like real ones."""
        self._warming = True
        try:
            yield
        finally:
            self._warming = False

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
        if self._warming:
            return
        self.recorder.begin(step)
        if self._unknown is not None:
            self._stream, self._unknown = CurrentCudaStream(self._unknown), None
        self._step, self._rows = step, step.rows
        self.drafts.begin(step)
        there = self.cut_rows if self.cutting else None, self.reached if self.weighed else None
        votes = self.budget.begin_step(step, *there)
        for execution in self.executions:
            execution.begin_step(votes)
        self.recordings.begin_step(step)

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and ids [rows, k] that layer number ``layer`` of the model must run.

        Shapes as in ``Listener.route``, with padding. Dummy and profile runs are returned unchanged. While a CUDA graph
        is captured, the launches of the budget are captured into it, and the one that takes cut rows their experts.
        """
        weights, ids = self._routed(layer, hidden, logits, weights, ids)
        if self.cut_rows is None or not (self.cutting or self._step is None):
            return weights, ids
        return weights, ids.masked_fill(self.cut_rows[: len(ids)], NO_EXPERT)

    def _routed(
        self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``route`` of rows that are not cut."""
        if self._step is None:
            if self.rerouted is not None:
                return self.rerouted(layer, hidden, logits, weights, ids)
            if capturing(ids):
                return self.budget.capture(layer, logits, weights, ids, hidden)
            self.budget.compile(layer, logits, weights, ids, hidden)
            return weights, ids
        if not (self.listeners or self.budget.active):
            return weights, ids
        rows = self._rows
        for listener in self.listeners:
            listener.route(layer, hidden[:rows], logits[:rows], weights[:rows], ids[:rows])
        if not self.budget.active:
            return weights, ids
        return self.budget.apply(layer, logits, weights, ids, self._step, hidden=hidden)

    def captured(self) -> None:
        """Called while a layer is captured into a CUDA graph; replays do not run this method.

        Raises:
            UnsupportedError: a trace, a listener or a budget has to run on the host in each layer.
        """
        self._replayed = True
        if self.recordings.trace is not None or self.listeners or (self.budget.active and not self.budget.captured):
            self.require_host("a trace, a listener or this budget")

    def require_host(self, what: str) -> None:
        """Checks that ``what`` can run on the host in each layer.

        Raises:
            UnsupportedError: some layers are replayed from a CUDA graph, without the host.
        """
        if self._replayed:
            raise UnsupportedError(
                f"spac: {what} needs the host in each layer, but this engine runs its layers in full CUDA graphs; "
                """start it with --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
            )

    def change_budget(self, settings: Any) -> None:
        """Uses ``settings`` from the next step on; changes nothing if it raises.

        Raises:
            ConfigError, UnsupportedError: as ``Rerouting.change``, because layers are replayed from CUDA graphs
                that were captured without a budget, or because a policy would not count the votes.
        """
        weighed_there = self.reached is not None
        blind = [e for e in self.executions if settings.alpha is not None and (weighed_there or not e.counts_votes)]
        if any(each.residency.policy.predictor is not None for each in blind):
            raise UnsupportedError(
                "spac: votes=path (--spac-budget) cannot work here: this engine's policy counts selections, and "
                "its execution counts each row as one; use uniform votes, or start it with another --spac-policy or "
                "with --spac-plane slots"
            )
        if settings.active and not self.budget.captured:
            self.require_host("a budget")
        self.budget.change(settings)
        if self.cut_rows is not None and self.budget.uncut:
            logger.info("spac: no draft is cut on the device while this budget is in force: %s", self.budget.uncut)

    def rows(self, forward: int) -> int:
        """Number of leading rows of a forward that belong to requests; ``forward`` itself in a dummy run."""
        return forward if self._step is None else self._rows

    def forward(
        self, execution: Execution, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel
    ) -> Tensor:
        """Computes the routed experts of one layer; arguments and result as in ``Execution.forward``.

        Raises:
            SpacError: the layer cannot be computed, or is being captured and waits for the host.
            UnsupportedError: as ``captured``.
        """
        if capturing(x):
            if execution.waits_for_host(kernel):
                raise SpacError(
                    f"spac: {execution.shape.layers[layer]} is being captured into a CUDA graph, where nothing can be "
                    "loaded or counted; add --enforce-eager"
                )
            self.captured()
        real = self.rows(len(x))
        whole = real == len(x) and not (self.budget.active or self.cutting)
        as_routed = (self._step is not None or self.rerouted is not None) and whole
        record = None if self.recordings.trace is None else self._record
        rows = Rows(real, as_routed, record, self.cutting, self.budget.guess)
        number = self._first_layer.get(id(execution), 0) + layer
        entered = None if self._step is None else self.recorder.enter(number)
        try:
            out = execution.forward(layer, x, weights, ids, kernel, rows)
        except Exception as error:
            if self._failed is not None:
                self._failed(error)
            raise
        if entered is not None:
            self.recorder.leave(entered, number, real)
        return out

    def _record(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """Keeps the experts and weights that a layer is about to run, both [rows, top_k] without padding."""
        if self._step is not None:
            self.recordings.chose(layer, ids, weights)

    def end_forward(self) -> None:
        """Called when the layers have finished or failed; what runs until the next step (profiling, warm-up) is not
        counted."""
        step, self._step = self._step, None
        self.cutting = self.weighed = False
        with self.recorder.ending(step):
            self.budget.end_step()
            for execution in self.executions:
                execution.end_forward()

    @property
    def missed(self) -> int:
        """Experts that were not in fast memory when a layer needed them, so far."""
        return _missed(self.executions)

    @property
    def warms_up(self) -> bool:
        """Whether what looks like a step is not one."""
        return self._warming

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and not ended: its layers run, or drafts are made of its tokens."""
        return self.drafts.step is not None

    @property
    def observes_drafts(self) -> bool:
        """Whether ``drafting`` is to be called, and ``begin_step`` passed what the drafter computed."""
        return any(DRAFTING & execution.signals for execution in self.executions)

    def drafting(self, read: Tensor) -> None:
        """The drafter has read tokens of the next step; called after each of its forwards.

        Args:
            read: what was chosen for all of them since the last step, as ``Seen.draft_ids``, on the device that runs
                the layers.
        """
        for execution in self.executions:
            if DRAFTING & execution.signals:
                execution.draft(read)

    def drafted(self, drafts: int, seconds: float, forwards: int | None = None) -> None:
        """The drafter took ``seconds`` to propose up to ``drafts`` tokens for each request.

        Args:
            forwards: that it took, one after another; None: one for each of the drafts.
        """
        self.recorder.notes.add("drafts made", drafts)
        forwards = drafts if forwards is None else forwards
        self.drafts.made(forwards, seconds)
        if not (drafts and forwards) or self.drafts.in_prompt:  # whose rows the drafter reads, too
            return
        for execution in self.executions:
            if execution.balancer is not None:
                execution.balancer.drafted(seconds / drafts)

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
