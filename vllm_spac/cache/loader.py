"""MoE-SpAc's asynchronous engine: makes experts resident, on demand and ahead of need. The forward thread's own.

Threads only fill slots and complete futures. The forward thread learns of it, and moves the state of ``Residency``,
in ``hold`` and ``end_step``: the state machine is single-threaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_spac.balancers.base import Balancer
from vllm_spac.cache.prefetcher import Prefetcher, PrefetchSettings
from vllm_spac.cache.residency import Placement, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.errors import StoreError
from vllm_spac.metrics import Counters


class ExpertLoader:
    """Brings experts into the slots of ``residency``.

    Args:
        residency: who is where; owned.
        transfers: moves bytes; owned.
        counters, layer_experts, settings, balancer: of ``Prefetcher``.
    """

    def __init__(
        self,
        residency: Residency,
        transfers: Transfers,
        counters: Counters,
        layer_experts: int,
        settings: PrefetchSettings,
        balancer: Balancer | None = None,
    ) -> None:
        self.residency = residency
        self._transfers = transfers
        self._counters = counters
        self._fetches = settings.prefetch != "off"
        predictor = settings.predictor_beside(residency.policy, len(residency.slot_of))
        self._prefetcher = Prefetcher(residency, transfers, counters, layer_experts, predictor, settings, balancer)

    def hold(self, keys: list[int], counters: Counters | None) -> list[int]:
        """Pin ``keys``, wait until all are READY, and return those that were not; ``release`` unpins.

        Args:
            keys: experts of one layer, distinct.
            counters: told of loads on demand and of waiting, if given.

        Raises:
            StoreError: an expert could not be read; nothing stays pinned.
        """
        self._prefetcher.reap()
        placement = self._prepare(keys, counters)
        missed = [key for key, _ in placement.loads + placement.waits]
        if missed:
            try:
                self._bring(placement, counters)
            except BaseException:
                self._give_up(missed)
                self.residency.release(keys)
                raise
        self._prefetcher.used(keys)
        return missed

    def release(self, keys: list[int]) -> None:
        """Unpin ``keys``."""
        self.residency.release(keys)

    @property
    def balancer(self) -> Balancer | None:
        """Says what is worth a read ahead, and gives some of the missing experts to the CPU."""
        return self._prefetcher.balancer

    @balancer.setter
    def balancer(self, balancer: Balancer) -> None:
        self._prefetcher.balancer = balancer

    @property
    def scores(self) -> np.ndarray:
        """int [keys], utility after the last step; zeros where neither prefetcher nor balancer reads it."""
        return self._prefetcher.scores

    def end_step(self, counts: np.ndarray | None) -> None:
        """A forward is over; it selected ``counts`` (see ``Policy.observe``), if that says anything."""
        if counts is not None:
            self.residency.policy.observe(counts)
            if self._fetches or (self.balancer is not None and self.balancer.needs_scores):
                self._prefetcher.observe(counts)
        if self._fetches:
            self._prefetcher.plan()

    def close(self) -> None:
        """Wait for the reads in flight, drop the others, stop the threads."""
        self._transfers.close()

    def _prepare(self, keys: list[int], counters: Counters | None) -> Placement:
        """A forward never fails for slots that are only promised to somebody."""
        while True:
            try:
                placement = self.residency.prepare(keys)
            except LookupError:
                others = [key for key in self._transfers.ahead.keys if key not in keys]
                if not others:
                    raise
                if not self._prefetcher.cancel(others):
                    self._prefetcher.wait(others[:1], counters)
                continue
            self._prefetcher.placed(placement)
            return placement

    def _bring(self, placement: Placement, counters: Counters | None) -> None:
        """Load what is missing; reads ahead that have not begun become reads on demand, others are waited for."""
        begun = dict(placement.waits)
        for key in self._transfers.ahead.cancel(list(begun)):
            del begun[key]
        loads = [*placement.loads, *((key, slot) for key, slot in placement.waits if key not in begun)]
        failed = self._load(loads, counters)
        if begun:
            again = self._prefetcher.wait(list(begun), counters)
            second = self.residency.prepare(again)  # in the slots that they have just left
            self._prefetcher.placed(second)
            failed |= self._load(second.loads, counters)
            self._counters.prefetch_late += len(begun) - len(again)
        if failed:
            raise StoreError("; ".join(str(error) for error in failed.values())) from next(iter(failed.values()))

    def _load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        failed = self._transfers.load(loads, counters)
        for key, _ in loads:
            (self.residency.failed if key in failed else self.residency.loaded)(key)
        return failed

    def _give_up(self, keys: list[int]) -> None:
        """No thread writes to the slots of ``keys`` but those that read ahead."""
        for key in keys:
            if self.residency.is_loading(key) and key not in self._transfers.ahead.keys:
                self.residency.failed(key)
