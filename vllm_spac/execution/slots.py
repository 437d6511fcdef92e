"""The order of things in a MoE layer: divide, pin, load, run, unpin. The one file that knows it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.cache.loader import Engine
from vllm_spac.cache.prefetcher import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import NOT_RUN, MoEShape, Step
from vllm_spac.execution.row_shares import Share
from vllm_spac.execution.waves import filled_experts, row_waves
from vllm_spac.executors._thread import Computation, CpuGroup
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.tiers.base import ExpertStore

_FILL_BATCH = 16
_COUNT_BATCH = 1024  # forwards of layers whose routing is kept until it is counted
_COUNT_PAIRS = 4 << 20  # (row, expert) pairs of them: 16 MiB of ids, which may lie in a GPU's memory


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
        engine: what is read ahead of need.
        balancer: says what is worth that, layer by layer; None leaves it to ``engine``.
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
        engine: PrefetchSettings | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        self.shape = shape
        self.counters = Counters()
        self.residency = Residency(shape.total, slots, policy)
        self.tensors = tensors
        self.store = store
        self.holds_all = slots == shape.total  # each expert has its slot: nothing is ever decided or moved
        self._step: Step | None = None
        self._cpu: CpuGroup | None = None
        self._routed: list[tuple[int, Tensor]] = []
        self._pairs = 0  # (row, expert) pairs in ``_routed``
        knobs = engine or PrefetchSettings()
        transfers = Transfers(store, tensors, io_threads, path, knobs.background)
        self._engine = Engine(self.residency, transfers, self.counters, shape.experts, knobs, balancer)

    def begin_step(self, step: Step) -> None:
        """A forward of the target model starts for real requests."""
        self._step = step
        if not self.holds_all:
            self._forget_routed()  # of a forward that failed
        self.counters.steps[step.kind] = self.counters.steps.get(step.kind, 0) + 1

    def end_step(self) -> None:
        """The forward is over; what comes until the next step (profiling, warm-up) is not counted."""
        step, self._step = self._step, None
        if self.holds_all:
            if len(self._routed) >= _COUNT_BATCH or self._pairs >= _COUNT_PAIRS:
                self._count_hits()
        elif step is not None and self._routed:
            self._engine.end_step(self._selected(step.generating))
            self._forget_routed()

    def observe(self, layer: int, ids: Tensor) -> None:
        """Remember what a layer's rows were routed to (ids [rows, top_k]) until the step ends."""
        if self._step is not None:
            self._routed.append((layer, ids))
            self._pairs += ids.numel()

    def snapshot(self) -> dict:
        """The counters as plain data, up to the last step."""
        if self.holds_all:
            self._count_hits()
        return self.counters.snapshot()

    @property
    def keeps_bits(self) -> bool:
        """Whether vLLM's own kernel computes every expert; results are exact up to rounding if the CPU shares them."""
        return self._cpu is None

    def balance(self, balancer: Balancer, cpu: CpuGroup) -> None:
        """From now on ``balancer`` gives some of the missing experts to ``cpu``, which this pool owns then.

        The store must be one whose experts lie in memory.
        """
        self._engine.balancer, self._cpu = balancer, cpu

    def cold(self, layer: int, ids: Tensor) -> Tensor | None:
        """Which (row, expert) pairs run on the CPU: bool [rows, top_k], or None when none does; ``ids`` as ``waves``.

        Their experts are not loaded. The policy hears of them when the step ends, as of all others.
        """
        if self._cpu is None:
            return None
        routed, experts = ids.numpy(), self.shape.experts
        here = slice(layer * experts, (layer + 1) * experts)
        rows, resident = np.bincount(routed.ravel(), minlength=experts), self.residency.slot_of[here] != NOWHERE
        free = self.residency.slots - int(resident[rows > 0].sum())
        plan = self._engine.balancer.plan(LayerState(layer, rows, resident, self._engine.scores[here], free))
        if not plan.cpu:
            return None
        on_cpu = np.zeros(experts, dtype=bool)
        on_cpu[list(plan.cpu)] = True
        pairs = on_cpu[routed]
        if self._step is not None:
            self.counters.cpu_experts += len(plan.cpu)
            self.counters.cpu_rows += int(pairs.sum())
        return torch.from_numpy(pairs)

    @contextlib.contextmanager
    def computing(self, layer: int, share: Share, x: Tensor, weights: Tensor) -> Iterator[Computation]:
        """While inside, the CPU computes ``share`` of a layer's rows ``x`` [rows, hidden], ``weights`` [rows, top_k].

        Raises:
            SpacError: the pool is closed.
        """
        experts = self.store.layer(layer)
        with self._cpu.computing(*share.pick(x, weights), share.ids, experts) as computation:
            yield computation
        if self._step is not None:
            self.counters.cpu_wait_seconds += computation.waited

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
        first = layer * self.shape.experts
        table = self.residency.slot_of[first : first + self.shape.experts]
        self.residency.policy.enter(range(first, first + self.shape.experts))
        used: set[int] = set()
        missed: set[int] = set()
        for start, stop in row_waves(routed, self.residency.slots, self.shape.experts):
            rows = routed[start:stop]
            keys = (np.unique(rows) + first).tolist()
            missed.update(self._engine.hold(keys, self.counters if self._step is not None else None))
            used.update(keys)
            try:
                self.counters.waves += self._step is not None
                yield Wave(start, stop, torch.from_numpy(table[rows].astype(routed.dtype, copy=False)))
            finally:
                self._engine.release(keys)
        if self._step is not None:
            self.counters.misses += len(missed)
            self.counters.hits += len(used) - len(missed)

    def fill(self) -> Iterator[int]:
        """Load experts into the free slots, an equal share of each layer; yields how many were loaded.

        With a slot for each expert, slot and key are the same number.
        """
        slots = self.residency.slots
        for keys in filled_experts(len(self.shape.layers), self.shape.experts, slots):
            for start in range(0, len(keys), _FILL_BATCH):
                batch = keys[start : start + _FILL_BATCH]
                self._engine.hold(batch, None)
                self._engine.release(batch)
                yield len(batch)
        assert not self.holds_all or (self.residency.slot_of == np.arange(slots)).all()

    def close(self) -> None:
        """Stop the threads and give back the store."""
        self._engine.close()
        if self._cpu is not None:
            self._cpu.close()
        self.store.close()

    def _keys_of(self, routed: Sequence[tuple[int, Tensor]]) -> np.ndarray:
        """The keys that the rows of ``routed`` selected, in order, with repetitions."""
        experts = torch.cat([ids.flatten() for _, ids in routed]).cpu().numpy()
        first = np.array([layer * self.shape.experts for layer, _ in routed])
        return experts + np.repeat(first, [ids.numel() for _, ids in routed])

    def _selected(self, rows: Sequence[slice]) -> np.ndarray | None:
        """How many of ``rows`` selected each expert. Prompts are left out: they say little about the next token."""
        routed = [(layer, ids[part]) for layer, ids in self._routed for part in rows]
        if not routed:
            return None
        counts = np.full((len(self.shape.layers), self.shape.experts), NOT_RUN)
        counts[[layer for layer, _ in routed]] = 0
        counts = counts.reshape(-1)
        np.add.at(counts, self._keys_of(routed), 1)
        return counts

    def _forget_routed(self) -> None:
        self._routed.clear()
        self._pairs = 0

    def _count_hits(self) -> None:
        """Where every expert has its slot nothing is decided, so hits are counted for many steps at once."""
        if not self._routed:
            return
        forwards = [(index, ids) for index, (_, ids) in enumerate(self._routed)]
        self._forget_routed()
        self.counters.hits += len(np.unique(self._keys_of(forwards)))
        self.counters.waves += len(forwards)
