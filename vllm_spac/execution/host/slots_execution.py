"""Runs layers over slots: the host loads the experts that a layer misses, then vLLM's kernel runs.

``SlotExecution.forward`` is a layer on one screen. Each line is a stage with a file of its own: the routing comes to
the host (``device_names``), this process's rows and experts are found (``localised``), the CPU takes its share
(``cpu_division``), the rest is loaded (``slot_layers``) and run wave by wave (``slot_runner``), and parts are added.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import chain
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.loader import ExpertLoader
from vllm_spac.cache.named import BudgetHint
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import Step
from vllm_spac.cpu_kernels._thread import Computation, ExecutorThread
from vllm_spac.decisions.balancers.base import Balancer
from vllm_spac.decisions.predictors.base import START, PredictorInputs
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Rows
from vllm_spac.execution.cpu_check import CpuCheck
from vllm_spac.execution.host.device_names import DeviceNames
from vllm_spac.execution.host.localised import Routed, localise
from vllm_spac.execution.host.slot_layers import SlotLayers
from vllm_spac.execution.host.slot_runner import SlotRunner
from vllm_spac.execution.host.step_routing import StepRouting
from vllm_spac.execution.row_shares import Share, combine, local_numbers, localised_on_device
from vllm_spac.execution.waves import filled_experts
from vllm_spac.recording.metrics import Counters
from vllm_spac.recording.timeline_recorder import Timeline


class SlotExecution(Execution):
    """Runs layers over slots shared by all layers of one shape; their weights are only accessed through it.

    Kernels that do not take slots need the ``exchange`` of the context: it copies routing to the host and slots to the
    device.
    """

    _elsewhere: ClassVar[int] = NOWHERE
    needs_host: ClassVar[bool] = True
    counts_votes: ClassVar[bool] = True
    knobs: ClassVar[frozenset[str]] = frozenset({"cpu_experts", "host_memory", "prefetch", "speculate"})

    def __init__(self, context: ExecutionContext) -> None:
        super().__init__(context)
        shape, exchange, local_of, ahead = context.shape, context.exchange, context.local_of, context.ahead
        assert shape.top_k <= context.slots <= shape.total
        self.residency = Residency(shape.total, context.slots, context.policy)
        self._step: Step | None = None
        self._cpu: ExecutorThread | None = None
        self._routed = StepRouting(shape, partly=local_of is not None)
        reading = context.io_threads, context.path, ahead.background
        self._transfers = Transfers(context.store, context.tensors, *reading, context.host)
        if local_of is not None and exchange is not None:
            self._numbers = local_numbers(local_of, context.device)
        held = None if local_of is None else local_of.numpy()
        shared = self.residency, self._transfers, self.counters, shape.experts, ahead
        self._loader = ExpertLoader(*shared, top_k=shape.top_k, away=exchange is not None, local_of=held)
        self._layers = SlotLayers(self._loader, shape.experts)
        self.slots = SlotRunner(self._layers, exchange, local_of, self._elsewhere)
        self._names = DeviceNames(exchange, self._layers)
        self.signals = frozenset() if self.holds_all else self._loader.needs or frozenset()

    # -- a layer -------------------------------------------------------------------------------------------

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        if not self.waits_for_host(kernel):  # every expert has its slot: vLLM's own routing and kernel
            real, own = slice(rows.real), ids if self._step is None else self.own(ids)
            self._report(layer, own[real], ids[real], weights[real], rows)
            return kernel(x, weights, ids)
        looks = self._step is not None and self._layers.observes_layers
        chosen, names = self._names.to_host(layer, x, weights, ids, rows, asks=looks)
        whole = not kernel.takes_slots and self._cpu is None
        here = localise(x, weights, ids, chosen, rows, self.local_of, whole=whole)
        self._report(layer, here.own, here.chosen, here.weights, rows)
        if looks:
            self._layers.observe_layer(layer, x[: rows.real], here.asked, here.weights, names)
        if here.empty:
            return torch.zeros_like(x)
        if self.holds_all:
            part = kernel(here.routed.x, here.routed.weights, here.routed.ids)
        elif (cold := self._layers.cpu.cold(layer, here.routed.ids.numpy(), self._counted, here.real)) is None:
            part = self.slots.run(layer, here.routed, kernel, self._counted)
        else:
            part = self._divided(layer, here.routed, here.divided(torch.from_numpy(cold)), kernel)
        return here.spread(part, x)

    def waits_for_host(self, kernel: LayerKernel) -> bool:
        return kernel.takes_slots or not self.holds_all

    def own(self, ids: Tensor) -> Tensor:
        """Returns experts of the model on the device as this process numbers them, see ``localised_on_device``."""
        return ids if self.local_of is None else localised_on_device(ids, self._numbers)

    def _report(self, layer: int, own: Tensor, chosen: Tensor, weights: Tensor, rows: Rows) -> None:
        """Reports what the rows of requests, and no others, chose; ``own``: as this process numbers experts."""
        self.observe(layer, own, rows.cut)
        if rows.record is not None:
            rows.record(layer, chosen, weights)

    def _divided(self, layer: int, routed: Routed, shares: tuple[Share, Share], kernel: LayerKernel) -> Tensor:
        """Computes the first of ``shares`` on the CPU while the other is loaded and run; returns their sum."""
        beside, hot = shares
        with self._computing(layer, routed.pick(beside)) as computation:
            part = self.slots.run(layer, routed.pick(hot), kernel, self._counted, computation.wait_for_turn)
            out = combine(routed.x, [(hot.rows, part), (beside.rows, computation.result())])
        self._layers.cpu.admit()
        return out

    @contextlib.contextmanager
    def _computing(self, layer: int, routed: Routed) -> Iterator[Computation]:
        """Computes rows of a layer on the CPU while the block runs; ``SpacError``: the thread is closed."""
        assert self._cpu is not None
        with self._cpu.computing(routed.x, routed.weights, routed.ids, self.store.layer(layer)) as computation:
            yield computation
        if self._step is not None:
            self.counters.cpu_wait_seconds += computation.waited

    # -- a step --------------------------------------------------------------------------------------------

    @property
    def _counted(self) -> Counters | None:
        """The counters inside a step; what runs outside of steps is not counted."""
        return None if self._step is None else self.counters

    def draft(self, read: Tensor) -> None:
        self._names.draft(PredictorInputs(START, draft_ids=read))

    def begin_step(self, step: Step) -> None:
        self._step = step
        self.counters.count_step(step.kind)
        if self.holds_all:
            return
        self._routed.reset()  # of a forward that failed
        alike = bool(step.requests) and not step.prompts
        if alike and self.balancer is not None:
            self.balancer.observe_verify(sum(request.drafts for request in step.requests) / len(step.requests))
        self._names.receive_drafts()
        votes = step.generating_weights if alike else None  # of all rows
        hint = BudgetHint(step.bounds, None if votes is None else np.array(votes))
        inputs = PredictorInputs(START, draft_ids=step.draft) if alike else None
        self._layers.begin_step(inputs, step.rows if alike else 0, hint)
        self._names.begin_step()

    def end_forward(self) -> None:
        step, self._step = self._step, None
        if self.holds_all:
            if self._routed.many:
                self._routed.count_hits(self.counters, self.residency.activity)
        elif step is not None and self._routed:
            prompt = None if (rows := step.prompt_end) is None else self._routed.selected(rows)
            self._layers.end_step(self._routed.counts(step.generating, step.generating_weights), prompt)
            self._routed.reset()

    def observe(self, layer: int, ids: Tensor, partly: bool = False) -> None:
        """Keeps the routing of a layer's rows (ids [rows, top_k]) until the step ends; arguments as of ``add``."""
        if self._step is not None:
            self._routed.add(layer, ids, partly)

    def snapshot(self) -> dict:
        if self.holds_all:
            self._routed.count_hits(self.counters, self.residency.activity)
        self.counters.read_retries = self.store.retries
        return self.counters.snapshot()

    def attach_balancer(self, balancer: Balancer, thread: ExecutorThread, checked: bool = False) -> None:
        """As in ``Execution``; the store must be addressable. From now on results are exact up to rounding."""
        self.balancer = balancer
        self._layers.cpu.attach_balancer(balancer, CpuCheck(self.counters, self._transfers.clock) if checked else None)
        self._cpu = thread
        self.keeps_bits = False

    @property
    def queued(self) -> int:
        return len(self._transfers.ahead.keys)

    def watch(self, timeline: Timeline | None, first: int) -> None:
        self._transfers.watch(timeline, first)
        if self._cpu is not None:
            self._cpu.timeline = timeline

    # -- start and end -------------------------------------------------------------------------------------

    def fill(self) -> Iterator[int]:
        slots = self.residency.slots
        layers, experts = len(self.shape.layers), self.shape.experts
        yield from self._layers.fill(filled_experts(layers, experts, slots))
        self._transfers.finish()
        if self.host is not None:
            both = min(self.shape.total, slots + self.host.tier.rows)
            wanted = chain.from_iterable(filled_experts(layers, experts, both))
            yield from self._transfers.fill_host(self.host.tier.first(wanted, self.residency.slot_of))
        assert not self.holds_all or (self.residency.slot_of == np.arange(slots)).all()

    def close(self) -> None:
        self._loader.close()
        if self._cpu is not None:
            self._cpu.close()
        self.store.close()
