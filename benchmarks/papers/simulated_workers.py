"""OD-MoE's decoding on a virtual clock: hops over a network, computing, and loading. Calculated, not measured.

A step is one layer after another: the main process computes its part, rows go to the layer's group, it computes when
its experts are loaded, and the rows come back. Groups take turns (``od_moe.division``), so that one may load while
others compute. The main process's link carries all copies of a row that its group of several workers needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import TraceFacts


@dataclass(frozen=True)
class Network:
    """A network of equal links between an engine and its expert workers."""

    latency: float  # seconds one way, with the software of both sides
    bandwidth: float  # bytes per second of each machine's link, with what both sides do to each byte

    def hop(self, nbytes: float, fan: int = 1) -> float:
        """Seconds until ``nbytes`` to each of ``fan`` workers have arrived, or have come from each."""
        return self.latency + fan * nbytes / self.bandwidth


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer without the network."""

    main: float  # the main process's part (t_M)
    compute: float  # a group's experts for one row (t_X)
    load: float  # one expert into a worker's memory

    @classmethod
    def of(cls, costs: Costs, facts: TraceFacts, nbytes: int) -> LayerTimes:
        """Returns the times of a worker that is like the machine of ``costs``, with experts of ``nbytes``.

        A layer has an equal part of what a step takes outside its experts; a row's experts are computed one by one.
        """
        compute = facts.top_k * float(costs.fast.seconds(nbytes))
        return cls(costs.other / facts.layers, compute, float(costs.load.seconds(nbytes)))


def cacheless(
    layers: int,
    top_k: int,
    groups: int,
    network: Network,
    times: LayerTimes,
    row_bytes: int,
    recall: float = 1.0,
    tokens: int = 64,
    fan: int = 1,
) -> float:
    """Returns tokens per second of one request whose groups have only what was predicted for their next layer.

    Args:
        layers, top_k: of the model.
        groups: number of groups; the ``fan`` workers of one load ``top_k`` experts together, from its last answer on.
        recall: probability that an expert was predicted; a layer with one that was not waits for a whole load.
        tokens: of the request.
    """
    wrong = np.random.default_rng(0).random((tokens, layers, top_k)) >= recall
    hop, now, free = network.hop(row_bytes, fan), 0.0, [-math.inf] * groups  # when each group answered last
    for number, missed in enumerate(wrong.any(axis=2).ravel()):
        now += times.main
        now += max(0.0, free[number % groups] + times.load * math.ceil(top_k / fan) - now) + times.load * missed
        free[number % groups] = now = now + 2 * hop + times.compute
    return tokens / float(now)
