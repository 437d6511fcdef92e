"""The contract of what changes the routers' choice: a budget, or execution by prediction. This one changes nothing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllm_spac.core import Step


class Rerouting:
    """Leaves every expert that the routers chose. A subclass is lossy while it is ``active``.

    Attributes:
        settings: those in force.
        active: whether ``apply`` changes anything.
        weighs: whether rows count by the probability that they are reached.
        captured: CUDA graphs hold its launches.
        uncut: why the device cannot cut drafts beside what is in force; empty if it can.
        guess: float [rows, N], scores of the layer behind the one that was routed last, which decide what it will run;
            None if none do.
    """

    settings: Any = None

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

    def change(self, settings: Any) -> None:
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
