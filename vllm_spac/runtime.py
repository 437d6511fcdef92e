"""The order of things in a MoE layer: pin, load, run, unpin. The one file that knows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, Step
from vllm_spac.errors import StoreError
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.residency import Residency
from vllm_spac.tiers.base import ExpertStore
from vllm_spac.transfers import Transfers

_FILL_BATCH = 16
_WAVE_ROWS = 1024  # rows looked ahead when a forward is split; bounds the splitting to linear time


@dataclass(frozen=True)
class Wave:
    """Rows ``[start, stop)`` of a forward, whose experts are all resident.

    ``slot_ids`` has the shape and dtype of the routed ids, with slots in place of experts.
    """

    start: int
    stop: int
    slot_ids: Tensor


class ExpertPool:
    """Slots shared by all layers of one shape, and the only door to their weights.

    Args:
        shape: the layers, experts and tensors.
        slots: number of slots, from ``shape.top_k`` to ``shape.total``.
        policy: eviction policy; owned.
        store: holds every expert; owned.
        tensors: name -> slots of shape [slots, ...].
        io_threads: reads in flight at once.
        path: name of the store in the counters.
    """

    def __init__(
        self,
        shape: MoEShape,
        slots: int,
        policy: Policy,
        store: ExpertStore,
        tensors: Mapping[str, Tensor],
        *,
        io_threads: int,
        path: str,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        self.shape = shape
        self.counters = Counters()
        self.residency = Residency(shape.total, slots, policy)
        self.tensors = tensors
        self.store = store
        self._counting = False
        self._transfers = Transfers(store, tensors, io_threads, path)

    @property
    def holds_all(self) -> bool:
        """Whether every expert has its slot, so that nothing is ever decided or moved."""
        return self.residency.slots == self.shape.total

    def begin_step(self, step: Step) -> None:
        """A forward of the target model starts for real requests."""
        self._counting = True
        self.counters.steps[step.kind] = self.counters.steps.get(step.kind, 0) + 1

    def end_step(self) -> None:
        """The forward is over; what comes until the next step (profiling, warm-up) is not counted."""
        self._counting = False

    def waves(self, layer: int, ids: Tensor) -> Iterator[Wave]:
        """Make the routed experts of a layer resident, part by part.

        While the caller holds a wave its experts are pinned; asking for the next one unpins them. One wave
        does unless the rows need more experts than there are slots; every row is in exactly one wave.

        Args:
            layer: number of the layer in ``shape.layers``.
            ids: experts of shape [rows, top_k] on the CPU, each in ``[0, shape.experts)``.

        Raises:
            StoreError: an expert could not be loaded; nothing was computed with it.
        """
        routed = ids.numpy()
        for start, stop in self._parts(routed):
            rows = routed[start:stop]
            keys = (np.unique(rows) + layer * self.shape.experts).tolist()
            self._make_resident(keys)
            try:
                table = self.residency.slot_of[layer * self.shape.experts : (layer + 1) * self.shape.experts]
                self.counters.waves += self._counting
                yield Wave(start, stop, torch.from_numpy(table[rows].astype(routed.dtype, copy=False)))
            finally:
                self.residency.release(keys)

    def count_resident(self, ids: Tensor) -> None:
        """Count a forward of a layer whose experts all have their own slot."""
        if self._counting:
            self.counters.hits += len(np.unique(ids.numpy()))
            self.counters.waves += 1

    def fill(self) -> Iterator[int]:
        """Load experts into the free slots, an equal share of each layer; yields how many were loaded.

        With a slot for each expert, slot and key are the same number.
        """
        layers, slots = len(self.shape.layers), self.residency.slots
        for layer in range(layers):
            share = slots // layers + (layer < slots % layers)
            keys = [self.shape.key(layer, expert) for expert in range(share)]
            for start in range(0, share, _FILL_BATCH):
                batch = keys[start : start + _FILL_BATCH]
                self._make_resident(batch)
                self.residency.release(batch)
                yield len(batch)
        assert not self.holds_all or (self.residency.slot_of == np.arange(slots)).all()

    def close(self) -> None:
        """Stop the threads and give back the store."""
        self._transfers.close()
        self.store.close()

    def _make_resident(self, keys: list[int]) -> None:
        placement = self.residency.prepare(keys)
        if self._counting:
            self.counters.hits += placement.hits
            self.counters.misses += len(placement.loads)
        if not placement.loads:
            return
        failed = self._transfers.load(placement.loads, self.counters if self._counting else None)
        for key, _ in placement.loads:
            (self.residency.failed if key in failed else self.residency.loaded)(key)
        if failed:
            self.residency.release(keys)
            raise StoreError("; ".join(str(error) for error in failed.values())) from next(iter(failed.values()))

    def _parts(self, routed: np.ndarray) -> Iterator[tuple[int, int]]:
        """Split the rows so that no part needs more experts than there are slots."""
        rows, slots = len(routed), self.residency.slots
        if rows == 0:
            return
        if slots >= self.shape.experts or len(np.unique(routed)) <= slots:
            yield 0, rows
            return
        uses = np.zeros((rows, self.shape.experts), dtype=bool)
        np.put_along_axis(uses, routed.astype(np.int64), True, axis=1)
        start = 0
        while start < rows:
            needed = np.logical_or.accumulate(uses[start : start + _WAVE_ROWS], axis=0).sum(axis=1)
            stop = start + int(np.searchsorted(needed, slots, side="right"))
            assert stop > start, "one row needs more experts than there are slots"
            yield start, stop
            start = stop
