"""The kernels of a budget, what they count, and what CUDA graphs that hold them read.

``BudgetCounters`` adds up a budget's effect: rows, dropped routing weight, shortlists, and experts used. Of what is
captured in a graph, ``ReplayBuffers`` holds what differs per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import RowKind, Step
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.exchange import Exchange
from vllm_spac.methods.moe_spec.settings import STEPS, BudgetSettings

_PENDING = 64  # shortlists that are counted together


def _lasting(size: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros that are written between steps too, where a tensor that was made in a step's inference mode refuses it."""
    with torch.inference_mode(False):
        return torch.zeros(size, dtype=dtype, device=device)


class BudgetCounters:
    """Effect of a budget since the start, or since ``reset``, summed over layers and forwards.

    ``add`` only stores its arguments; those of many layers are counted together later. Launches count in device memory,
    which ``snapshot`` reads. ``unweighted`` are verified requests that voted as if every row were reached, though votes
    are weighted: the draft's probabilities were not known. They are counted once per step.
    """

    def __init__(self) -> None:
        self.on_device: Tensor | None = None  # float64 [5], counts of the launches, in the order of ``snapshot``
        self.unweighted = 0
        self._counted = _none()
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, natural: Tensor, kept: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Adds one shortlist.

        Args:
            natural: float [rows, k], the routing weights without a budget.
            kept: bool [rows, k], which of these experts are in the shortlist.
            weights, ids: [rows, k], the routing under the budget.
        """
        if len(self._pending) == _PENDING or (self._pending and self._pending[0][0].shape[1] != natural.shape[1]):
            self._count()
        self._pending.append((natural.clone(), kept, weights.clone(), ids.clone()))  # they may be overwritten

    def on(self, device: torch.device | str) -> Tensor:
        """The counters of launches on ``device``, at a fixed address; allocated by the first call."""
        if self.on_device is None:
            self.on_device = _lasting(len(self._counted), torch.float64, device)
        return self.on_device

    def reset(self) -> None:
        """Sets all counters to zero."""
        self._counted, self._pending, self.unweighted = _none(), [], 0
        if self.on_device is not None:
            self.on_device.zero_()

    def snapshot(self) -> dict:
        """The counters as plain data.

        Returns:
            ``rows``: rows under the budget, counted once per layer. ``dropped_weight``: sum over these rows of the
            share of the row's routing weights that belongs to experts outside the shortlist. ``shortlists``: number of
            shortlists, one per layer and forward. ``experts``: sum over shortlists of the distinct experts that their
            rows used. ``emptied``: rows none of whose experts was in the shortlist; truncation leaves such a row
            without routed experts. ``unweighted``: see the class. ``dropped_share``:
            ``dropped_weight`` per row.
        """
        self._count()
        counts = dict(self._counted)
        if self.on_device is not None:
            launched = self.on_device.tolist()  # waits for the steps that were launched
            both = zip(counts.items(), launched, strict=True)
            counts = {name: type(count)(count + more) for (name, count), more in both}
        share = counts["dropped_weight"] / counts["rows"] if counts["rows"] else 0.0
        return {**counts, "unweighted": self.unweighted, "dropped_share": share}

    def _count(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        natural, kept, weights, ids = (torch.cat(parts) for parts in zip(*pending, strict=True))
        lost = natural.masked_fill(kept, 0).sum(1) / natural.sum(1).clamp_min(1e-30)
        used, chosen = (weights != 0).cpu().numpy(), ids.cpu().numpy()
        shortlist = np.repeat(np.arange(len(pending)), [len(part[0]) for part in pending])
        run = np.zeros((len(pending), int(chosen.max()) + 1), dtype=bool)
        run[np.broadcast_to(shortlist[:, None], chosen.shape)[used], chosen[used]] = True
        counted = self._counted
        counted["rows"] += len(natural)
        counted["dropped_weight"] += float(lost.sum(dtype=torch.float64))
        counted["shortlists"] += len(pending)
        counted["experts"] += int(run.sum())
        counted["emptied"] += int((~kept.any(1)).sum())


def _none() -> dict:
    return {"rows": 0, "dropped_weight": 0.0, "shortlists": 0, "experts": 0, "emptied": 0}


class BudgetKernels(NamedTuple):
    """The kernels of ``vllm_spac.kernels`` that apply a budget, or their torch twins."""

    shortlist: Callable[..., tuple[Tensor, Tensor]]
    cover: Callable[..., tuple[Tensor, Tensor]]
    tally: Callable[..., None]

    @classmethod
    def on(cls, device: torch.device) -> BudgetKernels:
        """The kernels for ``device``: torch twins where it is no GPU."""
        if device.type != "cuda":
            from vllm_spac.kernels.reference.cover import cover
            from vllm_spac.kernels.reference.shortlist import shortlist
            from vllm_spac.kernels.reference.tally import tally
        else:
            from vllm_spac.kernels.cover import cover
            from vllm_spac.kernels.shortlist import shortlist
            from vllm_spac.kernels.tally import tally
        return cls(shortlist, cover, tally)


def members(ids: Tensor, experts: int) -> Tensor:
    """bool [N]: whether each expert is among ``ids``, int of any shape, any number of times."""
    return torch.zeros(experts, dtype=torch.bool, device=ids.device).index_fill_(0, ids.flatten().long(), True)


@dataclass(frozen=True)
class Launches:
    """The part of a budget that is fixed when a graph is captured; the rest is read from memory by each replay."""

    ranking: str
    coverage: str
    mass_of: str | None  # as in ``BudgetSettings`` for a budget by mass; None for one by number of experts
    speculate: str = "off"  # as in ``BudgetSettings``; if it is not off, nothing else counts

    @classmethod
    def of(cls, settings: BudgetSettings) -> Launches:
        if settings.speculate != "off":
            return cls("", "", None, settings.speculate)
        mass_of = None if settings.mass is None else settings.mass_of
        return cls(settings.ranking, settings.coverage, mass_of)

    def describe(self) -> str:
        if self.speculate != "off":
            return f"speculate={self.speculate}"
        bound = "budget" if self.mass_of is None else f"mass, mass_of={self.mass_of}"
        return f"{bound}, ranking={self.ranking}, coverage={self.coverage}"

    def check_settings(self, settings: BudgetSettings) -> None:
        """Raises ``UnsupportedError`` if ``settings`` need other launches than these."""
        needed = self.of(settings)
        if needed != self:
            raise UnsupportedError(
                f"spac: the full CUDA graphs of this engine hold a budget of the kind ({self.describe()}), whose "
                f"number and rows can be changed; one of the kind ({needed.describe()}) needs a restart with its "
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
    """

    def __init__(self, rows: int, layers: int, device: torch.device | str) -> None:
        self.votes = _lasting(rows, torch.float64, device)  # how much each row counts in the step; above 0 it is cut
        self.bounds = _lasting(layers, torch.int64, device)  # experts that each layer may use
        self._silent, self._exchange = True, Exchange(torch.device(device))
        self._exchange.reserve(0, self.votes.nbytes)

    def write_budgets(self, experts: Sequence[int]) -> None:
        """Writes the budget of each layer, in experts; one copy."""
        self.bounds.copy_(torch.tensor(experts))

    def begin_step(self, step: Step, kinds: Sequence[RowKind]) -> None:
        """Writes the votes of the rows of these kinds, which are the weights of ``step``; at most one copy."""
        voting = [request for request in step.requests if request.kind in kinds]
        if not voting:
            self.end_step()
            return
        votes = torch.zeros(len(self.votes), dtype=torch.float64)
        for request in voting:
            rows = votes[request.start : request.stop]
            rows.copy_(torch.tensor(request.weights or [1.0] * len(rows), dtype=torch.float64))
        self._exchange.write(self.votes, votes)
        self._silent = False

    def apply_reached(self, reached: Tensor, alpha: float) -> None:
        """Multiplies the votes by those that follow from ``reached``, float64 [rows] on the device, by ``vote``."""
        count = min(len(reached), len(self.votes))
        steps = (reached[:count].pow(alpha) * STEPS).round_().clamp_(1, STEPS)
        self.votes[:count].mul_(steps.div_(STEPS))

    def reset_votes(self, rows: Tensor) -> None:
        """Takes these rows of the step their votes, bool [rows] on the device: one launch."""
        count = min(len(rows), len(self.votes))
        self.votes[:count].masked_fill_(rows[:count], 0)

    def end_step(self) -> None:
        """Marks all rows as not voting; at most one launch."""
        if not self._silent:
            self.votes.zero_()
        self._silent = True
