"""Execution that loads the experts a layer misses, then runs vLLM's kernel.

The order of the operations (divide, pin, load, run, unpin) is defined in this file and in ``slot_layers``, which has
the decisions. For kernels whose result for a row depends on an expert's other rows, waves are of whole experts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.named import Named, Ration
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import NO_EXPERT, MoEShape, Step
from vllm_spac.cpu_kernels._thread import Computation, ExecutorThread
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.predictors.base import START, Seen
from vllm_spac.execution import row_shares
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Rows
from vllm_spac.execution.row_shares import Share, combine, numbered, runnable, seen, typed_like
from vllm_spac.execution.slot_layers import CpuCheck, SlotLayers, filled_experts
from vllm_spac.execution.step_routing import StepRouting
from vllm_spac.recording.metrics import Counters
from vllm_spac.recording.timeline_recorder import Timeline
from vllm_spac.storage.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.cache.transfers import HostRows
    from vllm_spac.execution.exchange import Exchange, Sent


@dataclass(frozen=True)
class Wave:
    """Rows of a forward whose experts are all resident.

    Attributes:
        rows: a slice, or int64 [wave] on the CPU, ascending.
        slot_ids: slot numbers in place of experts, with the shape and dtype of the rows' routed ids.
    """

    rows: slice | Tensor
    slot_ids: Tensor


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    kernel: LayerKernel,
    waves: Callable[[Tensor], Iterator[Wave]],
    loaded: Callable[[], None] | None = None,
) -> Tensor:
    """Returns what ``kernel`` returns for all rows at once, to the bit, see ``LayerKernel.by_expert``.

    The pairs of a row and an expert are sorted by expert, and divided between experts: each wave has all rows of its
    experts, in their order. The results of a row are then added as the kernel does.

    Args:
        x: [rows, hidden].
        weights: [rows, top_k].
        ids: [rows, top_k], experts of the layer.
        kernel: takes slots.
        waves: makes the experts of pairs [rows * top_k, 1] resident, wave by wave; one has all pairs of its experts.
        loaded: called when a wave's experts are resident, before its kernel runs.
    """
    assert kernel.takes_slots
    top_k, flat, shares = ids.shape[1], ids.flatten(), weights.flatten()
    order = flat.argsort(stable=True)
    parts = x.new_empty(len(flat), x.shape[1])
    for wave in waves(flat[order][:, None]):
        pairs = order[wave.rows]
        if loaded is not None:
            loaded()
        parts[pairs] = kernel(x[pairs // top_k], shares[pairs][:, None], wave.slot_ids)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for choice in parts.view(len(x), top_k, -1).unbind(1):
        out += choice
    return out.to(x.dtype)


def _tensors(names: Sequence[Named]) -> list[Tensor]:
    return [tensor for each in names for tensor in each.tensors]


_COUNT_BATCH = 1024  # forwards of layers whose routing is kept before it is counted
_COUNT_PAIRS = 4 << 20  # (row, expert) pairs kept: 16 MiB of ids, possibly in GPU memory


class SlotExecution(Execution):
    """Runs layers over slots shared by all layers of one shape; their weights are only accessed through it.

    Args:
        shape: the layers, experts and tensors.
        slots: number of slots, from ``shape.top_k`` to ``shape.total``.
        policy: eviction policy; owned.
        store: stores every expert; owned.
        tensors: name -> slots of shape [slots, ...].
        io_threads: maximum number of reads in flight.
        path: name of the store in the counters.
        ahead: settings of the prefetcher.
        exchange: copies routing to the host and slots to the device; needed by kernels that do not take slots.
        host: host memory between the slots and the store, if any; owned.
        local_of: the experts that this process holds, see ``Execution``.
    """

    _elsewhere: ClassVar[int] = NOWHERE
    needs_host: ClassVar[bool] = True
    counts_votes: ClassVar[bool] = True
    knobs: ClassVar[frozenset[str]] = frozenset({"cpu_experts", "host_memory", "prefetch", "speculate"})

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
        exchange: Exchange | None = None,
        host: HostRows | None = None,
        local_of: Tensor | None = None,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        self.shape = shape
        self.counters = Counters()
        self.residency = Residency(shape.total, slots, policy)
        self.tensors = tensors
        self.store = store
        self.holds_all = slots == shape.total  # each expert has its slot: nothing is ever decided or moved
        self._step: Step | None = None
        self._cpu: ExecutorThread | None = None
        self._exchange = exchange
        self._routed = StepRouting(shape, partly=local_of is not None)
        knobs = ahead or PrefetchSettings()
        self._transfers = transfers = Transfers(store, tensors, io_threads, path, knobs.background, host)
        self.host, self.local_of = host, local_of
        self._held: Tensor | None = None  # the experts of ``local_of`` by their numbers here, where a kernel has a map
        if local_of is not None and exchange is not None:
            self._numbers = row_shares.numbers_there(local_of, next(iter(tensors.values())).device)
            self._held = local_of.argsort(stable=True)[-shape.experts :]
        held = None if local_of is None else local_of.numpy()
        shared = self.residency, transfers, self.counters, shape.experts, knobs
        self._loader = ExpertLoader(*shared, top_k=shape.top_k, away=exchange is not None, local_of=held)
        self._layers = SlotLayers(self._loader, shape.experts)
        self.looks_at = frozenset() if self.holds_all else self._loader.needs or frozenset()
        # What a predictor on the device named that is not on the host yet: of the step, and of drafts.
        self._asked: list[Named] = []
        self._sent: deque[tuple[Sent, list[Named]]] = deque()

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
            ahead=PrefetchSettings.configured(config, config.prefetch, context.predictor, drafts=context.drafts),
            exchange=context.exchange,
            host=context.host,
            local_of=context.local_of,
        )

    @property
    def _counted(self) -> Counters | None:
        """The counters inside a step; what runs outside of steps is not counted."""
        return None if self._step is None else self.counters

    def draft(self, read: Tensor) -> None:
        seen, prefetcher = Seen(START, draft_ids=read), self._loader.prefetcher
        if self._exchange is None:
            prefetcher.draft(seen)
        elif names := prefetcher.ask(seen):
            self._sent.append((self._exchange.send(_tensors(names)), names))
            self._hear_of_drafts()

    def _hear_of_drafts(self) -> None:
        """Passes on the newest names of drafts that have arrived, which include the older ones."""
        newest = None
        while self._sent and self._sent[0][0].arrived.done():
            newest = self._sent.popleft()
        if newest is not None:
            sent, names = newest
            tensors = iter(sent.tensors)
            self._loader.prefetcher.draft(None, [each.arrived(tensors) for each in names])

    def begin_step(self, step: Step) -> None:
        self._step = step
        if not self.holds_all:
            self._routed.clear()  # of a forward that failed
            seen = Seen(START, draft_ids=step.draft)
            alike = bool(step.requests) and not step.prompts
            if alike and self.balancer is not None:
                self.balancer.verifies(sum(request.drafts for request in step.requests) / len(step.requests))
            self._hear_of_drafts()
            self._sent.clear()  # the first layer brings more
            votes = step.generating_weights if alike else None  # of all rows
            ration = Ration(step.bounds, None if votes is None else np.array(votes))
            self._layers.begin_step(seen if alike else None, step.rows if alike else 0, ration)
            self._asked = self._layers.ask(START) if self._layers.looks else []
        self.counters.began(step.kind)

    def end_forward(self) -> None:
        step, self._step = self._step, None
        if self.holds_all:
            if len(self._routed) >= _COUNT_BATCH or self._routed.pairs >= _COUNT_PAIRS:
                self._count_hits()
        elif step is not None and self._routed:
            prompt = None if (rows := step.prompt_end) is None else self._routed.selected(rows)
            self._layers.end_step(self._routed.counts(step.generating, step.generating_weights), prompt)
            self._routed.clear()

    def observe(self, layer: int, ids: Tensor, partly: bool = False) -> None:
        """Keeps the routing of a layer's rows (ids [rows, top_k]) until the step ends; arguments as of ``add``."""
        if self._step is not None:
            self._routed.add(layer, ids, partly)

    def snapshot(self) -> dict:
        if self.holds_all:
            self._count_hits()
        self.counters.read_retries = self.store.retries
        return self.counters.snapshot()

    def balance(self, balancer: Balancer, thread: ExecutorThread, checked: bool = False) -> None:
        """As in ``Execution``; the store must be addressable. From now on results are exact up to rounding."""
        self.balancer = balancer
        self._layers.balance(balancer, CpuCheck(self.counters, self._transfers.clock) if checked else None)
        self._cpu = thread
        self.keeps_bits = False

    @property
    def queued(self) -> int:
        return len(self._transfers.ahead.keys)

    def watch(self, timeline: Timeline | None, first: int) -> None:
        self._transfers.watch(timeline, first)
        if self._cpu is not None:
            self._cpu.timeline = timeline

    # -- a layer -------------------------------------------------------------------------------------------

    def own(self, ids: Tensor) -> Tensor:
        """Returns experts of the model on the device as this process numbers them, see ``numbered_there``."""
        return ids if self.local_of is None else row_shares.numbered_there(ids, self._numbers)

    def waits_for_host(self, kernel: LayerKernel) -> bool:
        return kernel.takes_slots or not self.holds_all

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        if not self.waits_for_host(kernel):  # vLLM's own routing and kernel
            own = ids if self._step is None else self.own(ids)
            self._tell(layer, own[: rows.real], ids[: rows.real], weights[: rows.real], rows)
            return kernel(x, weights, ids)
        if self.local_of is not None:
            return self._own_part(layer, x, weights, ids, kernel, rows)
        routed, there, live = ids, None, None
        names: list[Named] = []
        if not kernel.takes_slots:
            routed, names = self._to_host(layer, x, weights, ids, rows)
        if rows.as_routed:  # each call into torch takes microseconds, in every layer of every token
            there = ids
            self._tell(layer, routed, routed, weights, rows)
        else:
            weights = weights.masked_fill(ids < 0, 0)
            raw, routed = routed, runnable(routed, rows.real)
            if rows.cut:
                live = (raw >= 0).any(1, keepdim=True)
                live[rows.real :] = False
            told = (routed if live is None else routed.masked_fill(~live, NO_EXPERT))[: rows.real]
            self._tell(layer, told, told, weights[: rows.real], rows)
        if self.holds_all:
            return kernel(x, weights, routed)
        if self._step is not None and self._layers.looks:
            self._layers.look(layer, x[: rows.real], routed[: rows.real], weights[: rows.real], names)
        return self._shared(layer, x, weights, routed, kernel, rows.real, there, live)

    def _shared(
        self,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        kernel: LayerKernel,
        real: int,
        there: Tensor | None = None,
        live: Tensor | None = None,
    ) -> Tensor:
        """As ``in_slots``, but for the pairs that the CPU takes; ``real``: leading rows that belong to requests.

        ``live``: bool [rows, 1] on the CPU, the rows that run experts; None: all.
        """
        if (cold := self.cold(layer, ids, real)) is None:
            return self.in_slots(layer, x, weights, ids, kernel, there=there)
        runs = torch.ones_like(cold) if live is None else live.expand_as(cold)
        beside, hot = Share.of(ids, cold & runs), Share.of(ids, ~cold & runs)
        with self.computing(layer, beside, x, weights) as computation:
            part = self.in_slots(layer, *hot.pick(x, weights), hot.ids, kernel, computation.give_way)
            combined = combine(x, [(hot.rows, part), (beside.rows, computation.result())])
        self._layers.admit()
        return combined

    def _to_host(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, rows: Rows) -> tuple[Tensor, list[Named]]:
        """Returns ``ids`` on the host, and what a predictor named on the device; waits once, for the router.

        Arguments as in ``forward``.
        """
        assert self._exchange is not None
        asked, self._asked = self._asked, []
        if self._step is not None and self._layers.looks:
            real = slice(rows.real)
            read = x[real], ids[real], weights[real]
            if rows.cut:
                read = seen(*read)
            elif not rows.as_routed:
                read = read[0], read[1].clamp(min=0), read[2].masked_fill(read[1] < 0, 0)
            asked += self._layers.ask(layer, *read)
        routed, *found = self._exchange.all_to_host([ids, *_tensors(asked)])
        tensors = iter(found)
        return routed, [each.arrived(tensors) for each in asked]

    def _own_part(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        """Computes what this process's experts add to a layer's output; vLLM adds the parts of all ranks behind it.

        Arguments and result as in ``forward``. Rows that chose none of them stay 0.
        """
        assert self.local_of is not None
        routed, names = (ids, []) if kernel.takes_slots else self._to_host(layer, x, weights, ids, rows)
        real, local = slice(rows.real), numbered(routed, self.local_of, rows.real)
        self._tell(layer, local[real], routed[real], weights[real], rows)
        if self._step is not None and self._layers.looks and not self.holds_all:  # predictors know all experts
            chosen = runnable(routed, rows.real)[real]
            self._layers.look(layer, x[real], chosen, weights[real].masked_fill(ids[real] < 0, 0), names)
        share = Share.of(local, local >= 0)
        if not kernel.takes_slots and self._cpu is None and len(share.rows):  # the map leaves out what others hold
            there = ids if rows.as_routed else self._on_device(runnable(routed, rows.real))
            needed = torch.full_like(local, int(share.ids[0, 0]))  # of rows that chose none of this process's experts
            needed[share.rows] = share.ids
            return self.in_slots(layer, x, weights.masked_fill(ids < 0, 0), needed, kernel, there=there)
        out = torch.zeros_like(x)
        if len(share.rows):
            picked = share.pick(x, weights)
            if self.holds_all:
                out[share.rows] = kernel(*picked, share.ids)
            else:
                part = self._shared(layer, *picked, share.ids, kernel, len(share.rows))
                out[share.rows.to(x.device)] = part
        return out

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
        """Computes the experts ``ids`` from their slots, in several waves if there are too few slots.

        What is computed together in a wave changes no result: whole rows, or all rows of an expert, see
        ``LayerKernel.by_expert``.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [rows, hidden].
            weights: [rows, top_k].
            ids: [rows, top_k] on the CPU, experts of the layer.
            kernel: vLLM's kernel of the layer.
            loaded: called when a wave's experts are resident, before its kernel runs.
            there: ``ids`` on the device of ``x``, if the caller has them.

        Returns:
            [rows, hidden] like ``x``.
        """
        if (found := self._layers.together(layer, ids.numpy(), self._counted)) is not None:
            slots, pinned = found
            try:
                if loaded is not None:
                    loaded()
                return self._run(kernel, x, weights, ids, typed_like(slots, ids), there, x.shape[0])
            finally:
                if pinned:
                    self._layers.release(pinned)
        if kernel.by_expert and len(np.unique(ids)) > self.residency.slots:
            return by_expert(x, weights, ids, kernel, partial(self.waves, layer), loaded)
        out = None
        for wave in self.waves(layer, ids):
            rows = wave.rows if kernel.takes_slots or isinstance(wave.rows, slice) else self._on_device(wave.rows)
            if loaded is not None:
                loaded()
            named = None if there is None else there[rows]
            part = self._run(kernel, x[rows], weights[rows], ids[wave.rows], wave.slot_ids, named, len(x))
            if len(part) == len(x):
                out = part
            else:
                out = torch.empty_like(x) if out is None else out
                out[rows] = part
        return torch.empty_like(x) if out is None else out

    def _run(
        self,
        kernel: LayerKernel,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        slot_ids: Tensor,
        there: Tensor | None,
        rows: int,
    ) -> Tensor:
        """Runs ``kernel`` on rows whose experts ``ids`` are in the slots ``slot_ids``; ``there``: ids on the device."""
        if kernel.takes_slots:
            return kernel(x, weights, slot_ids)
        slot_of = self._on_device(self._map(ids, slot_ids))
        if there is None:
            there = self._on_device(ids if self._held is None else self._held[ids.long()].to(ids.dtype))
        return kernel(x, weights, there, slot_of, rows)

    def _map(self, ids: Tensor, slot_ids: Tensor) -> Tensor:
        """Returns int32 [experts of the model]: the slots ``slot_ids`` of the experts ``ids``, both [rows, top_k].

        On the CPU. Others are ``_elsewhere``, and NOWHERE if they may be another process's.
        """
        experts, named, elsewhere = self.shape.experts, ids.numpy(), self._elsewhere
        if self._held is not None:
            experts, named, elsewhere = len(self._numbers) - 1, self._held.numpy()[named], NOWHERE
        slot_of = np.full(experts, elsewhere, dtype=np.int32)  # numpy: in every layer of every step
        slot_of[named] = slot_ids.numpy()
        return torch.from_numpy(slot_of)

    def _on_device(self, tensor: Tensor) -> Tensor:
        assert self._exchange is not None
        return self._exchange.to_device(tensor)

    def _tell(self, layer: int, own: Tensor, ids: Tensor, weights: Tensor, rows: Rows) -> None:
        """Tells of the rows of requests; ``own``: their experts as this process numbers them."""
        self.observe(layer, own, rows.cut)
        if rows.record is not None:
            rows.record(layer, ids, weights)

    def cold(self, layer: int, ids: Tensor, real: int | None = None) -> Tensor | None:
        """Decides which (row, expert) pairs run on the CPU: bool [rows, top_k], or None if there are none.

        Their experts are not loaded. The policy observes them when the step ends, like all others. ``ids`` as in
        ``waves``; ``real``: leading rows that belong to requests, all by default.
        """
        if self._cpu is None:
            return None
        pairs = self._layers.cold(layer, ids.numpy(), self._counted, real)
        return None if pairs is None else torch.from_numpy(pairs)

    @contextlib.contextmanager
    def computing(self, layer: int, share: Share, x: Tensor, weights: Tensor) -> Iterator[Computation]:
        """Computes ``share`` of a layer's rows on the CPU while the block runs.

        Args:
            layer: number of the layer in ``shape.layers``.
            share: the (row, expert) pairs to compute.
            x: [rows, hidden].
            weights: [rows, top_k].

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
        """Makes the routed experts of a layer resident, wave by wave.

        A wave's experts are pinned until the next wave is requested. There is one wave unless the rows need more
        experts than there are slots; every row is in exactly one wave.

        Args:
            layer: number of the layer in ``shape.layers``.
            ids: experts of shape [rows, top_k] on the CPU, each in ``[0, shape.experts)``.

        Raises:
            StoreError: an expert could not be loaded; nothing was computed with it.
        """
        routed, first = ids.numpy(), layer * self.shape.experts
        table = self.residency.slot_of[first : first + self.shape.experts]
        with contextlib.closing(self._layers.waves(layer, routed, self._counted)) as waves:
            for rows, _ in waves:
                found = rows if isinstance(rows, slice) else torch.from_numpy(rows)
                yield Wave(found, typed_like(table[routed[rows]], ids))

    def fill(self) -> Iterator[int]:
        slots = self.residency.slots
        first = self.residency.policy.first()
        layers, experts = len(self.shape.layers), self.shape.experts
        yield from self._layers.fill(filled_experts(layers, experts, slots, first))
        self._transfers.finish()
        if self.host is not None:
            both = min(self.shape.total, slots + self.host.tier.rows)
            wanted = chain.from_iterable(filled_experts(layers, experts, both, first))
            yield from self._transfers.keep(self.host.tier.first(wanted, self.residency.slot_of))
        assert not self.holds_all or (self.residency.slot_of == np.arange(slots)).all()

    def close(self) -> None:
        self._loader.close()
        if self._cpu is not None:
            self._cpu.close()
        self.store.close()

    def _count_hits(self) -> None:
        """Counts the hits of many steps at once, for use when every expert has its slot and nothing is decided."""
        if not self._routed:
            return
        if self.residency.activity is not None:
            self.residency.activity.observe(self._routed.uses())
        self.counters.hits += self._routed.distinct()
        self.counters.waves += len(self._routed)
        self._routed.clear()
