"""Layers at expert workers, on a virtual clock: hops over a network, computing, and loading. Calculated, not measured.

A step is one layer after another: the main process computes its part, rows go to the layer's worker, it loads what it
misses and computes, and the rows come back. Layers are divided among the workers in turn (``od_moe.division``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_spac.cache.residency import Placement, Residency
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.lru import LRU
from vllm_spac.execution.waves import filled_experts, row_waves
from vllm_spac.methods.od_moe import division
from vllm_spac.recording.trace_file import Trace, TraceFacts
from vllm_spac.tools.traces.replayed import rows_of_records


@dataclass(frozen=True)
class Network:
    """A network of equal links between an engine and its expert workers.

    Attributes:
        latency: seconds one way, with the software of both sides.
        bandwidth: bytes per second of each machine's link, with what both sides do to each byte.
    """

    latency: float
    bandwidth: float

    def hop(self, nbytes: float, fan: int = 1) -> float:
        """Seconds until ``nbytes`` to each of ``fan`` workers have arrived, or have come from each."""
        return self.latency + fan * nbytes / self.bandwidth


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer without the network.

    Attributes:
        main: the main process's part (t_M).
        compute: a group's experts for one row (t_X).
        load: one expert into a worker's memory.
    """

    main: float
    compute: float
    load: float

    @classmethod
    def of(cls, costs: Costs, facts: TraceFacts, nbytes: int) -> LayerTimes:
        """Returns the times of a worker that is like the machine of ``costs``, with experts of ``nbytes``.

        A layer has an equal part of what a step takes outside its experts; a row's experts are computed one by one.
        """
        compute = facts.top_k * float(costs.fast.seconds(nbytes))
        return cls(costs.other / facts.layers, compute, float(costs.load.seconds(nbytes)))


@dataclass(frozen=True)
class WorkerRun:
    """Result of a simulation.

    Attributes:
        hits, misses: experts that were in a worker's memory when they were needed, and others.
        stalls: seconds that rows waited for loads.
    """

    seconds: float
    steps: int
    hits: int
    misses: int
    stalls: float

    @property
    def per_second(self) -> float:
        """Steps per second: tokens per second of one request without drafts."""
        return self.steps / self.seconds


def cached(trace: Trace, workers: int, share: float, network: Network, times: LayerTimes, row_bytes: int) -> WorkerRun:
    """Replays ``trace`` with workers that keep a share of their layers' experts in memory, by LRU.

    Args:
        workers: each is a group, and loads one expert after another.
        share: of a worker's experts that have a slot, above 0.
    """
    facts = trace.facts
    memory = [filled(trace, division.layers_of(worker, facts.layers, workers), share) for worker in range(workers)]
    seconds = stalls = 0.0
    hits = misses = 0
    for layer, ids in zip(trace.record_layer.tolist(), rows_of_records(trace), strict=True):
        residency, loads = memory[layer % workers], 0
        for rows in row_waves(ids, residency.slots, facts.experts):
            keys = (np.unique(ids[rows]).astype(np.int64) + layer * facts.experts).tolist()
            placed = use(residency, keys)
            loads, hits = loads + len(placed.loads), hits + placed.hits
        misses += loads
        stall = loads * times.load
        stalls += stall
        seconds += times.main
        seconds += stall + 2 * network.hop(len(ids) * row_bytes) + len(ids) * times.compute
    return WorkerRun(seconds, trace.steps, hits, misses, stalls)


def filled(trace: Trace, layers: Sequence[int], share: float) -> Residency:
    """Returns a memory for ``share`` of the experts of ``layers``, filled with an equal part of each, as in serving."""
    facts = trace.facts
    total = len(layers) * facts.experts
    slots = min(total, max(facts.top_k, math.ceil(share * total)))
    residency = Residency(facts.total, slots, LRU())
    for keys in filled_experts(len(layers), facts.experts, slots):
        known = [layers[key // facts.experts] * facts.experts + key % facts.experts for key in keys]
        use(residency, known)
    return residency


def use(residency: Residency, keys: list[int]) -> Placement:
    """Uses ``keys``, which fit the slots together, and returns how they were placed; loads take no time."""
    placed = residency.prepare(keys)
    for key, _ in placed.loads:
        residency.loaded(key)
    residency.release(keys)
    return placed
