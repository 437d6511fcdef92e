"""A layer's experts divided between engine, CPU and expert workers, on a virtual clock. Calculated.

An engine divides them among workers only (``distributed.expert_divider``); its own slots and CPU are simulated here.

The engine has slots of its own. An expert that has one is computed there; each other one is loaded into a slot,
computed on the CPU, or computed at one of the workers that have the layer, whichever lets the layer finish first
(``balancers.makespan``). A row's results then come from several processors and are added: exact up to rounding only.

Assumptions: workers are like the engine's machine. Each worker that is used is sent all rows of the layer, and the
link of the engine carries the rows for all of them, to and fro. A load of the engine and the CPU's computing share
nothing. Experts of which a processor's slots cannot hold all are loaded in turns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.decisions.balancers._processors import Division, Work
from vllm_spac.decisions.balancers.makespan import solve
from vllm_spac.decisions.costs import Costs, Network
from vllm_spac.methods.od_moe import division
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import rows_of_records
from vllm_spac.tools.traces.simulated_workers import filled, use

PROCESSORS = ("engine", "cpu", "workers")


@dataclass(frozen=True)
class DividedRun:
    """Result of a simulation.

    Attributes:
        seconds: of all steps.
        steps: number of steps.
        hits: experts in a slot of the engine when they were needed.
        loads: experts loaded into one.
        cpu: experts that the CPU computed.
        sent: experts that workers computed.
        waited: those of ``sent`` that the worker had to load.
        layers: forwards of layers.
        exact: those whose division is known to be the fastest.
    """

    seconds: float
    steps: int
    hits: int
    loads: int
    cpu: int
    sent: int
    waited: int
    layers: int
    exact: int

    @property
    def experts(self) -> int:
        """Number of experts that were computed."""
        return self.hits + self.loads + self.cpu + self.sent


@dataclass(frozen=True)
class Setup:
    """What experts are divided among.

    Attributes:
        among: some of ``PROCESSORS``, ``workers`` one of them.
        workers: their number.
        size: workers that have a layer and divide its experts, as in ``schedule.owners``; divides ``workers``.
        share: of a worker's experts that have a slot, above 0.
        engine_share: of all experts, those that have a slot in the engine.
        network: between the engine and each worker.
        row_bytes: bytes of a row.
        expert_bytes: bytes of an expert.
    """

    among: Collection[str]
    workers: int
    size: int
    share: float
    engine_share: float
    network: Network
    row_bytes: int
    expert_bytes: int


def divided(trace: Trace, costs: Costs, setup: Setup) -> DividedRun:
    """Replays ``trace`` with the experts of each layer divided; all memories evict by LRU."""
    facts, experts = trace.facts, trace.facts.experts
    engine = filled(trace, range(facts.layers), setup.engine_share) if "engine" in setup.among else None
    memories = [
        filled(trace, division.layers_of(worker, facts.layers, setup.workers, 0, setup.size), setup.share)
        for worker in range(setup.workers)
    ]
    seconds = trace.steps * costs.other
    hits = loads = cpu = sent = waited = exact = 0
    for layer, ids in zip(trace.record_layer.tolist(), rows_of_records(trace), strict=True):
        active, rows = np.unique(ids, return_counts=True)
        keys = active.astype(np.int64) + layer * experts
        owners = division.owners(layer, setup.workers, 0, setup.size)
        caches = [engine, None, *(memories[worker] for worker in owners)]
        work = costs_of_layer(costs, setup, keys, rows, len(ids), caches)
        found = solve(work)
        seconds, exact = seconds + found.seconds, exact + found.exact
        for place, (number, loaded) in enumerate(_used(keys, found, work, caches)):
            if place == 0:
                hits, loads = hits + number - loaded, loads + loaded
            elif place == 1:
                cpu += number
            else:
                sent, waited = sent + number, waited + loaded
    return DividedRun(seconds, trace.steps, hits, loads, cpu, sent, waited, trace.records, exact)


def costs_of_layer(
    costs: Costs, setup: Setup, keys: np.ndarray, rows: np.ndarray, count: int, caches: list[Residency | None]
) -> Work:
    """Returns what a layer costs the engine, the CPU and each worker that has it.

    Args:
        keys, rows: [experts], the experts that are needed and their rows.
        count: rows of the layer.
        caches: of the engine (None: it computes none), of the CPU (None), and of each worker.
    """
    nbytes, size = setup.expert_bytes, (len(caches), len(keys))
    compute, load = np.full(size, np.inf), np.zeros(size)
    for place, cache in enumerate(caches):
        if cache is not None:
            compute[place] = costs.fast.seconds(nbytes, rows)
            load[place] = np.where(cache.slot_of[keys] == NOWHERE, costs.load.seconds(nbytes), 0.0)
    if "cpu" in setup.among:
        compute[1] = costs.cpu.seconds(nbytes, rows)
    if caches[0] is not None:
        compute[1:, caches[0].slot_of[keys] != NOWHERE] = np.inf  # hits run where they are
    sends = np.arange(len(caches)) > 1
    wire = 2 * count * setup.row_bytes / setup.network.bandwidth
    return Work(compute, load, np.where(sends, 2 * setup.network.latency, 0.0), np.where(sends, wire, 0.0))


def _used(
    keys: np.ndarray, division: Division, work: Work, caches: list[Residency | None]
) -> Iterator[tuple[int, int]]:
    """Uses each processor's experts in its slots; yields (number of experts, loads) of each."""
    where = np.asarray(division.where)
    for place, cache in enumerate(caches):
        mine = np.flatnonzero(where == place)
        loads = 0
        if cache is not None:
            if len(mine) > cache.slots:  # those that are there first, before others take their slots
                mine = mine[np.argsort(work.load[place, mine] > 0, kind="stable")]
            ordered = keys[mine].tolist()
            for start in range(0, len(ordered), cache.slots):
                loads += len(use(cache, ordered[start : start + cache.slots]).loads)
        yield len(mine), loads
