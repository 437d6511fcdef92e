"""The loads of a layer that runs over slots: what each wave needs, and what predictors hear. No tensor is computed.

``slots_execution`` runs it with a store and kernels, ``tools.traces.simulated_slots`` with a link and costs on a
virtual clock.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.named import UNBOUNDED, BudgetHint, PredictedExperts
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.execution.host.cpu_division import CpuDivision
from vllm_spac.execution.waves import row_waves
from vllm_spac.recording.metrics import Counters

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
        self.cpu = CpuDivision(loader, experts)
        self._inputs: PredictorInputs | None = (
            None  # at the start of the step; None outside, and where nothing is guessed
        )

    def begin_step(self, inputs: PredictorInputs | None, rows: int = 0, hint: BudgetHint = UNBOUNDED) -> None:
        """A step begins.

        Args:
            inputs: of its rows, or None if they predict little, as those of prompts.
            rows: its rows, if its duration may be compared with that of others.
            hint: what a budget leaves of the names of its rows.
        """
        self.cpu.begin_step(rows)
        if self.loader.needs is not None:
            self._inputs = inputs
            self.loader.prefetcher.begin_step(inputs, hint)

    def end_step(self, counts: np.ndarray | None, prompt: np.ndarray | None = None) -> None:
        """As ``ExpertLoader.end_step``; also decides whether the CPU computes experts in the next step."""
        self.loader.end_step(counts, prompt)
        self.cpu.end_step()

    @property
    def observes_layers(self) -> bool:
        """Whether ``observe_layer`` is to be called in the layers of the step."""
        return self._inputs is not None

    def ask(self, layer: int, *routed: Tensor | None) -> list[PredictedExperts]:
        """As ``Prefetcher.ask``, of the start of the step (``START``) or of a layer whose router has chosen.

        Args:
            layer: number of the layer.
            routed: hidden, ids and weights, as in ``observe_layer``, on the predictor's device; nothing at the start.
        """
        assert self._inputs is not None, "a step in which nothing is guessed"
        inputs = self._inputs if layer == START else PredictorInputs(layer, *routed)
        return self.loader.prefetcher.ask(inputs)

    def observe_layer(
        self,
        layer: int,
        hidden: Tensor | None,
        ids: Tensor,
        weights: Tensor | None,
        names: Sequence[PredictedExperts] = (),
    ) -> None:
        """A router has chosen for the rows of the step, none of them padding; before anything is loaded.

        Args:
            layer: number of the layer.
            hidden, ids, weights: as in ``PredictorInputs``; those that the predictor does not need may be None.
            names: as of ``Prefetcher.observe_layer``.
        """
        assert self._inputs is not None, "a step in which nothing is guessed"
        self.loader.prefetcher.observe_layer(PredictorInputs(layer, hidden, ids, weights), names)

    def fill(self, layers: Sequence[list[int]]) -> Iterator[int]:
        """Loads the keys of each layer into free slots; yields how many were loaded."""
        for keys in layers:
            for start in range(0, len(keys), _FILL_BATCH):
                batch = keys[start : start + _FILL_BATCH]
                self.loader.hold(batch, None)
                self.loader.residency.release(batch)
                yield len(batch)

    def together(
        self, layer: int, routed: np.ndarray, counters: Counters | None
    ) -> tuple[np.ndarray, list[int]] | None:
        """Makes the experts of a layer resident together: as ``waves`` with a single wave, without what several take.

        The caller runs the layer before it asks for anything else.

        Args:
            layer, routed, counters: as in ``waves``.

        Returns:
            The slot of each pair, int32 [rows, top_k], and the keys to ``release`` when the layer has
            run: none if nothing was missing. None if there are no rows, or they need more slots than there are: nothing
            changes.

        Raises:
            StoreError: an expert could not be loaded.
        """
        loader, first = self.loader, layer * self.experts
        slot_of = loader.residency.slot_of[first : first + self.experts]
        used = _distinct(routed)
        if not 0 < len(used) <= loader.residency.slots:
            return None
        keys, missed = used + first, 0
        pinned: list[int] = []
        loader.begin_layer(range(first, first + self.experts))
        if not loader.use(keys):
            pinned = keys.tolist()
            missed = len(loader.hold(pinned, counters))
        if counters is not None:
            counters.waves += 1
            counters.misses += missed
            counters.hits += len(keys) - missed
            loader.observe_layer(layer, len(routed), keys)
        return slot_of[routed], pinned

    def release(self, keys: list[int]) -> None:
        """Unpins what ``together`` has pinned."""
        self.loader.residency.release(keys)

    def waves(self, layer: int, routed: np.ndarray, counters: Counters | None) -> Generator[HeldRows, None, None]:
        """Makes the experts of a layer resident, wave by wave; each is pinned until the next wave is requested.

        Args:
            layer: number of the layer.
            routed: int [rows, top_k], experts of the layer, each in ``[0, experts)``.
            counters: receives hits, misses, waves and what the loader counts, if given.

        Raises:
            StoreError: an expert could not be loaded.
        """
        first, residency = layer * self.experts, self.loader.residency
        self.loader.begin_layer(range(first, first + self.experts))
        used: set[int] = set()
        missed: set[int] = set()
        for rows in row_waves(routed, residency.slots, self.experts):
            chosen = _distinct(routed[rows])
            keys = (chosen + first).tolist()
            arrived = self.loader.hold(keys, counters)
            missed.update(arrived)
            used.update(keys)
            try:
                if counters is not None:
                    counters.waves += 1
                    if isinstance(rows, slice):  # else no slot is free of this layer's experts
                        self.loader.observe_layer(layer, len(routed), chosen + first)
                yield HeldRows(rows, arrived)
            finally:
                self.loader.residency.release(keys)
        if counters is not None:
            counters.misses += len(missed)
            counters.hits += len(used) - len(missed)


def _distinct(routed: np.ndarray) -> np.ndarray:
    """Returns the distinct experts of ``routed``, int of any shape, in ascending order."""
    return np.bincount(routed.ravel()).nonzero()[0]
