"""A step of the target model, from its rows to its tokens: tells every part that listens, in order."""

from __future__ import annotations

import contextlib
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vllm_spac.budget.control import BudgetControl
from vllm_spac.budget.settings import BudgetSettings
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import SpacError, UnsupportedError
from vllm_spac.execution.base import Execution, LayerKernel, Rows
from vllm_spac.execution.pointers.streams import capturing
from vllm_spac.speculation.guard import Guard
from vllm_spac.traces.writer import TraceWriter

_SAVE_SECONDS = 5.0


class Listener(Protocol):
    """Sees a layer's routing before a budget does; for calibration and evaluation."""

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Hidden states [rows, d], router logits [rows, N], natural weights and ids [rows, k] of one step, unpadded."""


class Runtime:
    """What the layers and the runner of one model talk to.

    ``begin_step``, then each layer, then ``end_forward``, then ``end_step`` with the tokens.

    Args:
        executions: one for each shape of layer.
        budget: bounds the experts of a layer; exact until it is changed.
        trace: records the routing of the one execution, if given.
        guard: says how many draft tokens the next step gets, if given.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        executions: Sequence[Execution],
        budget: BudgetControl,
        trace: TraceWriter | None = None,
        guard: Guard | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert trace is None or len(executions) == 1
        self.executions = list(executions)
        self.budget = budget
        self.guard = guard
        self.listeners: list[Listener] = []
        self.trace = trace
        self._clock = clock
        self._step: Step | None = None  # while its layers run
        self._chosen: list[tuple[int, Tensor, Tensor]] = []  # by the routers of the step, to be recorded behind it
        self._rows = 0  # of that step
        self._warming = False
        self._replayed = False
        self._timed: tuple[Step, int, float] | None = None  # step, draft length it runs under, start
        self._drafts = 0
        self._save_at = -math.inf
        # Finishes the trace, stops threads and gives back stores: once, when called, forgotten or at exit.
        self.close = weakref.finalize(self, _close, trace, tuple(executions))

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Inside, no step begins: vLLM warms its kernels with batches that it makes up and that look like real ones."""
        self._warming = True
        try:
            yield
        finally:
            self._warming = False

    def begin_step(self, step: Step) -> None:
        """A forward for real requests starts."""
        if self._warming:
            return
        self._step, self._rows = step, step.rows
        self._timed = step, self._drafts, self._clock()
        for execution in self.executions:
            execution.begin_step(step)
        self.budget.begin_step(step)
        self._chosen.clear()
        if self.trace is not None:
            self.trace.begin_step(step)

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and ids [rows, k] that layer number ``layer`` of the model shall run; shapes as in ``Listener``.

        Dummy and profile runs pass unchanged. A CUDA graph that is captured gets the launches of the budget.
        """
        if self._step is None:
            if capturing(ids):
                return self.budget.capture(layer, logits, weights, ids)
            self.budget.compile(layer, logits, weights, ids)
            return weights, ids
        if not (self.listeners or self.budget.active):
            return weights, ids
        rows = self._rows
        for listener in self.listeners:
            listener.route(layer, hidden[:rows], logits[:rows], weights[:rows], ids[:rows])
        return self.budget.apply(layer, logits, weights, ids, self._step) if self.budget.active else (weights, ids)

    def captured(self) -> None:
        """A layer is being captured into a CUDA graph, whose replays come by here no more.

        Raises:
            UnsupportedError: something looks at layers from the host.
        """
        self._replayed = True
        if self.trace is not None or self.listeners or (self.budget.active and not self.budget.captured):
            self.require_host("what records, cuts or evaluates routing")

    def require_host(self, what: str) -> None:
        """Before ``what`` looks at layers from the host: ``UnsupportedError`` if some are replayed without it."""
        if self._replayed:
            raise UnsupportedError(
                f"spac: {what} cannot look into a full CUDA graph, and this engine runs its layers in such; start it "
                """with --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
            )

    def change_budget(self, settings: BudgetSettings) -> None:
        """Use ``settings`` from the next step on, or change nothing.

        Raises:
            ConfigError, UnsupportedError: as ``BudgetControl.change``; or layers are replayed without a budget.
        """
        if settings.active and not self.budget.captured:
            self.require_host("a budget")
        self.budget.change(settings)

    def rows(self, forward: int) -> int:
        """How many of a forward's rows belong to requests, the first ones; all of them in a dummy run."""
        return forward if self._step is None else self._rows

    def forward(
        self, execution: Execution, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel
    ) -> Tensor:
        """Routed experts of one layer, arguments and result as in ``Execution.forward``.

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
        as_routed = self._step is not None and real == len(x) and not self.budget.active
        rows = Rows(real, as_routed, None if self.trace is None else self._record)
        return execution.forward(layer, x, weights, ids, kernel, rows)

    def _record(self, layer: int, ids: Tensor, weights: Tensor) -> None:
        """A layer is about to run its rows with these experts, [rows, top_k] without padding."""
        if self._step is not None:
            self._chosen.append((layer, ids.clone(), weights.clone()))  # what is in them may be overwritten

    def end_forward(self) -> None:
        """The layers are done, or failed; what comes until the next step (profiling, warm-up) is not counted."""
        self._step = None
        self.budget.end_step()
        for execution in self.executions:
            execution.end_forward()

    @property
    def in_prompt(self) -> bool:
        """Whether the step that was just run had rows of prompts."""
        return self._timed is not None and self._timed[0].prompts

    def draft_length(self) -> int | None:
        """Draft tokens that each request gets for the next step; None leaves it to vLLM."""
        if self.guard is None:
            return None
        generating = sum(r.kind != RowKind.PREFILL for r in self._timed[0].requests) if self._timed else 0
        self._drafts = self.guard.choose(generating or None)
        return self._drafts

    @property
    def counts_tokens(self) -> bool:
        """Whether ``end_step`` has a use for the tokens, so that waiting for them pays."""
        return self._timed is not None and (self.trace is not None or self.guard is not None)

    def end_step(self, tokens: Sequence[int] | None) -> None:
        """Each request of the step emitted so many tokens; None when they are not known on the host."""
        timed, self._timed = self._timed, None
        if self.trace is not None:
            self._write(self.trace)
            self.trace.end_step(None if tokens is None else sum(tokens))
            self._save_sometimes(self.trace)
        if self.guard is not None and tokens is not None and timed is not None:
            step, drafts, start = timed
            emitted = [
                count for count, r in zip(tokens, step.requests, strict=True) if r.kind != RowKind.PREFILL and count
            ]
            self.guard.observe(drafts, emitted, len(step.requests), self._clock() - start)

    def _write(self, trace: TraceWriter) -> None:
        """What the routers of a step chose, at once: in a layer each call into torch costs a microsecond of its token,
        and on a GPU a copy would wait for the layer."""
        if self._chosen:
            layers, ids, weights = zip(*self._chosen, strict=True)
            self._chosen.clear()
            trace.observe(layers, torch.stack(ids).cpu().numpy(), torch.stack(weights).float().cpu().numpy())

    def _save_sometimes(self, trace: TraceWriter) -> None:
        """A server may be killed: what it recorded until seconds ago is then in the file. At most 0.5 % of the time."""
        now = self._clock()
        if now >= self._save_at:
            trace.save()
            done = self._clock()
            self._save_at = done + max(_SAVE_SECONDS, 200 * (done - now))


def _close(trace: TraceWriter | None, executions: Sequence[Execution]) -> None:
    if trace is not None:
        trace.finish()
    for execution in executions:
        execution.close()
