"""OD-MoE's decoding and prefill on a virtual clock: hops over a network, computing, and loading. Calculated.

A step is one layer after another: the main process computes its part, rows go to the layer's group, it computes when
its experts are loaded, and the rows come back. Groups take turns (``od_moe.division``), so that one may load while
others compute. The main process's link carries all copies of a row that its group of several workers needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.simulated_workers import LayerTimes, Network, WorkerRun


@dataclass(frozen=True, slots=True)
class Cycle:
    """Times of one layer at a group of workers, in seconds.

    Attributes:
        main: the main process's part of a layer (t_M).
        worker: from sending the rows to having the answer (t_W).
        load: loading the experts of a layer (t_load).
    """

    main: float
    worker: float
    load: float

    def slack(self, groups: int) -> float:
        """Time between a group's answer and its next layer, n t_M + (n - 1) t_W: a load in it stalls nobody.

        OD-MoE's condition, with n the number of groups.
        """
        return groups * self.main + (groups - 1) * self.worker

    def stall(self, groups: int) -> float:
        """Time by which a load exceeds ``slack``; 0 if ``load <= slack``."""
        return max(0.0, self.load - self.slack(groups))

    def layer(self, groups: int) -> float:
        """Time per layer in the steady state: a group is busy for ``load + worker`` once in ``groups`` layers."""
        return max(self.main + self.worker, (self.load + self.worker) / groups)


class Clock:
    """The virtual clock of the main process, and when each group answered last.

    Args:
        groups: number of groups.
        network, times: of a layer.
        row_bytes: bytes of a row.
        fan: workers of a group, each of which needs the rows.
    """

    def __init__(self, groups: int, network: Network, times: LayerTimes, row_bytes: int, fan: int = 1) -> None:
        self.now, self.stalls = 0.0, 0.0
        self._times, self._free = times, [-math.inf] * groups
        self._groups, self._network, self._row_bytes, self._fan = groups, network, row_bytes, fan

    def layer(self, layer: int, rows: int, missing: float = 0.0, ahead: float = 0.0, known: float = -math.inf) -> bool:
        """Passes the time of a layer, and returns whether its loads began before the router had chosen.

        Args:
            layer: its number.
            rows: number of rows.
            missing: seconds of loads that begin when the rows arrive, if loads began before.
            ahead: seconds of loads that begin when the group has answered its layer before this one and the layer's
                experts are predicted, or when its router has chosen.
            known: when they are predicted; by default before everything.
        """
        group, times = layer % self._groups, self._times
        self.now += times.main
        begin = max(self._free[group], min(known, self.now))
        guessed = known < self.now
        stall = max(0.0, begin + ahead - self.now) + missing * guessed
        hop = self._network.hop(rows * self._row_bytes, self._fan)
        self.now += stall + 2 * hop + rows * times.compute
        self.stalls += stall
        self._free[group] = self.now
        return guessed


@dataclass(frozen=True)
class ShadowTimes:
    """When a shadow has predicted a layer (OD-MoE, section 3.2), in seconds.

    Attributes:
        layer: of one of its layers.
        departs: of each token in turn, how long after the model the shadow begins it: what an alignment takes.
    """

    layer: float
    departs: Sequence[float] = (0.0,)

    @classmethod
    def aligned(cls, layer: float, network: Network, kv_bytes: int, tokens: int | None, kv: int | None) -> ShadowTimes:
        """Returns the times of a shadow that takes over tokens and keys and values every so many tokens; None: never.

        Args:
            layer: as above.
            network: from the model to the shadow.
            kv_bytes: keys and values of one token, of all layers; those of ``kv`` tokens travel at once.
            tokens, kv: the two periods.
        """
        periods = [period for period in (tokens, kv) if period is not None]
        return cls(
            layer,
            [
                network.hop(kv * kv_bytes)
                if kv is not None and token % kv == 0
                else network.latency * any(token % period == 0 for period in periods)
                for token in range(math.lcm(*periods))
            ],
        )

    def known(self, token: int, start: float, layer: int) -> float:
        """Returns when ``layer`` of ``token``, which the model begins at ``start``, is predicted."""
        return start + self.departs[token % len(self.departs)] + (layer + 1) * self.layer


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
    seed: int = 0,
    shadow: ShadowTimes | None = None,
) -> WorkerRun:
    """Simulates OD-MoE's decoding: a group has nothing but the experts that were predicted for its next layer.

    Args:
        layers, top_k: of the model.
        groups: number of groups; the ``fan`` workers of one load ``top_k`` experts together, at once.
        recall: probability that an expert was predicted; a layer with one that was not waits for a whole load.
        tokens: tokens of one request.
        seed: of the predictions that fail.
        shadow: when a layer is predicted; by default a group's next layer is when it answers, and the first ones are
            loaded when the first token begins.
    """
    clock, rng = Clock(groups, network, times, row_bytes, fan), np.random.default_rng(seed)
    each = times.load * math.ceil(top_k / fan)
    wrong = rng.random((tokens, layers, top_k)) >= recall
    misses = 0
    for token in range(tokens):
        start = clock.now
        for layer in range(layers):
            missing = times.load if wrong[token, layer].any() else 0.0
            known = -math.inf if shadow is None else shadow.known(token, start, layer)
            guessed = clock.layer(layer + token * layers, 1, missing, each, known)
            misses += int(wrong[token, layer].sum()) if guessed else top_k
    return WorkerRun(clock.now, tokens, tokens * layers * top_k - misses, misses, clock.stalls)


def prefill(
    layers: int,
    experts: int,
    rows: int,
    top_k: int,
    workers: int,
    network: Network,
    times: LayerTimes,
    row_bytes: int,
    parts: int = 1,
    groups: int = 1,
) -> float:
    """Returns the seconds of a prompt that needs all experts of each layer (OD-MoE, section 3.3).

    A worker loads its part of a layer when it has answered its layer before, and computes rows in parts, one while
    the next one travels. The main process's link carries each row ``top_k`` times, and as many results back.

    Args:
        layers, experts, top_k: of the model.
        rows: of the prompt.
        workers: number of workers.
        network, row_bytes: as of ``Clock``.
        times: ``main`` of the prompt; ``compute`` and ``load`` of one expert, for one part's rows.
        parts: mini-batches that the rows are divided into.
        groups: 1: every worker takes a part of every layer. More: a layer belongs to one group, as in decoding.
    """
    mine = math.ceil(experts * groups / workers)
    travel = rows * top_k * row_bytes / network.bandwidth / parts
    now, free = 0.0, [0.0] * groups
    for layer in range(layers):
        group = layer % groups
        sent = now = now + times.main
        done = free[group] + mine * times.load
        for _ in range(parts):
            sent += travel
            done = max(done, sent + network.latency) + mine * times.compute
            now = max(now, done + network.latency) + travel
        free[group] = done
    return now
