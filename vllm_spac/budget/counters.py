"""Counters of a budget's effect: rows, dropped routing weight, shortlists, and experts used."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_PENDING = 64  # shortlists that are counted together


class BudgetCounters:
    """Effect of a budget since the start, or since ``reset``, summed over layers and forwards.

    ``add`` only stores its arguments; those of many layers are counted together later, so that no layer waits. CUDA
    graphs count in device memory, which ``snapshot`` reads.

    Attributes:
        on_device: float64 [5], counts of the graphs, in the order of ``snapshot``; None until ``count_on``.
        unweighted: verified requests that voted as if every row were reached, though votes are weighted: the draft's
            probabilities were not known. Counted once per step.
    """

    def __init__(self) -> None:
        self.on_device: Tensor | None = None
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

    def count_on(self, device: torch.device | str) -> None:
        """Allocates the counters of graphs on ``device``, at a fixed address."""
        self.on_device = torch.zeros(len(self._counted), dtype=torch.float64, device=device)

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
            without routed experts, or with one if it rescues. ``unweighted``: see the class. ``dropped_share``:
            ``dropped_weight`` per row.
        """
        self._count()
        found = self._counted
        if self.on_device is not None:
            told = self.on_device.tolist()  # waits for the steps that were launched
            found = {name: type(found[name])(found[name] + more) for name, more in zip(found, told, strict=True)}
        found = {**found, "unweighted": self.unweighted}
        return {**found, "dropped_share": found["dropped_weight"] / found["rows"] if found["rows"] else 0.0}

    def _count(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        natural, kept, weights, ids = (torch.cat(parts) for parts in zip(*pending, strict=True))
        lost = natural.masked_fill(kept, 0).sum(1) / natural.sum(1).clamp_min(1e-30)
        used, chosen = (weights != 0).cpu().numpy(), ids.cpu().numpy()
        shortlist = np.repeat(np.arange(len(pending)), [len(part[0]) for part in pending])
        seen = np.zeros((len(pending), int(chosen.max()) + 1), dtype=bool)
        seen[np.broadcast_to(shortlist[:, None], chosen.shape)[used], chosen[used]] = True
        counted = self._counted
        counted["rows"] += len(natural)
        counted["dropped_weight"] += float(lost.sum(dtype=torch.float64))
        counted["shortlists"] += len(pending)
        counted["experts"] += int(seen.sum())
        counted["emptied"] += int((~kept.any(1)).sum())


def _none() -> dict:
    return {"rows": 0, "dropped_weight": 0.0, "shortlists": 0, "experts": 0, "emptied": 0}
