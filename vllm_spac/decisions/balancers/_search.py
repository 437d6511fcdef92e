"""The fastest division of a layer's experts between few processors, by branch and bound. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_spac.decisions.balancers._processors import Work

NEAR = 1e-9  # of the seconds of a division: what is faster by less is not searched for


class Search:
    """Searches the divisions among given processors for one that is faster than a given number of seconds.

    Experts with the same costs everywhere are interchangeable: of their permutations one is tried. Two bounds cut a
    branch: if each remaining expert were the cheapest of them, the processors would have time for too few; and for
    weights w of the processors, the weighted mean of their ends is at least that of the times so far and the least
    weighted time of each remaining expert (the dual of the fractional division). Loads and what is computed meanwhile
    are bounded in turn, as if the other took no time.

    Args:
        work: the experts and costs.
        used: processors; their fixed costs and wires are counted whether they get experts or not.
        below: seconds that a division must be faster than.
        nodes: most branches that are tried.

    Attributes:
        nodes: those that are left.
        complete: all were tried or cut, so that what was found is the fastest.
    """

    def __init__(self, work: Work, used: Sequence[int], below: float, nodes: int) -> None:
        self._found: list[int] | None = None
        self.complete = True
        self.nodes = nodes
        self._used = list(used)
        compute, load = work.compute[self._used], work.load[self._used]
        may = np.isfinite(compute)
        least = np.where(may, compute + load, np.inf).min(axis=0)
        columns = np.vstack((-least, may.sum(axis=0) > 1, compute, load))
        self._order = np.lexsort(columns[[*range(len(columns) - 1, 1, -1), 0, 1]])
        compute, load, may = compute[:, self._order], load[:, self._order], may[:, self._order]
        alike = (compute[:, 1:] == compute[:, :-1]).all(axis=0) & (load[:, 1:] == load[:, :-1]).all(axis=0)
        self._alike = [False, *alike.tolist()]
        self._compute, self._load = compute.T.tolist(), load.T.tolist()
        self._options = [np.flatnonzero(column).tolist() for column in may.T]
        self._start = work.start(used)[self._used].tolist()
        self._count = len(self._order)
        size = len(self._used)
        self._loads, self._held, self._after = [0.0] * size, [0.0] * size, [0.0] * size
        self._where = [-1] * self._count
        self._limit = below * (1 - NEAR)
        self._prepare(compute, load, may)

    def _prepare(self, compute: np.ndarray, load: np.ndarray, may: np.ndarray) -> None:
        """Sets the sums and minima over the remaining experts, [experts + 1], that the bounds need."""
        lacks = load > 0
        linear = (np.where(lacks, load + compute, 0.0), compute)  # all waits for loads; loads take no time
        self._weights, self._sums = [], []
        for costs in linear:
            finite = np.where(may, costs, 0.0)
            mean = finite.sum(axis=1) / np.maximum(1, may.sum(axis=1))
            weights = np.divide(1.0, mean, out=np.zeros_like(mean), where=mean > 0)
            if not weights.any():
                weights[:] = 1.0
            weights /= weights.sum()
            least = np.where(may, weights[:, None] * finite, np.inf).min(axis=0)
            self._weights.append(weights.tolist())
            self._sums.append([*np.cumsum(least[::-1])[::-1].tolist(), 0.0])
        self._least = []
        for costs in linear:
            values = np.where(may, costs, np.inf)
            ahead = np.minimum.accumulate(values[:, ::-1], axis=1)[:, ::-1]
            self._least.append([*ahead.T.tolist(), [np.inf] * len(values)])

    def run(self) -> list[int] | None:
        """Returns the processor of each expert in the fastest division; None if none is faster than ``below``."""
        self._branch(0)
        if self._found is None:
            return None
        where = [-1] * self._count
        for expert, place in zip(self._order.tolist(), self._found, strict=True):
            where[expert] = self._used[place]
        return where

    def _branch(self, number: int) -> None:
        if self.nodes == 0:
            self.complete = False
            return
        self.nodes -= 1
        if number == self._count:
            seconds = max(self._end(p) for p in range(len(self._used)))
            if seconds < self._limit:
                self._limit, self._found = seconds * (1 - NEAR), list(self._where)
            return
        if self._hopeless(number):
            return
        first = self._where[number - 1] if self._alike[number] else 0
        tried = []
        for p in self._options[number]:
            if p >= first:
                before = self._loads[p], self._held[p], self._after[p]
                self._add(number, p)
                tried.append((self._end(p), p, (self._loads[p], self._held[p], self._after[p])))
                self._loads[p], self._held[p], self._after[p] = before
        for end, p, state in sorted(tried):
            if end < self._limit:
                before = self._loads[p], self._held[p], self._after[p]
                self._loads[p], self._held[p], self._after[p] = state
                self._where[number] = p
                self._branch(number + 1)
                self._loads[p], self._held[p], self._after[p] = before

    def _add(self, number: int, p: int) -> None:
        if self._load[number][p] > 0:
            self._loads[p] += self._load[number][p]
            self._after[p] += self._compute[number][p]
        else:
            self._held[p] += self._compute[number][p]

    def _end(self, p: int) -> float:
        return self._start[p] + max(self._loads[p], self._held[p]) + self._after[p]

    def _hopeless(self, number: int) -> bool:
        """Whether no way to place the experts from ``number`` on is faster than the limit."""
        size, room = range(len(self._used)), 0.0
        waits = [self._start[p] + self._loads[p] + self._after[p] for p in size]
        computes = [self._start[p] + self._held[p] + self._after[p] for p in size]
        for p in size:
            room += min(
                self._fits(waits[p], self._least[0][number][p]), self._fits(computes[p], self._least[1][number][p])
            )
        if room < self._count - number:
            return True
        for so_far, weights, sums in zip((waits, computes), self._weights, self._sums, strict=True):
            if sum(w * t for w, t in zip(weights, so_far, strict=True)) + sums[number] >= self._limit:
                return True
        return False

    def _fits(self, so_far: float, each: float) -> float:
        """Returns the most experts of ``each`` seconds that end before the limit; never too few."""
        left = self._limit - so_far
        if left < 0 or each == np.inf:
            return 0.0
        return float(self._count) if each * self._count <= left else left // each
