"""The decisions of a layer that runs over slots: which experts the CPU computes, and what each wave loads. No tensors.

``slots.SlotExecution`` runs it with a store and kernels, ``simulation.slots`` with a link and costs on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.execution._cpu_check import CpuCheck
from vllm_spac.execution._waves import row_waves
from vllm_spac.metrics import Counters
from vllm_spac.predictors.base import Seen

if TYPE_CHECKING:
    from torch import Tensor

_FILL_BATCH = 16


class HeldRows(NamedTuple):
    """Rows of a wave, see ``row_waves``, whose experts are all pinned; ``missed`` are the keys that had to arrive."""

    rows: slice | np.ndarray
    missed: list[int]


class SlotLayers:
    """All layers of one shape over the slots of a loader. Called by one thread.

    Args:
        loader: makes experts resident; owned.
        experts: experts per layer.
    """

    def __init__(self, loader: ExpertLoader, experts: int) -> None:
        self.loader, self.experts = loader, experts
        self._computed: list[int] = []  # keys that ran on the CPU and may get slots
        self._seen: Seen | None = None  # at the start of the step; None outside, and where nothing is guessed
        self._balancer: Balancer | None = None  # also in steps in which the CPU is stopped
        self._check: CpuCheck | None = None

    def balance(self, balancer: Balancer, check: CpuCheck | None) -> None:
        """The CPU computes what ``balancer`` selects, in the steps in which ``check`` does not stop it."""
        self.loader.balancer = self._balancer = balancer
        self._check = check

    def begin_step(self, seen: Seen | None, rows: int = 0) -> None:
        """A step begins.

        Args:
            seen: of its rows, or None if they predict little, as those of prompts.
            rows: its rows, if its duration may be compared with that of others.
        """
        if self._check is not None:
            self._check.begin_step(rows)
        if self.loader.needs is not None:
            self._seen = seen
            self.loader.begin_step(seen)

    def end_step(self, counts: np.ndarray | None) -> None:
        """As ``ExpertLoader.end_step``; also decides whether the CPU computes experts in the next step."""
        self.loader.end_step(counts)
        if self._check is not None:
            self._check.end_step()
            self.loader.balancer = None if self._check.stopped else self._balancer

    def draft(self, seen: Seen) -> None:
        """The drafter has read the tokens of some rows of the next step, which ``seen`` has with its states."""
        self.loader.draft(seen)

    @property
    def looks(self) -> bool:
        """Whether ``look`` is to be called in the layers of the step."""
        return self._seen is not None

    def look(self, layer: int, hidden: Tensor | None, ids: Tensor, weights: Tensor | None) -> None:
        """A router has chosen for the rows of the step, none of them padding; before ``cold`` and ``waves``.

        Args:
            layer: number of the layer.
            hidden, ids, weights: as in ``Seen``; those that the predictor does not need may be None.
        """
        assert self._seen is not None, "a step in which nothing is guessed"
        self.loader.look(Seen(layer, self._seen.tokens, hidden, ids, weights))

    def fill(self, layers: Sequence[list[int]]) -> Iterator[int]:
        """Loads the keys of each layer into free slots; yields how many were loaded."""
        for keys in layers:
            for start in range(0, len(keys), _FILL_BATCH):
                batch = keys[start : start + _FILL_BATCH]
                self.loader.hold(batch, None)
                self.loader.release(batch)
                yield len(batch)

    def cold(
        self, layer: int, routed: np.ndarray, counters: Counters | None, real: int | None = None
    ) -> np.ndarray | None:
        """Returns which (row, expert) pairs run on the CPU: bool [rows, top_k], or None if there are none.

        Args:
            layer: number of the layer.
            routed: int [rows, top_k], experts of the layer, each in ``[0, experts)``.
            counters: receives the experts and pairs, if given.
            real: leading rows that belong to requests, if not all do: padding repeats a row and weighs nothing.
        """
        balancer = self.loader.balancer
        if balancer is None:
            return None
        residency, here = self.loader.residency, self._keys(layer)
        counted = routed[:real]
        rows, resident = np.bincount(counted.ravel(), minlength=self.experts), residency.slot_of[here] != NOWHERE
        free = residency.slots - int(resident[rows > 0].sum())
        likely = residency.policy.likely
        scores, likely = self.loader.scores[here], likely[here] if len(likely) else likely
        plan = balancer.plan(LayerState(layer, rows, resident, scores, free, likely))
        if balancer.admits and not plan.stream:  # else the link has enough to do
            self._computed = [here.start + expert for expert in plan.cpu]
        if not plan.cpu:
            return None
        if residency.activity is not None:
            residency.activity.computed[here][list(plan.cpu)] = True
        on_cpu = np.zeros(self.experts, dtype=bool)
        on_cpu[list(plan.cpu)] = True
        pairs = on_cpu[routed]
        if counters is not None:
            counters.cpu_experts += len(plan.cpu)
            counters.cpu_rows += int(pairs[:real].sum())
            self.loader.computed([here.start + expert for expert in plan.cpu])
        return pairs

    def admit(self) -> None:
        """Starts to load what the CPU computed in the last layer, see ``Balancer.admits``; called when it has run."""
        if self._computed:
            self.loader.admit(self._computed)
            self._computed = []

    def resident(self, layer: int, routed: np.ndarray, counters: Counters | None) -> np.ndarray | None:
        """Returns the slot of each pair, int32 [rows, top_k], if all experts are READY; else None and nothing changes.

        As ``waves`` with a single wave, for the many layers that miss nothing. The caller runs the layer before it
        asks for anything else.

        Args:
            layer, routed, counters: as in ``waves``.
        """
        if not len(routed):
            return None
        here, residency = self._keys(layer), self.loader.residency
        used = _distinct(routed)
        keys = used + here.start
        self.loader.enter(range(here.start, here.stop))
        if not self.loader.use(keys):
            return None
        if counters is not None:
            counters.waves += 1
            counters.hits += len(keys)
            self.loader.ran(layer, len(routed), used)
        return residency.slot_of[here][routed]

    def waves(self, layer: int, routed: np.ndarray, counters: Counters | None) -> Generator[HeldRows, None, None]:
        """Makes the experts of a layer resident, wave by wave; each is pinned until the next wave is requested.

        Args:
            layer, routed: as in ``cold``.
            counters: receives hits, misses, waves and what the loader counts, if given.

        Raises:
            StoreError: an expert could not be loaded.
        """
        here, residency = self._keys(layer), self.loader.residency
        self.loader.enter(range(here.start, here.stop))
        used: set[int] = set()
        missed: set[int] = set()
        for rows in row_waves(routed, residency.slots, self.experts):
            chosen = _distinct(routed[rows])
            keys = (chosen + here.start).tolist()
            arrived = self.loader.hold(keys, counters)
            missed.update(arrived)
            used.update(keys)
            try:
                if counters is not None:
                    counters.waves += 1
                    if isinstance(rows, slice):  # else no slot is free of this layer's experts
                        self.loader.ran(layer, len(routed), chosen)
                yield HeldRows(rows, arrived)
            finally:
                self.loader.release(keys)
        if counters is not None:
            counters.misses += len(missed)
            counters.hits += len(used) - len(missed)

    def _keys(self, layer: int) -> slice:
        return slice(layer * self.experts, (layer + 1) * self.experts)


def _distinct(routed: np.ndarray) -> np.ndarray:
    """Returns the distinct experts of ``routed``, int of any shape, in ascending order."""
    return np.bincount(routed.ravel()).nonzero()[0]
