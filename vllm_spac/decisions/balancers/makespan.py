"""Balancer that lets all processors finish as early as possible: fast memory with its hits and loads, and the CPU."""

from __future__ import annotations

from itertools import combinations

import numpy as np

from vllm_spac.decisions.balancers._admitting import Admitting, least_likely_first
from vllm_spac.decisions.balancers._processors import Division, Work, by_counts, greedy
from vllm_spac.decisions.balancers._search import Search
from vllm_spac.decisions.balancers.base import LayerState, Plan, split

EXACT = 4  # processors
NODES = 4000  # branches of all searches for one layer


def solve(work: Work, nodes: int = NODES) -> Division:
    """Divides the experts of a layer so that the last processor finishes as early as possible.

    The same ``work`` gives the same division, and no processor alone is faster.

    - Up to ``EXACT`` processors: exact if the experts that have a choice differ on one processor at most (as where each
      takes its weights' time, at small batches), see ``by_counts``; otherwise by branch and bound from the greedy
      division, exact if ``nodes`` suffice, as ``Division.exact`` says. Which processors with a cost of use are used is
      decided by trying each set of them.
    - More: ``greedy``, with ``exact`` False.

    Args:
        work: experts and costs; processors on which no expert can run do not count.
        nodes: branches that are tried at most.
    """
    if not work.compute.shape[1]:
        return Division((), 0.0, exact=True)
    able = np.flatnonzero(np.isfinite(work.compute).any(axis=1)).tolist()
    if len(able) > EXACT:
        return greedy(work)
    best: Division | None = None
    left = []
    for used in _sets(work, able):
        found = by_counts(work, used)
        if found is None:
            left.append(used)
        elif best is None or found.seconds < best.seconds:
            best = found
    if left:
        first = greedy(work)
        if best is None or first.seconds < best.seconds:
            best = first
    assert best is not None, "every expert can run somewhere, and all processors are one of the sets"
    exact = True
    for used in left:
        search = Search(work, used, best.seconds, nodes)
        where = search.run()
        nodes, exact = search.nodes, exact and search.complete
        if where is not None:
            best = min(best, Division.of(work, where), key=lambda each: each.seconds)
    return Division(best.where, best.seconds, exact)


def _sets(work: Work, able: list[int]) -> list[list[int]]:
    """Returns the sets of processors that may be all that are used and can have all experts, the smallest first.

    Each has all processors whose use costs nothing.
    """
    may = np.isfinite(work.compute)
    costly = [p for p in able if work.fixed[p] > 0 or work.wire[p] > 0]
    free = [p for p in able if p not in costly]
    sets = [sorted([*free, *some]) for size in range(len(costly) + 1) for some in combinations(costly, size)]
    return [used for used in sets if may[used].any(axis=0).all()]


class Makespan(Admitting):
    """Splits misses between loading and the CPU so that the later of fast memory and CPU finishes as early as possible.

    Unlike ``waterfill`` it counts what fast memory computes: its hits, while loads run, and then the experts that it
    loaded. So the CPU gets more where hits or kernels take long, and less where hits hide the loads' time. Both
    processors are taken to compute concurrently, as a GPU and a CPU do; where the two kernels take turns on the same
    cores (``CpuExperts.exclusive``) only loads and one of them overlap, which ``waterfill`` describes better. Exact, as
    an expert takes fast memory the same time with any rows.
    """

    def plan(self, state: LayerState) -> Plan:
        hit, missing = split(state)
        rates = self.rates
        assert rates is not None, "it weighs costs"
        if not len(missing):
            return Plan(hit=hit)
        missing = least_likely_first(state, missing)
        experts = np.concatenate((np.asarray(hit, dtype=np.int64), missing))
        lacks = np.arange(len(experts)) >= len(hit)
        on_cpu = np.maximum(rates.cpu, state.rows[experts] * rates.cpu_row)
        compute = np.stack((np.full(len(experts), rates.fast), np.where(lacks, on_cpu, np.inf)))
        load = np.stack((lacks * rates.stream, np.zeros(len(experts))))
        where = np.asarray(solve(Work(compute, load, np.zeros(2), np.zeros(2))).where)
        streamed, cpu = experts[lacks & (where == 0)], experts[where == 1]
        return Plan(hit=hit, stream=tuple(sorted(streamed.tolist())), cpu=tuple(sorted(cpu.tolist())))
