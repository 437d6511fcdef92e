"""Budgets in CUDA graphs: the launches that are captured, and the buffers that hold what differs per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.budget.settings import BudgetSettings
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import UnsupportedError


class Kernels(NamedTuple):
    """The kernels of ``vllm_spac.kernels`` that apply a budget, or their torch twins."""

    shortlist: Callable[..., tuple[Tensor, Tensor]]
    cover: Callable[..., tuple[Tensor, Tensor]]
    tally: Callable[..., None]

    @classmethod
    def on(cls, device: torch.device) -> Kernels:
        """The kernels for ``device``: torch twins on a CPU."""
        if device.type == "cpu":
            from vllm_spac.kernels.reference.cover import cover
            from vllm_spac.kernels.reference.shortlist import shortlist
            from vllm_spac.kernels.reference.tally import tally
        else:
            from vllm_spac.kernels.cover import cover
            from vllm_spac.kernels.shortlist import shortlist
            from vllm_spac.kernels.tally import tally
        return cls(shortlist, cover, tally)


@dataclass(frozen=True)
class Launches:
    """The part of a budget that is fixed when a graph is captured; the rest is read from memory by each replay.

    Attributes:
        ranking, coverage, rescue: as in ``BudgetSettings``.
        mass_of: as in ``BudgetSettings`` for a budget by mass; None for one by number of experts.
    """

    ranking: str
    coverage: str
    mass_of: str | None
    rescue: bool = False

    @classmethod
    def of(cls, settings: BudgetSettings) -> Launches:
        mass_of = None if settings.mass is None else settings.mass_of
        return cls(settings.ranking, settings.coverage, mass_of, settings.rescue)

    def describe(self) -> str:
        bound = "budget" if self.mass_of is None else f"mass, mass_of={self.mass_of}"
        rescue = ", rescue" if self.rescue else ""
        return f"{bound}, ranking={self.ranking}, coverage={self.coverage}{rescue}"

    def check_settings(self, settings: BudgetSettings) -> None:
        """Raises ``UnsupportedError`` if ``settings`` need other launches than these."""
        asked = self.of(settings)
        if asked != self:
            raise UnsupportedError(
                f"spac: the full CUDA graphs of this engine hold a budget of the kind ({self.describe()}), whose "
                f"number and rows can be changed; one of the kind ({asked.describe()}) needs a restart with its "
                """--spac-budget flags, or with --compilation-config '{"cudagraph_mode": "PIECEWISE"}'"""
            )
        if settings.window is not None:
            raise UnsupportedError(
                "spac: window ranks some rows of a request at a time, which a full CUDA graph cannot; start this "
                "engine with --enforce-eager"
            )


class ReplayBuffers:
    """Buffers at fixed addresses that the captured launches of a budget read; written between steps, by one thread.

    The writes are enqueued on the stream that runs the model: after the previous replay and before the next.

    Args:
        rows: maximum number of rows of a forward.
        layers: MoE layers of the model.

    Attributes:
        votes: float64 [rows], how much each row counts in the current step; rows above 0 are cut.
        bounds: int64 [layers], experts that each layer may use.
    """

    def __init__(self, rows: int, layers: int, device: torch.device | str) -> None:
        self.votes = torch.zeros(rows, dtype=torch.float64, device=device)
        self.bounds = torch.zeros(layers, dtype=torch.int64, device=device)
        self._silent = True

    def bound(self, experts: Sequence[int]) -> None:
        """Writes the budget of each layer, in experts; one copy."""
        self.bounds.copy_(torch.tensor(experts))

    def begin_step(self, step: Step, kinds: Sequence[RowKind]) -> None:
        """Writes the votes of the rows of these kinds, which are the weights of ``step``; at most one copy."""
        voting = [request for request in step.requests if request.kind in kinds]
        if not voting:
            self.end_step()
            return
        votes = torch.zeros(len(self.votes), dtype=torch.float64, pin_memory=self.votes.is_cuda)
        for request in voting:
            rows = votes[request.start : request.stop]
            rows.copy_(torch.tensor(request.weights or [1.0] * len(rows), dtype=torch.float64))
        self.votes.copy_(votes, non_blocking=True)
        self._silent = False

    def end_step(self) -> None:
        """Marks all rows as not voting; at most one launch."""
        if not self._silent:
            self.votes.zero_()
        self._silent = True
