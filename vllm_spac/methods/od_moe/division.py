"""Which worker has which layer, which rows of a prompt, and which experts. Pure.

OD-MoE: On-Demand Expert Loading for Cacheless Edge-Distributed MoE Inference (Wang et al., 2025), section 3.

**Layers.** Workers form n groups of equal size, and layer l belongs to group l mod n. Each worker of a group has all
experts of its layers. A group of one worker computes whole rows, so that results keep the bits of vLLM's kernel; the
workers of a larger one divide the experts that a layer needs, so that each loads a part of them.

**Rows** of a prompt travel in parts of consecutive rows, since in vLLM's kernel a row does not depend on the others.
A worker has up to two parts at a time, so that one travels while the other is computed (mini-batches).

**Experts.** The last worker is to finish as early as possible: a load costs what it takes there, and an expert costs
none where it has a slot already. So experts stay with the worker that has them, until another one is faster. The
division is greedy (``greedy``): the fastest one would save about a fortieth of a layer, and takes this process longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vllm_spac.methods.od_moe.wire import Speed

PART_ROWS = 128  # rows of a part
WINDOW = 2  # parts that one worker has at a time


def owners(layer: int, workers: int, size: int = 1) -> tuple[int, ...]:
    """Returns the group that has ``layer``, of ``size`` workers; their number is a multiple of it."""
    assert size > 0 and workers % size == 0
    return tuple((size * layer + place) % workers for place in range(size))


def layers_of(worker: int, layers: int, workers: int, size: int = 1) -> tuple[int, ...]:
    """Returns the layers, of 0 to ``layers - 1``, of the group of ``worker``."""
    return tuple(layer for layer in range(layers) if worker in owners(layer, workers, size))


def parts(rows: int, part_rows: int = PART_ROWS) -> list[slice]:
    """Divides ``rows``, at least 1, into as few parts of consecutive rows as may be, of equal size but for one row."""
    count = -(-rows // part_rows)
    ends = [rows * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


class Assigned(NamedTuple):
    """What one worker is to compute: ``experts`` is int64 [n], ascending, or likeliest first of a hint."""

    worker: int
    experts: np.ndarray


class ExpertDivider:
    """Divides experts, and keeps in mind where each has a slot: each answer of a worker says it. Called by one thread.

    Args:
        layers_of_workers: the layers of each worker, ascending.
        message: seconds of the engine to send a worker rows and to take its answer; it does one after another.
    """

    def __init__(
        self, layers: int, experts: int, layers_of_workers: Sequence[Sequence[int]], message: float = 0.0
    ) -> None:
        self._layers = [np.asarray(each, dtype=np.int64) for each in layers_of_workers]
        self._experts, self._message = experts, message
        self._resident = np.zeros((len(layers_of_workers), layers, experts), dtype=bool)
        self._hinted = np.zeros_like(self._resident)  # hints since the layer ran
        self._speed: dict[int, Speed] = {}

    def served(self, worker: int) -> int:
        """Returns of how many experts an answer of ``worker`` says whether they have a slot."""
        return len(self._layers[worker]) * self._experts

    def admit(self, worker: int, speed: Speed) -> None:
        """``worker`` is asked from now on; what ``observe_resident`` says next is all that is known of its slots."""
        self._speed[worker] = speed
        self._resident[worker] = self._hinted[worker] = False

    def observe_resident(self, worker: int, resident: np.ndarray) -> None:
        """An answer of ``worker`` says which experts have a slot there: bool [``served``]."""
        self._resident[worker, self._layers[worker]] = resident.reshape(-1, self._experts)

    def divide(self, layer: int, ids: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
        """Returns what each of ``workers`` computes of a layer: every expert of ``ids`` once, and none without one.

        Args:
            ids: int [rows, top_k], its experts.
            workers: at least one, each admitted.
        """
        active, rows = np.unique(ids, return_counts=True)
        where = self._where(layer, active, rows, workers)
        self._hinted[:, layer] = False
        return _assigned(active.astype(np.int64), where, workers)

    def expect(self, layer: int, experts: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
        """Returns what each worker is to load ahead; ``experts``: int [n], distinct, likeliest first, as the result."""
        experts = np.asarray(experts, dtype=np.int64)
        assigned = _assigned(experts, self._where(layer, experts, np.ones(len(experts)), workers), workers)
        for worker, named in assigned:
            self._hinted[worker, layer, named] = True
        return assigned

    def _where(self, layer: int, experts: np.ndarray, rows: np.ndarray, workers: Sequence[int]) -> np.ndarray:
        """Returns the place in ``workers`` of each expert, int64."""
        if len(workers) == 1:
            return np.zeros(len(experts), dtype=np.int64)
        speeds = [self._speed[worker] for worker in workers]
        compute = np.stack([np.maximum(speed.expert, rows * speed.row) for speed in speeds])
        hinted, resident = (known[list(workers), layer][:, experts] for known in (self._hinted, self._resident))
        resident = np.where(hinted.any(axis=0), hinted, resident)  # a hint is newer than the answers before it
        load = np.where(resident, 0.0, np.asarray([[speed.load] for speed in speeds]))
        return np.asarray(greedy(compute, load, self._message), dtype=np.int64)


def greedy(compute: np.ndarray, load: np.ndarray, message: float) -> list[int]:
    """Returns the worker of each expert, so that no single worker would be faster; not always the fastest division.

    A worker loads the experts that it lacks one after another, computes meanwhile those that it has, and then those
    that it loaded. Experts in descending order of their least seconds, each to the worker that would then finish
    first, among all workers and, one after another, without those without which it is not slower. Compared with each
    single worker. In plain Python: for a few experts NumPy would take most of the time.

    Args:
        compute: float64 [workers, experts], seconds of each expert with its rows.
        load: float64 [workers, experts], seconds before it can be computed; 0 where the worker has it.
        message: seconds of the engine's link: all workers begin after that of each that is used.
    """
    if not compute.size:
        return []
    deal = partial(_dealt, compute.tolist(), load.tolist(), message)
    alone = [deal([worker]) for worker in range(len(compute))]
    used = list(range(len(compute)))
    best = deal(used)
    while len(used) > 1:
        others = [[worker for worker in used if worker != out] for out in used]
        least, fewer = min(((deal(some), some) for some in others), key=lambda each: each[0][0])
        if least[0] > best[0]:
            break
        best, used = least, fewer
    return min([best, *alone], key=lambda each: each[0])[1]


def _dealt(
    compute: list[list[float]], load: list[list[float]], message: float, used: list[int]
) -> tuple[float, list[int]]:
    """Returns (seconds until the last worker has finished, worker of each expert) among ``used``; see ``greedy``."""
    least = [min(compute[w][e] + load[w][e] for w in used) for e in range(len(compute[0]))]
    state = {w: (0.0, 0.0, 0.0) for w in used}  # of loads, of what a worker has, of what it has loaded
    where = [-1] * len(least)
    for e in sorted(range(len(least)), key=lambda e: -least[e]):
        soonest = math.inf
        for w in used:
            loads, held, after = state[w]
            if load[w][e] > 0:
                loads, after = loads + load[w][e], after + compute[w][e]
            else:
                held += compute[w][e]
            if (end := max(loads, held) + after) < soonest:
                soonest, where[e], then = end, w, (loads, held, after)
        state[where[e]] = then
    busy = set(where)
    return message * len(busy) + max(max(state[w][:2]) + state[w][2] for w in busy), where


def _assigned(experts: np.ndarray, where: np.ndarray, workers: Sequence[int]) -> list[Assigned]:
    shares = (Assigned(worker, experts[where == place]) for place, worker in enumerate(workers))
    return [share for share in shares if len(share.experts)]
