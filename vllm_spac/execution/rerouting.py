"""What rows run in place of what the routers chose: the contract of what changes it, and how a step applies it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from vllm_spac.core import NO_EXPERT, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.base import Execution
from vllm_spac.execution.exchange import capturing

logger = logging.getLogger("vllm.spac")


class Rerouting:
    """A budget, or execution by prediction. This one leaves every expert; a subclass is lossy while it is ``active``.

    Attributes:
        active: whether ``apply`` changes anything.
        weighs: whether rows count by the probability that they are reached.
        captured: CUDA graphs hold its launches.
        uncut: why the device cannot cut drafts beside what is in force; empty if it can.
        guess: float [rows, N], scores of the layer behind the one that was routed last, which decide what it will run;
            None if none do.
    """

    settings: Any = None  # those in force

    @property
    def active(self) -> bool:
        return False

    @property
    def weighs(self) -> bool:
        return False

    @property
    def captured(self) -> bool:
        return False

    @property
    def uncut(self) -> str:
        return ""

    @property
    def guess(self) -> Tensor | None:
        return None

    def describe(self) -> str:
        """A short description of what is in force, for the log."""
        return "off"

    def update(self, settings: Any) -> None:
        """Uses ``settings`` from the next step on; changes nothing if it raises."""
        raise NotImplementedError

    def begin_step(self, step: Step, cut: Tensor | None = None, reached: Tensor | None = None) -> Step:
        """Begins a forward; returns ``step`` with the rows' votes, as far as the host knows them.

        Args:
            cut: bool [rows, 1] on the device, rows without a vote.
            reached: float64 [rows] there, the probability that each row is reached.
        """
        return step

    def end_step(self) -> None:
        """Ends it."""

    def apply(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, step: Step, *, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the weights and ids [rows, k] to run in layer ``index``.

        Args:
            logits: router logits, [rows, N].
            weights, ids: what the router chose, [rows, k].
            hidden: hidden states, [rows, d].
        """
        return weights, ids

    def capture(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        """``apply`` as launches that a CUDA graph can hold."""
        return weights, ids

    def compile(self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, hidden: Tensor) -> None:
        """Launches in a dummy forward what will be captured."""


class Listener(Protocol):
    """Receives a layer's routing before a budget is applied; for training and evaluation."""

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Receives the routing of one layer in one step, without padding.

        Args:
            hidden: hidden states, [rows, d].
            logits: router logits, [rows, N].
            weights, ids: what the router chose, [rows, k].
        """


class Rerouter:
    """Called by the forward thread: ``begin_step``, ``route`` for each layer, ``end_step``.

    Args:
        budget: bounds the experts of a layer; exact until it is changed.
        executions: one per ``MoEShape``.

    Attributes:
        override: chooses experts in place of the budget, outside of steps; arguments and result as of ``route``.
        cut_rows: bool [rows, 1] on the device, at a fixed address: rows of the step whose drafts were cut there and run
            no expert. None: nothing cuts any.
        cutting: whether some rows of the step may be among them.
        reached: float64 [rows] on the device, at a fixed address: the probability that each row of the step is reached,
            for weighted votes; None: it is known on the host, or votes are not weighted.
        weighed: whether it is that of the step.
    """

    def __init__(self, budget: Rerouting, executions: Sequence[Execution]) -> None:
        self.budget, self._executions = budget, executions
        self.listeners: list[Listener] = []
        self.override: Callable[[int, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self.cut_rows: Tensor | None = None
        self.cutting = False
        self.reached: Tensor | None = None
        self.weighed = False
        self._step: Step | None = None  # while its layers run
        self._replayed = False

    def begin_step(self, step: Step) -> Step:
        """Begins a forward; returns ``step`` with the rows' votes, as ``Rerouting.begin_step``."""
        self._step = step
        cut, reached = self.cut_rows if self.cutting else None, self.reached if self.weighed else None
        return self.budget.begin_step(step, cut, reached)

    def end_step(self) -> None:
        """Ends it."""
        self._step, self.cutting, self.weighed = None, False, False
        self.budget.end_step()

    @property
    def as_routed(self) -> bool:
        """Whether what layers run now is what routers chose for real rows."""
        real = self._step is not None or self.override is not None
        return real and not (self.budget.active or self.cutting)

    def route(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and ids [rows, k] that layer number ``layer`` of the model must run.

        Shapes as in ``Listener.route``, with padding. Dummy and profile runs are returned unchanged. While a CUDA graph
        is captured, the launches of the budget are captured into it, and the one that takes cut rows their experts.
        """
        weights, ids = self._uncut(layer, hidden, logits, weights, ids)
        if self.cut_rows is None or not (self.cutting or self._step is None):
            return weights, ids
        return weights, ids.masked_fill(self.cut_rows[: len(ids)], NO_EXPERT)

    def _uncut(self, layer: int, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """``route`` of rows that are not cut."""
        if self._step is None:
            if self.override is not None:
                return self.override(layer, hidden, logits, weights, ids)
            if capturing(ids):
                return self.budget.capture(layer, logits, weights, ids, hidden)
            self.budget.compile(layer, logits, weights, ids, hidden)
            return weights, ids
        rows = self._step.rows
        for listener in self.listeners:
            listener.route(layer, hidden[:rows], logits[:rows], weights[:rows], ids[:rows])
        if not self.budget.active:
            return weights, ids
        return self.budget.apply(layer, logits, weights, ids, self._step, hidden=hidden)

    def observe_capture(self, traced: bool) -> None:
        """Called while a layer is captured into a CUDA graph; replays do not run this method.

        Args:
            traced: what layers run is recorded.

        Raises:
            UnsupportedError: a trace, a listener or a budget has to run on the host in each layer.
        """
        self._replayed = True
        if traced or self.listeners or (self.budget.active and not self.budget.captured):
            self.check_host("a trace, a listener or this budget")

    def check_host(self, what: str) -> None:
        """Checks that ``what`` can run on the host in each layer.

        Raises:
            UnsupportedError: some layers are replayed from a CUDA graph, without the host.
        """
        if self._replayed:
            raise UnsupportedError(
                f"spac: {what} needs the host in each layer, but this engine runs its layers in full CUDA graphs; "
                """start it with --compilation-config '{"cudagraph_mode": "PIECEWISE"}' or --enforce-eager"""
            )

    def update_budget(self, settings: Any) -> None:
        """Uses ``settings`` from the next step on; changes nothing if it raises.

        Raises:
            ConfigError, UnsupportedError: as ``Rerouting.update``, because layers are replayed from CUDA graphs
                that were captured without a budget, or because a policy would not count the votes.
        """
        weighed_on_device = self.reached is not None
        blind = [
            e for e in self._executions if settings.alpha is not None and (weighed_on_device or not e.counts_votes)
        ]
        if any(each.policy.predictor is not None for each in blind):
            raise UnsupportedError(
                "spac: votes=path (--spac-budget) cannot work here: this engine's policy counts selections, and "
                "its execution counts each row as one; use uniform votes, or start it with another --spac-policy or "
                "with --spac-plane slots"
            )
        if settings.active and not self.budget.captured:
            self.check_host("a budget")
        self.budget.update(settings)
        if self.cut_rows is not None and self.budget.uncut:
            logger.info("spac: no draft is cut on the device while this budget is in force: %s", self.budget.uncut)
