"""Runs layers over a table of addresses: one launch reads hits from their slots and misses from host memory.

No layer waits for the host. Between steps the device puts slots on offer to the layers that miss experts, by what the
last step used (``admission``); the host reads the counts of finished steps. Long prompts borrow slots, which are filled
ahead of their layers (``borrowed_slots``). On a CPU the launches are the torch twins of the kernels: the same addresses
and the same rounding, for comparison and not for speed.

So a step may also be one CUDA graph. A replay runs launches and no line of this module. Whatever differs from step to
step is kept in memory at fixed addresses: the table, the offers, where padding begins, the counts. Some of it is
written before the replay and some read after it, on the stream of the replay, by ``begin_step`` and ``end_forward``.

Nothing can be compiled while a graph is captured, and no request should wait for compilation. So the first forward,
which vLLM runs to measure its memory, first launches every variant of the kernels that any forward can need.

With a predictor on the device, experts of the next layer are read while no layer reads (``layer_lookahead``). By one
that looks at the drafter, experts of the next step are, while drafts are made (``draft_lookahead``).

With ``cpu_experts``, a layer of few rows leaves some of its experts to the CPU (``cpu_share``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from vllm_spac.core import Step
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.execution.address_table import AddressTable, check_layer, check_shape, kernels_for
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Rows
from vllm_spac.execution.cpu_check import CpuCheck
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.borrowed_slots import LongPrompts
from vllm_spac.execution.device.cpu_share import CpuShare
from vllm_spac.execution.device.layer_launches import LayerLaunches, LayerRows
from vllm_spac.execution.device.reads_ahead import ReadsAhead, ahead_bytes
from vllm_spac.execution.exchange import capturing, streams
from vllm_spac.execution.expert_delivery import ExpertDelivery
from vllm_spac.execution.row_shares import local_numbers
from vllm_spac.execution.waves import filled_experts

if TYPE_CHECKING:
    from vllm_spac.cpu_kernels._thread import ExecutorThread
    from vllm_spac.decisions.balancers.base import Balancer

_FILL_BATCH = 16
_ON_CPU = (
    "plane=pointers on a CPU runs the torch twins of the GPU's kernels: for comparison, and slow; to serve, use "
    "--spac-plane slots"
)
_ALL = 2**31 - 1  # pairs: none is padding

logger = logging.getLogger("vllm.spac")


class PointerExecution(Execution):
    """Runs layers by kernels that read a table of pointers; the slots are shared by all layers of one shape.

    The experts' tensors are ``w13_weight`` [2 ff, d], ``w2_weight`` [d, ff], and both biases or none, as in the
    checkpoint; with ``shape.packed`` the weights' codes, and ``w13_scale`` and ``w2_scale``. Experts that the device
    cannot address are ordered (``expert_delivery``). The kernels are compiled for up to ``rows`` rows, and skip experts
    that are not ``local_of`` this process, like padding. A predictor that is ``built`` from a file is asked in layers,
    one that looks at the drafter while drafts are made.
    """

    needs_host: ClassVar[bool] = False
    reads_in_place: ClassVar[bool] = True
    keeps_bits = False  # the kernels sum in another order than vLLM's
    layout: ClassVar[Literal["plain", "kernel"]] = "plain"
    repacks: ClassVar[bool] = True
    knobs: ClassVar[frozenset[str]] = frozenset({"cpu_experts", "host_memory", "prefetch", "speculate"})
    check_layer, check_shape = staticmethod(check_layer), staticmethod(check_shape)
    ahead_bytes = staticmethod(ahead_bytes)

    def __init__(self, context: ExecutionContext) -> None:
        super().__init__(context)
        shape, store, tensors, slots = context.shape, context.store, context.tensors, context.slots
        assert shape.top_k <= slots <= shape.total
        self.check_shape(shape)
        device, local_of = context.device, context.local_of
        self._numbers = None if local_of is None else local_numbers(local_of, device)
        of_model = shape.experts if local_of is None else len(local_of)
        self._compute, self._copy = streams(device)
        kernels = kernels_for(device)
        self._memory = memory = AddressTable(store, tensors, shape.total)
        self.admission = Admission(context, memory, self.counters, self._compute, self._copy, kernels)
        if not self.holds_all and not all(map(store.in_reach, range(shape.total))):
            reading = store, context.io_threads, memory, self._compute, context.host, context.failed
            self.admission.delivery = delivery = ExpertDelivery(*reading)
            self.admission.reports.on_use = delivery.observe
        self._failed = None if context.failed is None else context.failed.numpy()
        self._unfilled = ""  # why slots that were given to experts may have other bytes
        self.residency = self.admission.residency
        self.launches = LayerLaunches(shape, self.admission, memory, kernels)
        self.prompts: LongPrompts | None = None  # None: each expert has its slot
        if not self.holds_all:
            parts = store, tensors, self.admission, self.launches, self._compute, self._copy
            self.prompts = LongPrompts(*parts, of_model, self.counters, context.path)
        self.ahead = ReadsAhead(context, self.admission, kernels, self._compute, self._copy, self._numbers)
        self.launches.early = self.ahead.early
        self.signals = self.ahead.signals
        self._sizes = kernels.rows_to_compile(context.rows, shape.top_k, shape.experts, shape.packed)
        self._compiled: set[str] = set()  # activations
        # int32 [1], number of pairs of the requests' rows, after which padding begins; ``_all``: without padding.
        self._live = torch.full((1,), _ALL, dtype=torch.int32, device=device)
        self._all = self._live.clone()
        self._rows: int | None = None  # of requests; None: all
        self._step: Step | None = None
        self._prompt: slice | None = None  # of its rows, see ``Step.prompt_end``
        self._chosen: list[tuple[int, Tensor]] = []  # what a layer selected for them, int32 [rows, top_k]

    def describe(self) -> str:
        parts, packed = [] if self.holds_all else ["long prompts borrow slots"], self.shape.packed
        parts += [] if self.admission.delivery is None else [self.admission.delivery.describe()]
        if packed is not None:
            rows = "" if packed.activations is not None else ", activations not quantised"
            parts.append(f"weights {packed.describe()}{rows}")
        return ", ".join(parts)

    def caveat(self) -> str | None:
        return None if self._live.is_cuda else _ON_CPU

    def resident(self, layer: int) -> Tensor:
        """Returns bool [experts] on the device: which experts of a layer its kernels read from slots.

        One launch over state of the device, which may be captured into a CUDA graph.
        """
        experts = self.shape.experts
        if self.holds_all:
            return torch.ones(experts, dtype=torch.bool, device=self._live.device)
        return self._memory.resident(slice(layer * experts, (layer + 1) * experts))

    def attach_balancer(self, balancer: Balancer, thread: ExecutorThread, checked: bool = False) -> None:
        """As in ``Execution``; called before a forward is captured, since the next one compiles further kernels."""
        check = CpuCheck(self.counters, time.monotonic) if checked else None
        delivery = None if self.store.addressable else self.admission.delivery
        parts = self.cpu_layers(), self._live.device, self._compute, check
        cpu = CpuShare(self.shape, balancer, thread, *parts, None if delivery is None else delivery.mail[1].place_of)
        self.balancer, self.launches.cpu = balancer, cpu
        self.admission.reports.on_report = lambda counted: cpu.observe_step(counted.computed, counted.late)
        self._compiled.clear()

    # -- between steps -------------------------------------------------------------------------------------

    def draft(self, read: Tensor) -> None:
        assert self.ahead.drafts is not None
        self.ahead.drafts.draft(read)

    def begin_step(self, step: Step) -> None:
        """Starts a forward of the target model for real requests; the admission offers slots."""
        self.check_results()
        self._step = step
        self._prompt = None if self.holds_all else step.prompt_end
        if step.rows != self._rows:  # rows from there on are padding, until the next step
            self._compute.submit(self._live.fill_, step.rows * self.shape.top_k)
        self._rows = step.rows
        if self.prompts is not None:
            self.prompts.begin()
        self.counters.count_step(step.kind)
        self.ahead.end_drafts()
        self.admission.begin(step)
        if self.admission.delivery is not None:
            self.ahead.finish()  # reads for drafts, in host memory that may leave
            self.admission.delivery.begin(self.residency.slot_of)
        self.ahead.begin(step)
        if self.launches.cpu is not None:
            self.launches.cpu.begin(step)

    def end_forward(self) -> None:
        step, chosen = self._step, self._chosen
        self._step, self._chosen, self._prompt = None, [], None
        self.ahead.finish()
        if step is not None:
            self.ahead.tally()
            known = None if self.prompts is None else self.prompts.end()
            self.admission.end(step, known, prompt=chosen)

    def snapshot(self) -> dict:
        self.admission.reports.count()
        if self.admission.delivery is not None:
            self.admission.delivery.count(self.counters)
        self.ahead.count(self.counters)
        return self.counters.snapshot()

    def check_results(self) -> None:
        if self.admission.delivery is not None:
            self.admission.delivery.check()
        if self._failed is not None and self._failed[0]:
            raise StoreError("spac: another rank cannot read its experts any more; the log says why")
        if self._unfilled:
            raise SpacError(f"spac: a layer failed with its missed experts in no slot; restart: {self._unfilled}")

    # -- a layer -------------------------------------------------------------------------------------------

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        if rows.record is not None:
            rows.record(layer, ids[: rows.real], weights[: rows.real])
        return self.run(layer, x, weights, ids, kernel.activation, torch.empty_like(x), rows.guess)

    def run(
        self,
        layer: int,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        activation: str,
        out: Tensor,
        guess: Tensor | None = None,
    ) -> Tensor:
        """Computes the routed experts of one layer without host synchronisation; returns ``out``.

        May be captured into a CUDA graph, which borrows no slots. Rows after those of the step are padding and run
        nothing; in a graph this refers to the step that replays it.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [T, d] of the experts' dtype.
            weights: [T, k] float32; a pair with weight 0 is skipped.
            ids: [T, k] int32 or int64, experts of the model; all else is padding and skipped.
            activation: one of ``kernels.formats.ACTIVATIONS``.
            out: [T, d] like x, is overwritten.
            guess: as in ``Rows``.
        """
        captured = capturing(ids)
        live = self._live if captured or self._step is not None else self._all
        rows = LayerRows.of(x, weights, ids, live, guess, captured, self._numbers)
        if activation not in self._compiled:
            _compile(self, layer, rows, activation)
        if self._prompt is not None and len(ids) >= self._prompt.stop and not rows.captured:
            self._chosen.append((layer, rows.ids[self._prompt]))
        self.ahead.wait()
        if self.prompts is not None and self.prompts.take(rows):
            return self.prompts.run(layer, rows, activation, out)
        self.launches.begin_layer(layer, rows)
        try:
            self.ahead.start(layer, rows)
            self.launches.compute(layer, rows, activation, out)
        except BaseException as error:  # no memory, for one: slots that were given to misses have nothing in them
            self._unfilled = self._unfilled or ("" if captured or self.holds_all else repr(error))
            raise
        self.ahead.start_after(layer)
        return out

    # -- start and end -------------------------------------------------------------------------------------

    def fill(self) -> Iterator[int]:
        return _filled(self)

    def close(self) -> None:
        if self.launches.cpu is not None:  # it may read what the next one has
            self.launches.cpu.close()
        if self.admission.delivery is not None:
            self.admission.delivery.close()
        self._copy.close()
        self.store.close()


def _compile(pool: PointerExecution, layer: int, like: LayerRows, activation: str) -> None:
    """Launches each kernel variant that forwards like ``like`` need, and what reads ahead."""
    assert not (like.captured and pool._sizes), "a forward must run before one is captured"
    start = time.perf_counter()
    if pool._sizes:
        pool.admission.compile()
    pool.ahead.prepare(activation)
    pool.launches.compile(layer, like.x, activation, pool._sizes, pool._all, pool.ahead.compile)
    pool._compiled.add(activation)
    if pool._sizes:
        logger.info("spac: kernels compiled for forwards of any size in %.1f s", time.perf_counter() - start)


def _filled(pool: PointerExecution) -> Iterator[int]:
    """As ``Execution.fill``."""
    admission, shape, store = pool.admission, pool.shape, pool.store
    if settled := store.settled:
        slots = [admission.residency.assign(key) for key in settled]
        assert slots == list(range(len(settled))), "they are in other slots"
        admission.finish_fill(settled)
        yield len(settled)
    for share in filled_experts(len(shape.layers), shape.experts, admission.residency.slots, settled):
        for start in range(0, len(share), _FILL_BATCH):
            keys = share[start : start + _FILL_BATCH]
            slots = [admission.residency.assign(key) for key in keys]
            rows = [{name: tensor[slot] for name, tensor in pool.tensors.items()} for slot in slots]
            if admission.delivery is not None:
                admission.delivery.read(keys, rows)
            else:
                for key, row in zip(keys, rows, strict=True):
                    store.read(key, row)
            admission.finish_fill(keys)
            yield len(keys)
    if (host := pool.host) is not None and admission.delivery is not None:
        both = min(shape.total, admission.residency.slots + host.tier.rows)
        wanted = chain.from_iterable(filled_experts(len(shape.layers), shape.experts, both))
        yield from admission.delivery.fill(wanted, admission.residency.slot_of)
