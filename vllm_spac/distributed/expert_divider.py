"""How the experts that a layer needs are divided among the workers of its group. Pure.

OD-MoE (section 3) has each worker of a group load and compute a part of a token's experts. Here the last worker is to
finish as early as possible: a load costs what it takes there, and an expert costs none where it has a slot already. So
experts stay with the worker that has them, until another one is faster. The division is greedy, and where a layer takes
long that of ``balancers.makespan``, which takes this process longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_spac.balancers._processors import Division, Work, greedy
from vllm_spac.balancers.makespan import solve

_NODES = 200  # branches of a search
_WORTH_A_SEARCH = 0.02  # seconds of a layer, of which a search saves a fortieth on average and takes half a millisecond


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds that a worker takes.

    Attributes:
        expert: one expert in a slot, for few rows.
        row: one row of an expert, where its rows are many: an expert takes ``max(expert, rows * row)``.
        load: one expert into a slot.
        message: of the engine, to send the worker rows and to take its answer; the engine does one after another.
    """

    expert: float
    row: float
    load: float
    message: float


class Assigned(NamedTuple):
    """What one worker is to compute: ``experts`` is int64 [n], ascending, or likeliest first of a hint."""

    worker: int
    experts: np.ndarray


class ExpertDivider:
    """Divides experts, and keeps in mind where each has a slot: each answer of a worker says it. Called by one thread.

    Args:
        layers, experts: of the model.
        mine: the layers of each worker, ascending.
    """

    def __init__(self, layers: int, experts: int, mine: Sequence[Sequence[int]]) -> None:
        self._mine = [np.asarray(each, dtype=np.int64) for each in mine]
        self._experts = experts
        self._there = np.zeros((len(mine), layers, experts), dtype=bool)
        self._told = np.zeros_like(self._there)  # hints since the layer ran
        self._rates: dict[int, Rates] = {}

    def served(self, worker: int) -> int:
        """Returns of how many experts an answer of ``worker`` says whether they have a slot."""
        return len(self._mine[worker]) * self._experts

    def admit(self, worker: int, rates: Rates) -> None:
        """``worker`` is asked from now on; what ``sees`` says next is all that is known of its slots."""
        self._rates[worker] = rates
        self._there[worker] = self._told[worker] = False

    def sees(self, worker: int, resident: np.ndarray) -> None:
        """An answer of ``worker`` says which experts have a slot there: bool [``served``]."""
        self._there[worker, self._mine[worker]] = resident.reshape(-1, self._experts)

    def divide(self, layer: int, ids: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
        """Returns what each worker computes of a layer: every expert of ``ids`` once, and no worker without one.

        Args:
            layer: number of the layer.
            ids: int [rows, top_k], its experts.
            workers: those among which they are divided, at least one, each admitted.
        """
        active, rows = np.unique(ids, return_counts=True)
        where = self._where(layer, active, rows, workers)
        self._told[:, layer] = False
        return _assigned(active.astype(np.int64), where, workers)

    def expect(self, layer: int, experts: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
        """Returns what each worker is to load ahead; ``experts``: int [n], distinct, likeliest first, as the result."""
        experts = np.asarray(experts, dtype=np.int64)
        found = _assigned(experts, self._where(layer, experts, np.ones(len(experts)), workers), workers)
        for worker, told in found:
            self._told[worker, layer, told] = True
        return found

    def _where(self, layer: int, experts: np.ndarray, rows: np.ndarray, workers: Sequence[int]) -> np.ndarray:
        """Returns the place in ``workers`` of each expert, int64."""
        if len(workers) == 1:
            return np.zeros(len(experts), dtype=np.int64)
        rates = [self._rates[worker] for worker in workers]
        compute = np.stack([np.maximum(rate.expert, rows * rate.row) for rate in rates])
        told, there = (known[list(workers), layer][:, experts] for known in (self._told, self._there))
        there = np.where(told.any(axis=0), told, there)  # a hint is newer than the answers before it
        load = np.where(there, 0.0, np.asarray([[rate.load] for rate in rates]))
        wire = np.asarray([rate.message for rate in rates])
        work = Work(compute, load, np.zeros(len(rates)), wire)
        found: Division = greedy(work)
        if found.seconds > _WORTH_A_SEARCH:
            found = solve(work, _NODES)
        return np.asarray(found.where, dtype=np.int64)


def _assigned(experts: np.ndarray, where: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
    found = (Assigned(worker, experts[where == place]) for place, worker in enumerate(workers))
    return [each for each in found if len(each.experts)]
