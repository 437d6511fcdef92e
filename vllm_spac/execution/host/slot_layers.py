"""The decisions of a layer that runs over slots: which experts the CPU computes, and what each wave loads. No tensors.

``slots_execution`` runs it with a store and kernels, ``tools.traces.simulated_slots`` with a link and costs on a
virtual clock. How rows are split into waves, and how slots are filled at the start, is the same for all executions.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.named import UNBOUNDED, Named, Ration
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.balancers.base import Balancer, LayerState
from vllm_spac.decisions.guard.payback import Payback
from vllm_spac.decisions.predictors.base import START, Seen
from vllm_spac.recording.metrics import Counters

if TYPE_CHECKING:
    from torch import Tensor

_FAR = 3  # a wave rather takes two experts that the last one had than one that it had not


def row_waves(ids: np.ndarray, slots: int, experts: int) -> Iterator[slice | np.ndarray]:
    """Splits the rows of a forward into waves that need no more experts than there are slots each.

    If all rows together do, there is one wave. Else a wave begins with the row that needs the fewest experts which the
    last wave did not have, and takes the row that adds the fewest until none fits: the experts of all waves together
    are several times fewer than those of rows in their order, the more so the more rows there are. A greedy choice,
    since the best one is a hard problem.

    Args:
        ids: int [rows, top_k], experts of one layer, each in ``[0, experts)``.
        slots: number of slots, at least ``top_k``.
        experts: number of experts of the layer.

    Yields:
        The rows of each wave: a slice with all of them, or int64 [wave], ascending. Every row is in one wave.
    """
    rows = len(ids)
    if rows == 0:
        return
    if slots >= experts or len(np.unique(ids)) <= slots:
        yield slice(0, rows)
        return
    uses = np.zeros((experts, rows), dtype=bool)
    uses[ids.T.astype(np.int64), np.arange(rows)] = True
    left, last = np.arange(rows), np.zeros(experts, dtype=bool)
    while len(left):
        inside, last = _next_wave(uses[:, left], last, slots)
        assert inside.any(), "one row needs more experts than there are slots"
        yield left[inside]
        left = left[~inside]


def _next_wave(uses: np.ndarray, last: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses a wave of the rows that are left.

    Args:
        uses: bool [experts, rows].
        last: bool [experts], the experts of the last wave.
        slots: most experts of a wave.

    Returns:
        The rows of the wave, bool [rows], and its experts, bool [experts].
    """
    wave, room = np.zeros(len(uses), dtype=bool), slots
    added = uses.sum(axis=0)  # experts of each row that the wave does not have
    costs = added + (_FAR - 1) * uses[~last].sum(axis=0)
    never = _FAR * len(uses) + 1
    while True:
        ranks = np.where((added > 0) & (added <= room), costs, never)
        row = int(ranks.argmin())
        if ranks[row] == never:
            return added == 0, wave
        new = np.flatnonzero(uses[:, row] & ~wave)
        wave[new] = True
        room -= len(new)
        added -= uses[new].sum(axis=0)
        costs -= np.where(last[new], 1, _FAR) @ uses[new]


def filled_experts(layers: int, experts: int, slots: int, first: Sequence[int] = ()) -> list[list[int]]:
    """Returns the keys that are loaded before the first step: ``first``, then those of each layer.

    Layers have equal shares of the slots that ``first`` leaves, as far as they have other experts; the lowest experts
    are loaded first. With a slot for each expert, ``first`` has no meaning: slot and key are the same number.
    """
    if slots == layers * experts:
        first = ()
    assert len(first) <= slots
    others = [sorted({*range(layer * experts, (layer + 1) * experts)}.difference(first)) for layer in range(layers)]
    ranked = sorted((rank, layer) for layer, keys in enumerate(others) for rank in range(len(keys)))
    shares = Counter(layer for _, layer in ranked[: slots - len(first)])
    return [*([list(first)] if first else []), *(keys[: shares[layer]] for layer, keys in enumerate(others))]


logger = logging.getLogger("vllm.spac")

# Slots change slowly: without the CPU, what it computed before is loaded step by step.
BLOCK, SETTLE, MOST = 40, 8, 16


class CpuCheck:
    """Decides before each step whether the CPU may compute experts in it.

    Args:
        counters: receives the times that the CPU was stopped.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float]) -> None:
        self._counters, self._clock = counters, clock
        self._payback = Payback(BLOCK, SETTLE, MOST)
        self._rows, self._began = 0, 0.0

    @property
    def stopped(self) -> bool:
        """Whether the CPU computes no experts in the next step."""
        return self._payback.stopped

    def begin_step(self, rows: int) -> None:
        """A step of ``rows`` rows begins; 0: it is not compared, as one with prompts."""
        self._rows, self._began = rows, self._clock()

    def end_step(self) -> None:
        """All layers of the step have run."""
        if not self._rows:
            return
        verdict = self._payback.end_step(self._rows, self._clock() - self._began)
        if verdict is None:
            return
        self._counters.cpu_stops += verdict.stop
        if verdict.changes:
            does = "stops computing" if verdict.stop else "goes on to compute"
            logger.warning("spac: cpu_experts=auto %s experts on the CPU: %s", does, verdict)


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
        self.loader.prefetcher.balancer = self._balancer = balancer
        self._check = check

    def begin_step(self, seen: Seen | None, rows: int = 0, ration: Ration = UNBOUNDED) -> None:
        """A step begins.

        Args:
            seen: of its rows, or None if they predict little, as those of prompts.
            rows: its rows, if its duration may be compared with that of others.
            ration: what a budget leaves of the names of its rows.
        """
        if self._check is not None:
            self._check.begin_step(rows)
        if self.loader.needs is not None:
            self._seen = seen
            self.loader.prefetcher.begin_step(seen, ration)

    def end_step(self, counts: np.ndarray | None, prompt: np.ndarray | None = None) -> None:
        """As ``ExpertLoader.end_step``; also decides whether the CPU computes experts in the next step."""
        self.loader.end_step(counts, prompt)
        if self._check is not None:
            self._check.end_step()
            self.loader.prefetcher.balancer = None if self._check.stopped else self._balancer

    @property
    def looks(self) -> bool:
        """Whether ``look`` is to be called in the layers of the step."""
        return self._seen is not None

    def ask(self, layer: int, *there: Tensor | None) -> list[Named]:
        """As ``Prefetcher.ask``, of the start of the step (``START``) or of a layer whose router has chosen.

        Args:
            layer: number of the layer.
            there: hidden, ids and weights, as in ``look``, on the predictor's device; nothing at the start.
        """
        assert self._seen is not None, "a step in which nothing is guessed"
        seen = self._seen if layer == START else Seen(layer, *there)
        return self.loader.prefetcher.ask(seen)

    def look(
        self,
        layer: int,
        hidden: Tensor | None,
        ids: Tensor,
        weights: Tensor | None,
        names: Sequence[Named] = (),
    ) -> None:
        """A router has chosen for the rows of the step, none of them padding; before ``cold`` and ``waves``.

        Args:
            layer: number of the layer.
            hidden, ids, weights: as in ``Seen``; those that the predictor does not need may be None.
            names: as of ``Prefetcher.look``.
        """
        assert self._seen is not None, "a step in which nothing is guessed"
        self.loader.prefetcher.look(Seen(layer, hidden, ids, weights), names)

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
        prefetcher = self.loader.prefetcher
        balancer = prefetcher.balancer
        if balancer is None:
            return None
        residency, here = self.loader.residency, self._keys(layer)
        counted = routed[:real]
        rows = np.bincount(counted.ravel(), minlength=self.experts)
        prefetcher.withdraw(here.start, rows)
        resident = residency.slot_of[here] != NOWHERE if balancer.loads else residency.ready(here)
        free = residency.slots - int(resident[rows > 0].sum())
        likely = residency.policy.likely
        scores, likely = prefetcher.scores[here], likely[here] if len(likely) else likely
        plan = balancer.plan(LayerState(layer, rows, resident, scores, free, likely, prefetcher.reading))
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
            prefetcher.computed([here.start + expert for expert in plan.cpu])
            if not (plan.hit or plan.stream):  # nothing of the layer is held, by which the prefetcher would hear of it
                self.loader.skip(layer)
        return pairs

    def admit(self) -> None:
        """Starts to load what the CPU computed in the last layer, see ``Balancer.admits``; called when it has run."""
        if self._computed:
            self.loader.admit(self._computed)
            self._computed = []

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
        loader.enter(range(first, first + self.experts))
        if not loader.use(keys):
            pinned = keys.tolist()
            missed = len(loader.hold(pinned, counters))
        if counters is not None:
            counters.waves += 1
            counters.misses += missed
            counters.hits += len(keys) - missed
            loader.ran(layer, len(routed), keys)
        return slot_of[routed], pinned

    def release(self, keys: list[int]) -> None:
        """Unpins what ``together`` has pinned."""
        self.loader.release(keys)

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
                        self.loader.ran(layer, len(routed), chosen + here.start)
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
