"""MoE-SpAc's score-guided prefetcher: which missing experts are read while nothing else is, and what became of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np

from vllm_spac.balancers.base import Balancer
from vllm_spac.cache.knobs import EngineKnobs
from vllm_spac.cache.level_queue import LevelQueue
from vllm_spac.cache.residency import NOWHERE, Placement, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.metrics import Counters

logger = logging.getLogger("vllm.spac")


class Prefetcher:
    """Fills slots in the background and keeps the books of it; the forward thread's own.

    Args:
        residency, transfers: the engine's.
        counters: told of everything, also between steps: it is the work of a step.
        layer_experts: experts of a layer; the keys of a layer are consecutive, layers run in the order of their keys.
        knobs: see there.

    Attributes:
        balancer: says the threshold of each layer instead of ``knobs.threshold``, if there is one.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        counters: Counters,
        layer_experts: int,
        knobs: EngineKnobs,
        balancer: Balancer | None = None,
    ) -> None:
        self.balancer = balancer
        self.queue = LevelQueue()
        self.unused: set[int] = set()  # read ahead, READY and not needed yet
        self._residency, self._ahead, self._path = residency, transfers.ahead, f"{transfers.path} ahead"
        self._poison = transfers.poison if knobs.poison else None
        self._counters, self._layer_experts, self._knobs = counters, layer_experts, knobs
        experts = len(residency.slot_of)
        self._estimator = knobs.estimator(experts) if residency.policy.scores is None else None
        self.scores = np.zeros(experts, dtype=np.int64)
        self._damaged: set[int] = set()  # not read ahead again before a forward has had them

    def observe(self, counts: np.ndarray) -> None:
        """The policy was told ``counts`` (see ``Policy.observe``): scores follow, its own where it has some."""
        policy = self._residency.policy
        self.scores = policy.scores if self._estimator is None else self._estimator.update(counts)

    def plan(self) -> None:
        """A step is over: forget what was not begun, and fetch by the newest scores, from layer 0 on."""
        self.reap()
        self.cancel(self._ahead.keys)
        self.queue.clear()
        wanted = np.flatnonzero((self.scores >= self._thresholds()) & (self._residency.slot_of == NOWHERE))
        for key, score in zip(wanted.tolist(), self.scores[wanted].tolist(), strict=True):
            if key not in self._damaged:
                self.queue.put(key, score)
        self.top_up(0)

    def top_up(self, passed: int) -> None:
        """Ask for the best that waits while there are slots for it; keys below ``passed`` come too late."""
        self.cancel([key for key in self._ahead.keys if key < passed])
        loads: list[tuple[int, int]] = []
        while self.queue and len(self._ahead.keys) + len(loads) < self._knobs.depth:
            key = self.queue.pop()
            if key < passed or self._residency.slot_of[key] != NOWHERE:
                continue
            placement = self._residency.admit(key, self.scores)
            if placement is None:  # what is left scores no more
                self.queue.clear()
                break
            self.placed(placement)
            loads.extend(placement.loads)
        if loads:
            self._ahead.fetch(loads)

    def reap(self) -> None:
        """Take note of the reads that are over."""
        if self._ahead.keys:
            self._arrive(self._ahead.reap())

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Free the slots of those of ``keys`` whose read has not begun; returns them."""
        gone = self._ahead.cancel(list(keys))
        for key in gone:
            self._residency.failed(key)
        return gone

    def wait(self, keys: list[int], counters: Counters | None) -> list[int]:
        """Wait for reads that have begun; returns those that failed, whose slots are free again."""
        start = time.perf_counter()
        failed = self._arrive(self._ahead.wait(keys)) if keys else []
        if keys and counters is not None:
            counters.stall_seconds += time.perf_counter() - start
        return failed

    def placed(self, placement: Placement) -> None:
        """Slots changed hands."""
        wasted = self.unused.intersection(placement.victims)
        self.unused -= wasted
        self._counters.prefetch_wasted += len(wasted)
        if self._poison:
            for _, slot in placement.loads:
                self._poison(slot)

    def used(self, keys: list[int]) -> None:
        """A forward has ``keys``, all READY."""
        if self.unused:
            used = self.unused.intersection(keys)
            self.unused -= used
            self._counters.prefetch_hits += len(used)
        self._damaged.difference_update(keys)
        if keys and (self.queue or self._ahead.keys):
            self.top_up((max(keys) // self._layer_experts + 1) * self._layer_experts)

    def _thresholds(self) -> int | np.ndarray:
        if self.balancer is None:
            return self._knobs.threshold
        layers = len(self.scores) // self._layer_experts
        return np.repeat([max(1, self.balancer.threshold(layer)) for layer in range(layers)], self._layer_experts)

    def _arrive(self, results: dict[int, int | BaseException]) -> list[int]:
        failed = [key for key, result in results.items() if isinstance(result, BaseException)]
        for key, result in results.items():
            if isinstance(result, BaseException):
                self._residency.failed(key)
                logger.warning("spac: expert %d was not read ahead; it is read again when needed: %s", key, result)
            else:
                self._residency.loaded(key)
                self._counters.moved(self._path, result)
                self.unused.add(key)
        self._damaged.update(failed)
        self._counters.prefetch_failed += len(failed)
        self._counters.prefetches += len(results) - len(failed)
        return failed
