"""Experts of a layer and what each processor takes for them; two ways to divide them. Pure.

Which costs are shared: a processor loads the experts that it lacks one after another, computes meanwhile those that it
has, and then those that it loaded; two processors share nothing, but for ``wire``, a link that all have in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Work:
    """Experts of a layer, and seconds that each processor takes for them; all values >= 0.

    Attributes:
        compute: float64 [processors, experts], with the expert's rows; inf where the expert cannot run.
        load: float64 [processors, experts], before it can be computed; 0 where the processor has it.
        fixed: float64 [processors], if it is used at all, as for the way to a worker and back.
        wire: float64 [processors], on the link that all processors share, if it is used at all: each that is used and
            has a wire ends later by the sum of those that are used.

    Raises:
        ValueError: the shapes do not agree, a cost is negative or no number, or an expert cannot run anywhere.
    """

    compute: np.ndarray
    load: np.ndarray
    fixed: np.ndarray
    wire: np.ndarray

    def __post_init__(self) -> None:
        each = self.compute.shape[:1]
        if self.load.shape != self.compute.shape or self.fixed.shape != each or self.wire.shape != each:
            raise ValueError(
                f"compute {self.compute.shape}, load {self.load.shape}, fixed {self.fixed.shape} and wire "
                f"{self.wire.shape} are not of the same processors and experts"
            )
        if not all((values >= 0).all() for values in (self.compute, self.load, self.fixed, self.wire)):
            raise ValueError("a cost is negative or no number")
        if not all(np.isfinite(values).all() for values in (self.load, self.fixed, self.wire)):
            raise ValueError("a load, a fixed cost or a wire is infinite; where an expert cannot run, compute is")
        if not np.isfinite(self.compute).any(axis=0).all():
            raise ValueError("an expert can run on no processor")

    def start(self, used: Sequence[int]) -> np.ndarray:
        """Returns float64 [processors]: the seconds of each before its experts, if those of ``used`` are used."""
        shared = self.wire[list(used)].sum()
        return self.fixed + np.where(self.wire > 0, shared, 0.0)

    def ends(self, where: Sequence[int]) -> np.ndarray:
        """Returns float64 [processors]: when each has finished; 0 if it is unused.

        Args:
            where: int [experts], the processor of each expert; -1 for none.
        """
        found, chosen = np.zeros(len(self.compute)), np.asarray(where, dtype=np.int64)
        used = sorted(set(chosen[chosen >= 0].tolist()))
        start = self.start(used)
        for processor in used:
            here = chosen == processor
            compute, load = self.compute[processor, here], self.load[processor, here]
            lacks = load > 0
            found[processor] = start[processor] + max(load.sum(), compute[~lacks].sum()) + compute[lacks].sum()
        return found


@dataclass(frozen=True, slots=True)
class Division:
    """Where the experts of a layer run.

    Attributes:
        where: the processor of each expert.
        seconds: until the last processor has finished.
        exact: no division is faster, by more than 1e-9 of ``seconds``.
    """

    where: tuple[int, ...]
    seconds: float
    exact: bool

    @classmethod
    def of(cls, work: Work, where: Sequence[int], exact: bool = False) -> Division:
        return cls(tuple(map(int, where)), float(work.ends(where).max(initial=0.0)), exact)


def by_counts(work: Work, used: Sequence[int]) -> Division | None:
    """Returns the fastest division among ``used``, found by the number of experts for each; None if that is not enough.

    It is enough where the experts that have a choice have the same one, and are alike on all processors but one, on
    which they differ in ``compute`` only: for any number of experts on that one, the cheapest are the best, and of the
    others it only counts how many a processor has. O(processors * experts * log). Of equally fast divisions it has the
    fewest experts on that one, or on the last processor if they are alike on all.

    Args:
        used: processors, ascending; their fixed costs and wires are counted whether they get experts or not.
    """
    rows, experts = list(used), np.arange(work.compute.shape[1])
    compute, load = work.compute[rows], work.load[rows]
    may = np.isfinite(compute)
    options = may.sum(axis=0)
    if not options.all():
        return None
    free = options > 1
    where = np.asarray(rows)[may.argmax(axis=0)]
    if not free.any():
        return Division.of(work, where, exact=True)
    may, compute_free, load_free = may[:, free], compute[:, free], load[:, free]
    here = np.flatnonzero(may[:, 0])
    unlike = [p for p in here.tolist() if (compute_free[p] != compute_free[p, 0]).any()]
    if (may != may[:, :1]).any() or (load_free[here] != load_free[here, :1]).any() or len(unlike) > 1:
        return None
    last = unlike[0] if unlike else int(here[-1])
    order = np.argsort(compute_free[last], kind="stable")
    start = work.start(used)
    taken = np.arange(len(order) + 1)

    def own(p: int) -> tuple[float, float, float]:
        """Seconds of the experts that only processor p may have: of their loads, of what it has, of what it loads."""
        mine, lacks = ~free & (where == rows[p]), load[p] > 0
        return load[p, mine].sum(), compute[p, mine & ~lacks].sum(), compute[p, mine & lacks].sum()

    def ends(p: int) -> np.ndarray:
        """When processor p has finished with its own experts and the first 0, 1, ... of the order."""
        loads, first, after = own(p)
        more = np.concatenate(([0.0], np.cumsum(compute_free[p, order])))
        if load_free[p, 0] > 0:
            return start[rows[p]] + np.maximum(loads + taken * load_free[p, 0], first) + after + more
        return start[rows[p]] + np.maximum(loads, first + more) + after

    least = Division.of(work, np.where(free, -1, where).tolist()).seconds
    others = [p for p in here.tolist() if p != last]
    each = np.concatenate([ends(p)[1:] for p in others])
    merged = np.argsort(each, kind="stable")[: len(order)]  # the k first of them are the k experts that end first
    rest = np.concatenate(([0.0], each[merged]))[::-1]
    count = int(np.argmin(np.maximum(np.maximum(ends(last), rest), least)))  # the first of equals
    owner = np.repeat(np.asarray(rows)[others], len(order))[np.sort(merged[: len(order) - count])]
    place = experts[free][order]
    where[place[:count]] = rows[last]
    where[place[count:]] = owner
    return Division.of(work, where, exact=True)


def greedy(work: Work) -> Division:
    """Returns a division that no single processor beats; not always the fastest.

    Experts in descending order of their least seconds, each to the processor that would then finish first, among all
    processors and, one after another, without those without which it is not slower. Compared with each single
    processor, which has all experts that it may have.
    """
    deal = _Deal(work)
    able = [p for p, row in enumerate(deal.compute) if min(row, default=math.inf) < math.inf]
    found = [deal.out(able, p) for p in able]
    used, best = able, deal.out(able)
    while True:
        fewer = [[p for p in used if p != out] for out in used]
        tried = [(deal.out(some), some) for some in fewer if deal.can(some)]
        if not tried or min(tried, key=lambda each: each[0][0])[0][0] > best[0]:
            break
        best, used = min(tried, key=lambda each: each[0][0])
    seconds, where = min([best, *found], key=lambda each: each[0])
    return Division(tuple(where), seconds, exact=False)


class _Deal:
    """Deals out the experts of a layer, in plain Python: for a few experts numpy would take most of the time."""

    def __init__(self, work: Work) -> None:
        self.compute, self._load = work.compute.tolist(), work.load.tolist()
        self._fixed, self._wire = work.fixed.tolist(), work.wire.tolist()
        self._experts = range(work.compute.shape[1])

    def can(self, used: Sequence[int]) -> bool:
        """Whether each expert can run on one of ``used``."""
        return all(any(self.compute[p][e] < math.inf for p in used) for e in self._experts)

    def out(self, used: Sequence[int], first: int | None = None) -> tuple[float, list[int]]:
        """Returns (seconds, processor of each expert): ``first`` where it may be, else which of ``used`` ends first.

        Args:
            used: processors on which each expert can run.
            first: one of them.
        """
        compute, load = self.compute, self._load
        allowed = [[p for p in used if compute[p][e] < math.inf] for e in self._experts]
        least = [min(compute[p][e] + load[p][e] for p in allowed[e]) for e in self._experts]
        start = self._start(used)
        state = {p: (0.0, 0.0, 0.0) for p in used}  # of loads, of what a processor has, of what it has loaded
        where = [-1] * len(self._experts)
        for e in sorted(self._experts, key=lambda e: (len(allowed[e]) > 1, -least[e])):  # those without a choice first
            soonest = math.inf
            for p in (first,) if first in allowed[e] else allowed[e]:
                loads, held, after = state[p]
                if load[p][e] > 0:
                    loads, after = loads + load[p][e], after + compute[p][e]
                else:
                    held += compute[p][e]
                if (end := start[p] + max(loads, held) + after) < soonest:
                    soonest, where[e], then = end, p, (loads, held, after)
            state[where[e]] = then
        start = self._start(sorted(set(where)))
        return max((begin + max(state[p][:2]) + state[p][2] for p, begin in start.items()), default=0.0), where

    def _start(self, used: Sequence[int]) -> dict[int, float]:
        """As ``Work.start``, of each of ``used``."""
        shared = sum(self._wire[p] for p in used)
        return {p: self._fixed[p] + (shared if self._wire[p] > 0 else 0.0) for p in used}
