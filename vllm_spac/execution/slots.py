"""Loads the experts that a layer misses, then runs vLLM's kernel: divide, pin, load, run, unpin. The one file that
knows this order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.balancers.base import Balancer, LayerState
from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.prefetcher import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import NOT_RUN, MoEShape, Step
from vllm_spac.execution._row_shares import Share, combine
from vllm_spac.execution._waves import filled_experts, row_waves
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Rows
from vllm_spac.executors._thread import Computation, ExecutorThread
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy
from vllm_spac.tiers.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.execution._exchange import Exchange

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


class SlotExecution(Execution):
    """Slots shared by all layers of one shape, and the only door to their weights.

    Args:
        shape: the layers, experts and tensors.
        slots: number of slots, from ``shape.top_k`` to ``shape.total``.
        policy: eviction policy; owned.
        store: holds every expert; owned.
        tensors: name -> slots of shape [slots, ...].
        io_threads: reads in flight at once.
        path: name of the store in the counters.
        ahead: what is read ahead of need.
        balancer: says what is worth that, layer by layer; None leaves it to ``ahead``.
        exchange: brings routing to the host and slots to the device; needed by kernels that do not take slots.
    """

    needs_host: ClassVar[bool] = True
    knobs: ClassVar[frozenset[str]] = frozenset({"cpu_experts", "prefetch"})

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
        ahead: PrefetchSettings | None = None,
        balancer: Balancer | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        self.shape = shape
        self.counters = Counters()
        self._residency = Residency(shape.total, slots, policy)
        self.tensors = tensors
        self.store = store
        self.holds_all = slots == shape.total  # each expert has its slot: nothing is ever decided or moved
        self._step: Step | None = None
        self._cpu: ExecutorThread | None = None
        self._exchange = exchange
        self._routed: list[tuple[int, Tensor]] = []
        self._pairs = 0  # (row, expert) pairs in ``_routed``
        knobs = ahead or PrefetchSettings()
        transfers = Transfers(store, tensors, io_threads, path, knobs.background)
        self._loader = ExpertLoader(self._residency, transfers, self.counters, shape.experts, knobs, balancer)

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        config = context.config
        return cls(
            context.shape,
            context.room.slots,
            context.policy,
            context.store,
            context.tensors,
            io_threads=config.io_threads,
            path=context.path,
            ahead=PrefetchSettings(prefetch=config.prefetch),
            exchange=context.exchange,
        )

    @property
    def residency(self) -> Residency:
        return self._residency

    def begin_step(self, step: Step) -> None:
        self._step = step
        if not self.holds_all:
            self._forget_routed()  # of a forward that failed
        self.counters.steps[step.kind] = self.counters.steps.get(step.kind, 0) + 1

    def end_forward(self) -> None:
        step, self._step = self._step, None
        if self.holds_all:
            if len(self._routed) >= _COUNT_BATCH or self._pairs >= _COUNT_PAIRS:
                self._count_hits()
        elif step is not None and self._routed:
            self._loader.end_step(self._selected(step.generating))
            self._forget_routed()

    def observe(self, layer: int, ids: Tensor) -> None:
        """Remember what a layer's rows were routed to (ids [rows, top_k]) until the step ends."""
        if self._step is not None:
            self._routed.append((layer, ids))
            self._pairs += ids.numel()

    def snapshot(self) -> dict:
        if self.holds_all:
            self._count_hits()
        return self.counters.snapshot()

    def balance(self, balancer: Balancer, thread: ExecutorThread) -> None:
        """As in ``Execution``; the store must be addressable. From now on results are exact up to rounding."""
        self._loader.balancer, self._cpu = balancer, thread
        self.keeps_bits = False

    # -- a layer -------------------------------------------------------------------------------------------

    def waits_for_host(self, kernel: LayerKernel) -> bool:
        return kernel.takes_slots or not self.holds_all

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        if not self.waits_for_host(kernel):  # vLLM's own routing and kernel
            self._tell(layer, ids[: rows.real], weights[: rows.real], rows)
            return kernel(x, weights, ids)
        routed, there = ids, None
        if not kernel.takes_slots:
            assert self._exchange is not None
            routed = self._exchange.to_host(ids)  # waits for the router
        if rows.as_routed:  # each call into torch is microseconds, in every layer of every token
            there = ids
            self._tell(layer, routed, weights, rows)
        else:
            weights = weights.masked_fill(ids < 0, 0)
            routed = runnable(routed, rows.real)
            self._tell(layer, routed[: rows.real], weights[: rows.real], rows)
        if self.holds_all:
            return kernel(x, weights, routed)
        if (cold := self.cold(layer, routed)) is None:
            return self.in_slots(layer, x, weights, routed, kernel, there=there)
        beside, hot = Share.of(routed, cold), Share.of(routed, ~cold)
        with self.computing(layer, beside, x, weights) as computation:
            part = self.in_slots(layer, *hot.pick(x, weights), hot.ids, kernel, computation.give_way)
            return combine(x, [(hot, part), (beside, computation.result())])

    def in_slots(
        self,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        kernel: LayerKernel,
        loaded: Callable[[], None] | None = None,
        there: Tensor | None = None,
    ) -> Tensor:
        """What the experts ``ids`` [rows, top_k] (on the CPU) give, computed wave by wave if it must be.

        Rows are independent in the kernel, so a row's result does not depend on its wave.

        Args:
            loaded: called when a wave's experts are there and its kernel is to run.
            there: ``ids`` on the device of ``x``, if they are there.
        """
        out = torch.empty_like(x)
        for wave in self.waves(layer, ids):
            rows = slice(wave.start, wave.stop)
            if loaded is not None:
                loaded()
            if kernel.takes_slots:
                part = kernel(x[rows], weights[rows], wave.slot_ids)
            else:
                slot_of = self._on_device(self._map(ids[rows], wave.slot_ids))
                named = self._on_device(ids[rows]) if there is None else there[rows]
                part = kernel(x[rows], weights[rows], named, slot_of, len(x))
            if len(part) == len(x):
                out = part
            else:
                out[rows] = part
        return out

    def _map(self, ids: Tensor, slot_ids: Tensor) -> Tensor:
        """int32 [experts]: the slots ``slot_ids`` of the experts ``ids``, both [rows, top_k]; all on the CPU."""
        slot_of = torch.full((self.shape.experts,), NOWHERE, dtype=torch.int32)
        slot_of[ids.long()] = slot_ids.to(torch.int32)
        return slot_of

    def _on_device(self, tensor: Tensor) -> Tensor:
        assert self._exchange is not None
        return self._exchange.to_device(tensor)

    def _tell(self, layer: int, ids: Tensor, weights: Tensor, rows: Rows) -> None:
        self.observe(layer, ids)
        if rows.record is not None:
            rows.record(layer, ids, weights)

    def cold(self, layer: int, ids: Tensor) -> Tensor | None:
        """Which (row, expert) pairs run on the CPU: bool [rows, top_k], or None when none does; ``ids`` as ``waves``.

        Their experts are not loaded. The policy hears of them when the step ends, as of all others.
        """
        if self._cpu is None or (balancer := self._loader.balancer) is None:
            return None
        routed, experts = ids.numpy(), self.shape.experts
        here = slice(layer * experts, (layer + 1) * experts)
        rows, resident = np.bincount(routed.ravel(), minlength=experts), self.residency.slot_of[here] != NOWHERE
        free = self.residency.slots - int(resident[rows > 0].sum())
        plan = balancer.plan(LayerState(layer, rows, resident, self._loader.scores[here], free))
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
            SpacError: the thread is closed.
        """
        assert self._cpu is not None
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
            missed.update(self._loader.hold(keys, self.counters if self._step is not None else None))
            used.update(keys)
            try:
                self.counters.waves += self._step is not None
                yield Wave(start, stop, torch.from_numpy(table[rows].astype(routed.dtype, copy=False)))
            finally:
                self._loader.release(keys)
        if self._step is not None:
            self.counters.misses += len(missed)
            self.counters.hits += len(used) - len(missed)

    def fill(self) -> Iterator[int]:
        slots = self.residency.slots
        for keys in filled_experts(len(self.shape.layers), self.shape.experts, slots):
            for start in range(0, len(keys), _FILL_BATCH):
                batch = keys[start : start + _FILL_BATCH]
                self._loader.hold(batch, None)
                self._loader.release(batch)
                yield len(batch)
        assert not self.holds_all or (self.residency.slot_of == np.arange(slots)).all()

    def close(self) -> None:
        self._loader.close()
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
        counts = np.full(self.shape.total, NOT_RUN)
        counts.reshape(-1, self.shape.experts)[[layer for layer, _ in routed]] = 0
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


def runnable(ids: Tensor, real: int) -> Tensor:
    """Experts [rows, top_k] on the CPU that can all be run: padding needs no expert that the first row does not need.

    A padded row carries -1, which corrupts the heap in a CPU kernel, or what was routed before; what it gives is
    nobody's. A -1 in a row that counts becomes expert 0, to be run with weight 0.

    Args:
        real: rows that count, the first ones.
    """
    if real < len(ids):
        ids = torch.cat([ids[:real], ids[:1].expand(len(ids) - real, -1)])
    return ids.clamp(min=0)
