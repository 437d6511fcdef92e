"""Runs layers over a table of addresses: one launch reads hits from their slots and misses from host memory.

No layer waits for the host. Between steps the host reads the counts of finished steps and offers slots to the layers
that miss experts (``admission``). Long prompts read their misses from buffers that are filled one layer ahead
(``staging``). On a CPU the launches are the torch twins of the kernels: the same addresses and the same rounding, for
comparison and not for speed.

So a step may also be one CUDA graph. A replay runs launches and no line of this module. Whatever differs from step to
step is kept in memory at fixed addresses: the table, the offers, where padding begins, the counts. Some of it is
written before the replay and some read after it, on the stream of the replay, by ``begin_step`` and ``end_forward``.

Nothing can be compiled while a graph is captured, and no request should wait for compilation. So the first forward,
which vLLM runs to measure its memory, first launches every variant of the kernels that any forward can need.

With a predictor on the device, experts of the next layer are read into slots while a layer computes
(``DeviceLookahead``). While the kernel of layer l runs on the compute stream, the copy stream

1. scores the experts of layer l + 1, from what the router of layer l read and chose,
2. gives slots to the first top-k of each row that have none (``Admission.ahead``), and copies them there; under a
   budget, to those that it would keep.

The next layer starts when both streams have arrived. What a layer does while the other stream works cannot conflict: a
slot is taken from an expert that no layer up to l of this step uses and that l + 1 is not expected to use, so that no
launch in flight reads it; and between a layer's own admission and its end, nothing but this changes the table. A wrong
guess costs bytes, never a token: the true router decides in the next layer's own admission.

A predictor that looks at the drafter is asked while drafts are made (``draft_lookahead``).

With ``cpu_experts``, a layer of few rows leaves some of its experts to the CPU (``cpu_share``).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal, Self, cast

import torch
from torch import Tensor

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.core import MoEShape, Step
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.predictors.base import DRAFTING, Predictor, Seen
from vllm_spac.execution.address_table import AddressTable, check_layer, check_shape, grouped_gemm_over, kernels_for
from vllm_spac.execution.base import Execution, ExecutionContext, LayerFacts, LayerKernel, Room, Rows
from vllm_spac.execution.cpu_check import CpuCheck
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.cpu_share import CpuShare
from vllm_spac.execution.device.draft_lookahead import DraftLookahead
from vllm_spac.execution.device.slot_offers import Learned
from vllm_spac.execution.device.staging import ROWS, ExpertBuffers, Staging, divide, staging_bytes
from vllm_spac.execution.exchange import capturing, streams
from vllm_spac.execution.row_shares import numbered_there, numbers_there
from vllm_spac.execution.waves import filled_experts
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import ExpertStore
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from vllm_spac.config.types import SlotCount
    from vllm_spac.core import Step
    from vllm_spac.cpu_kernels._thread import ExecutorThread
    from vllm_spac.decisions.balancers.base import Balancer
    from vllm_spac.decisions.predictors._trained import Trained
    from vllm_spac.execution.exchange import Event, Stream

MOST_ROWS = 256  # of a forward; in a longer one nothing is read ahead in layers


class DeviceLookahead:
    """Called by the thread that launches.

    Args:
        predictor: on the device, looking one layer ahead.
        compute, copy: the stream that runs the model, and one for copies.
        rows: maximum number of rows of a forward.
        numbers: as of ``numbers_there``; None: this process holds all experts.
    """

    def __init__(
        self,
        predictor: Trained,
        admission: Admission,
        compute: Stream,
        copy: Stream,
        rows: int,
        numbers: Tensor | None = None,
    ) -> None:
        sizes, device = predictor.sizes, admission.memory.device
        of_model = admission.shape.experts if numbers is None else len(numbers) - 1
        assert predictor.reach == 1 and sizes.experts == of_model
        # Experts of the model, by the numbers of this process; None: the same.
        self._held = None if numbers is None else numbers[:-1].argsort(stable=True)[-admission.shape.experts :]
        self.rows = min(rows, MOST_ROWS)
        self._predictor, self._admission, self._compute, self._copy = predictor, admission, compute, copy
        self._last = sizes.layers - 1
        # Memory at fixed addresses, which a graph refers to.
        self._experts = torch.arange(admission.shape.experts, dtype=torch.int32, device=device)[None]
        self._named = torch.zeros(self._experts.shape, device=device)  # of these; 0: not
        # Of the step, written at once: what its rows count, 0 for one that names nothing, also as padding; and how
        # many of the names of each layer are read.
        self._said = torch.zeros(self.rows + sizes.layers, device=device)
        self._votes, self._limits = self._said[: self.rows, None], self._said[self.rows :]
        self._nobody = torch.zeros_like(self._votes)
        self._top_k = sizes.top_k
        self._step: tuple[list[float], list[int]] | None = None  # in ``_said``; None: forwards warm up
        self._arrives: Event | None = None
        self._kept: tuple[Tensor | None, ...] = ()  # what the copy stream reads, not to be freed meanwhile

    def begin(self, step: Step) -> None:
        """Called after ``Admission.begin``; nothing is read ahead in steps with prompts, or while it does not pay."""
        ahead = self._last and not step.prompts and step.rows <= self.rows and self._admission.ahead_left > 0
        votes = (step.generating_weights or [1.0] * step.rows) if ahead else []
        said = votes, self._admission.read_of(step.bounds)
        if said != self._step:
            told = torch.zeros(self._said.shape, pin_memory=self._said.is_cuda)
            told[: len(votes)], told[self.rows :] = (torch.tensor(each) for each in said)
            self._compute.submit(self._said.copy_, told, True)
        self._step = said

    def compile(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> None:
        """Launches on the copy stream all that ``start`` may launch later, for no row: nothing is named or moved.

        A capture must launch nothing for the first time: libraries load kernels and get their memory then, which a
        capture forbids, and they do it for each stream.
        """
        if self._last and len(x) <= self.rows:
            self._launch(min(layer, self._last - 1), x, ids, weights, self._nobody)
            self.join()

    def start(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        guess: Tensor | None = None,
        *,
        captured: bool,
    ) -> None:
        """Called between a layer's admission and its kernel; arguments as of ``PointerExecution.run``.

        Forwards before the first step do the same for no row: vLLM runs one of each size before it captures it.

        Args:
            captured: whether launches are captured into a graph, whose replays may read ahead.
        """
        if layer < self._last and len(x) <= self.rows and (captured or self._step is None or self._step[0]):
            self._launch(layer, x, ids, weights, self._votes, guess)

    def _launch(
        self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, votes: Tensor, guess: Tensor | None = None
    ) -> None:
        self._copy.wait(self._compute.record())
        self._copy.submit(self._look, layer, x, ids, weights, votes[: len(x)], guess)
        self._arrives, self._kept = self._copy.record(), (x, ids, weights, guess)

    def join(self) -> None:
        """What is launched from now on runs after what was started. Called before a layer, and when a step ends."""
        if self._arrives is not None:
            self._compute.wait(self._arrives)
            self._arrives, self._kept = None, ()

    @torch.inference_mode()
    def _look(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, votes: Tensor, guess: Tensor | None) -> None:
        self.name(layer, x, ids, weights, votes, self._named, guess)
        self._admission.ahead(layer + 1, self._experts, self._named)

    def name(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        votes: Tensor,
        out: Tensor,
        guess: Tensor | None = None,
    ) -> None:
        """Writes 1 for the experts of layer ``layer + 1`` that are read if they have no slot into ``out``, else 0.

        Each row names its likeliest top-k, and none if its draft was cut. Those of this process are ranked by their
        weights, as predicted and summed over the rows, times the rows' votes, as a budget ranks what rows select. Their
        places are reported, and the first are read.

        Args:
            votes: float32 [rows, 1]; whatever a row with 0 holds, it names nothing.
            out: float32 [1, N], by the numbers of this process.
            guess: the predictor's scores, if they were computed already; as in ``Rows``.
        """
        if guess is None:
            there = ids.clamp(0, self._predictor.sizes.experts - 1)  # padding may have any
            guess = self._predictor.of_next(Seen(layer, hidden=x, ids=there, weights=weights))
        heard = torch.zeros_like(guess, dtype=torch.bool).scatter_(1, guess.topk(self._top_k).indices, True)
        heard &= (votes > 0) & (ids[:, :1] >= 0)
        own = torch.where(heard, guess.softmax(-1) * votes, 0).sum(0, dtype=torch.float64)
        named = heard.any(0)
        if self._held is not None:
            own, named = own[self._held], named[self._held]
        before = (own > own[:, None]).sum(1)
        self._admission.places[layer + 1].copy_(before.masked_fill_(~named, -1))
        out.copy_(named & (before < self._limits[layer + 1]))


_FILL_BATCH = 16
_ALL = 2**31 - 1  # pairs: none is padding

logger = logging.getLogger("vllm.spac")


class PointerExecution(Execution):
    """Runs layers by kernels that read a table of pointers; the slots are shared by all layers of one shape.

    Args:
        shape: the layers, experts and tensors: ``w13_weight`` [2 ff, d], ``w2_weight`` [d, ff], and both biases or
            none, as in the checkpoint; with ``shape.packed`` the weights' codes, and ``w13_scale`` and ``w2_scale``.
        slots: number of slots, from ``shape.top_k`` to ``shape.total``.
        policy: chooses victims; owned.
        store: stores every expert in memory that the device can address; owned.
        tensors: name -> slots of shape [slots, ...], on the device that computes.
        path: name of the store in the counters.
        rows: maximum number of rows of a forward; the kernels are compiled for up to this number.
        ahead: what is read ahead of need. A predictor that is ``built`` from a file is asked in layers, one that
            looks at the drafter while drafts are made.
        staged: forwards of many rows read experts without a slot from buffers of ``staging_bytes``, else in place.
        local_of: the experts that this process holds, see ``Execution``. The kernels skip all others, like padding.
    """

    needs_host: ClassVar[bool] = False
    needs_addressable_store: ClassVar[bool] = True
    keeps_bits = False  # the kernels sum in another order than vLLM's
    layout: ClassVar[Literal["plain", "kernel"]] = "plain"
    knobs: ClassVar[frozenset[str]] = frozenset({"cpu_experts", "prefetch", "speculate"})

    def __init__(
        self,
        shape: MoEShape,
        slots: int,
        policy: Policy,
        store: ExpertStore,
        tensors: Mapping[str, Tensor],
        *,
        path: str,
        rows: int,
        ahead: PrefetchSettings | None = None,
        staged: bool = False,
        local_of: Tensor | None = None,
    ) -> None:
        assert shape.top_k <= slots <= shape.total
        self.check_shape(shape)
        self.shape = shape
        self.counters = Counters()
        self.tensors = tensors
        self.store = store
        self.holds_all = slots == shape.total
        self._path = path
        device = next(iter(tensors.values())).device
        self.local_of = local_of
        self._numbers = None if local_of is None else numbers_there(local_of, device)
        self._of_model = shape.experts if local_of is None else len(local_of)
        self._compute, self._copy = streams(device)
        self._kernels = kernels = kernels_for(device)
        self._memory = memory = AddressTable(store, tensors, shape.total)
        self.admission = Admission(shape, slots, policy, memory, self.counters, self._compute, kernels, path)
        self.residency = self.admission.residency
        self._staging: tuple[ExpertBuffers, Staging] | None = None
        if staged and slots < shape.total:
            buffers = ExpertBuffers(store, memory, tensors)
            self._staging = buffers, Staging(buffers, len(shape.layers), self._compute, self._copy)
        self._cpu: CpuShare | None = None
        self._ahead: DeviceLookahead | None = None
        self._drafts: DraftLookahead | None = None
        if ahead is not None and ahead.prefetch != "off" and not self.holds_all:
            self._read_ahead(ahead, rows)
        self._tables = {name: table.view(-1, shape.experts) for name, table in memory.table.items()}
        self._counts = self.admission.counts.view(-1, shape.experts)
        self._sizes = self._kernels.rows_to_compile(rows, shape.top_k, shape.experts, shape.packed)
        self._compiled: set[str] = set()  # activations
        # int32 [1], number of pairs of the requests' rows, after which padding begins; ``_all``: without padding.
        self._live = torch.full((1,), _ALL, dtype=torch.int32, device=device)
        self._all = self._live.clone()
        self._rows: int | None = None  # of requests; None: all
        self._step: Step | None = None
        self._prompt: slice | None = None  # of its rows, see ``Step.prompt_end``
        self._chosen: list[tuple[int, Tensor]] = []  # what a layer selected for them, int32 [rows, top_k]
        self._staged = False  # whether some layer of the step was

    def _read_ahead(self, ahead: PrefetchSettings, rows: int) -> None:
        shape, extra = self.shape, 1.0 if ahead.extra is None else ahead.extra
        predictor: Predictor = ahead.build(shape.total)
        shared = self.admission, self._compute, self._copy
        if predictor.on_device:
            self.admission.read_ahead(extra, ahead.prefetch)
            self._ahead = DeviceLookahead(cast("Trained", predictor), *shared, rows, self._numbers)
        else:
            assert predictor.needs & DRAFTING, "refused by the rules"
            self.admission.read_between(extra, ahead.prefetch, ahead.depth)
            k = ahead.k or shape.top_k
            self._drafts = DraftLookahead(predictor, *shared, k, ahead.cutoff, self._numbers)
            self.looks_at = predictor.needs

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        config = context.config
        settings = PrefetchSettings.configured(config, config.prefetch, context.predictor)
        return cls(
            context.shape,
            context.room.slots,
            context.policy,
            context.store,
            context.tensors,
            path=context.path,
            rows=context.rows,
            ahead=settings,
            staged=context.room.staged,
            local_of=context.local_of,
        )

    @classmethod
    def check_layer(cls, layer: LayerFacts) -> None:
        check_layer(layer)

    @classmethod
    def check_shape(cls, shape: MoEShape) -> None:
        check_shape(shape)

    @classmethod
    def divide(cls, slots: SlotCount, staging: str, shape: MoEShape, free_bytes: int) -> Room:
        count, staged = divide(slots, staging, shape, free_bytes)
        return Room(count, staged, count * shape.expert_bytes + (staging_bytes(shape) if staged else 0))

    @property
    def staged(self) -> bool:
        """Whether forwards of many rows read experts without a slot from buffers."""
        return self._staging is not None

    def describe(self) -> str:
        parts = []
        if not self.holds_all:
            prompts = f"staged in {gib(staging_bytes(self.shape))}" if self.staged else "read in place"
            parts = [f"prompts {prompts}"]
        if self.shape.packed is not None:
            rows = "" if self.shape.packed.activations is not None else ", activations not quantised"
            parts.append(f"weights {self.shape.packed.describe()}{rows}")
        return ", ".join(parts)

    def caveat(self) -> str | None:
        if self._live.is_cuda:
            return None
        return (
            "decisions=device on a CPU runs the torch twins of the GPU's kernels: for comparison, and slow; to "
            "serve, use --spac-decisions host"
        )

    def resident(self, layer: int) -> Tensor:
        """Returns bool [experts] on the device: which experts of a layer its kernels read from slots.

        One launch over state of the device, which may be captured into a CUDA graph.
        """
        experts = self.shape.experts
        if self.holds_all:
            return torch.ones(experts, dtype=torch.bool, device=self._live.device)
        return self._memory.resident(slice(layer * experts, (layer + 1) * experts))

    def balance(self, balancer: Balancer, thread: ExecutorThread, checked: bool = False) -> None:
        """As in ``Execution``; called before a forward is captured, since the next one compiles further kernels."""
        check = CpuCheck(self.counters, time.monotonic) if checked else None
        self._cpu = CpuShare(self.shape, balancer, thread, self.store, self._live.device, self._compute, check)
        self.balancer, self.admission.told = balancer, self._tell_cpu
        self._compiled.clear()

    def _tell_cpu(self, learned: Learned) -> None:
        assert self._cpu is not None
        self._cpu.told(learned.computed, learned.late)

    # -- between steps -------------------------------------------------------------------------------------

    def draft(self, read: Tensor) -> None:
        assert self._drafts is not None
        self._drafts.draft(read)

    def begin_step(self, step: Step) -> None:
        """Starts a forward of the target model for real requests; the admission offers slots."""
        self._step, self._staged = step, False
        self._prompt = None if self.holds_all else step.prompt_end
        self._pad_from(step.rows)
        if self._staging is not None:
            self._staging[1].begin()
        self.counters.began(step.kind)
        if self._drafts is not None:
            self._drafts.begin()
        self.admission.begin(step)
        if self._ahead is not None:
            self._ahead.begin(step)
        if self._cpu is not None:
            self._cpu.begin(step)

    def _pad_from(self, rows: int) -> None:
        """Marks rows from ``rows`` on as padding, until the next step; one launch if the number has changed."""
        if rows != self._rows:
            self._compute.submit(self._live.fill_, rows * self.shape.top_k)
        self._rows = rows

    def end_forward(self) -> None:
        step, self._step = self._step, None
        chosen, self._chosen, self._prompt = self._chosen, [], None
        if self._ahead is not None:
            self._ahead.join()
        if step is not None:
            self.admission.end(step, staged=self._staged, prompt=chosen)

    def snapshot(self) -> dict:
        self.admission.take()
        return self.counters.snapshot()

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

        May be captured into a CUDA graph, which is never staged. Rows after those of the step are padding and run
        nothing; in a graph this refers to the step that replays it.

        Args:
            layer: number of the layer in ``shape.layers``.
            x: [T, d] of the experts' dtype.
            weights: [T, k] float32; a pair with weight 0 is skipped.
            ids: [T, k] int32 or int64, experts of the model; whatever else they contain is padding and skipped.
            activation: one of ``address_table.ACTIVATIONS``.
            out: [T, d] like x, is overwritten.
            guess: as in ``Rows``.
        """
        captured = capturing(ids)
        if activation not in self._compiled:
            self._compile(layer, x, activation, captured)
        live = self._live if captured or self._step is not None else self._all
        x, ids, weights = x.contiguous(), ids.int().contiguous(), weights.float().contiguous()
        own = ids if self._numbers is None else numbered_there(ids, self._numbers)
        if self._prompt is not None and len(ids) >= self._prompt.stop and not captured:
            self._chosen.append((layer, own[self._prompt]))
        with self._reading(layer, x, ids, own, weights, live, captured, guess) as tables:
            return self._launch(tables, layer, x, own, weights, live, activation, out)

    def _compile(self, layer: int, x: Tensor, activation: str, captured: bool) -> None:
        """Launches each kernel variant that forwards like ``x`` need, over padding only; decides and moves nothing.

        Writes to the counts of ``layer`` and the next one, whose own launches come next and overwrite them.
        """
        assert not (captured and self._sizes), "a forward must run before one is captured"
        start = time.perf_counter()
        if self._sizes and self._drafts is not None:
            self._drafts.compile()
        if self._cpu is not None:
            self._cpu.ready(x)
        for rows in self._sizes:
            padding = x.new_zeros(rows, x.shape[1])
            ids = torch.full((rows, self.shape.top_k), -1, dtype=torch.int32, device=x.device)
            weights, out = torch.zeros(ids.shape, device=x.device), torch.empty_like(padding)
            self._enter(layer, padding, ids, weights, self._all)
            if self._ahead is not None:
                self._ahead.compile(layer, padding, ids, weights)
            given = self._tables_of(layer), layer, padding, ids, weights, self._all, activation, out
            self._launch(*given)
            if self._cpu is not None:  # other forwards of the same variant may have too many rows for it
                self._launch(*given, whole=True)
        self._compiled.add(activation)
        if self._sizes:
            logger.info("spac: kernels compiled for forwards of any size in %.1f s", time.perf_counter() - start)

    def _launch(
        self,
        tables: Mapping[str, Tensor],
        layer: int,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        live: Tensor,
        activation: str,
        out: Tensor,
        *,
        whole: bool = False,
    ) -> Tensor:
        """Launches what computes a layer; returns ``out``. ``whole``: the CPU has no share."""

        def gemm(weights: Tensor, out: Tensor, counts: Tensor) -> Tensor:
            shared = self._kernels, self.shape, tables, x, weights, ids, activation, out
            return grouped_gemm_over(*shared, counts=counts, live=live)

        if whole or self._cpu is None or len(x) > self._cpu.rows:
            return gemm(weights, out, self._counts[layer])
        return self._cpu.finish(layer, ids, self.admission.decisions["sources"], gemm, out)

    def _enter(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor, live: Tensor) -> None:
        post = None
        if self._cpu is not None and len(x) <= self._cpu.rows:
            post = partial(self._cpu.post, layer, x, ids, weights, live, self.admission.decisions)
        self.admission.enter(layer, ids, weights, post)

    def _tables_of(self, layer: int) -> Mapping[str, Tensor]:
        return {name: table[layer] for name, table in self._tables.items()}

    @contextlib.contextmanager
    def _reading(
        self,
        layer: int,
        x: Tensor,
        ids: Tensor,
        own: Tensor,
        weights: Tensor,
        live: Tensor,
        captured: bool,
        guess: Tensor | None,
    ) -> Iterator[Mapping[str, Tensor]]:
        """Yields the tables that the launch of a layer reads, name -> int64 [experts].

        ``own``: ``ids`` as this process numbers its experts, int32 [T, k]; -1 for others.
        """
        if self._drafts is not None:
            self._drafts.join()
        if self._staging is None or captured or ids.numel() < ROWS * self._of_model:
            if self._ahead is not None:
                self._ahead.join()
            self._enter(layer, x, own, weights, live)
            if self._ahead is not None:
                self._ahead.start(layer, x, ids, weights, guess, captured=captured)
            yield self._tables_of(layer)
            return
        slots = self.admission.slots().reshape(len(self.shape.layers), -1)  # does not change within a staged step
        buffers, staging = self._staging
        with staging.layer(layer, slots) as buffer:
            yield buffers.tables[buffer]
        if self._step is not None:
            self._staged = True
            missing = int((slots[layer] == NOWHERE).sum())
            self.counters.moved(f"{self._path} staged", missing * self.shape.expert_bytes)

    # -- start and end -------------------------------------------------------------------------------------

    def fill(self) -> Iterator[int]:
        slots, first = self.residency.slots, self.residency.policy.first()
        for share in filled_experts(len(self.shape.layers), self.shape.experts, slots, first):
            for start in range(0, len(share), _FILL_BATCH):
                keys = share[start : start + _FILL_BATCH]
                for key in keys:
                    slot = self.admission.seat(key)
                    self.store.read(key, {name: tensor[slot] for name, tensor in self.tensors.items()})
                self.admission.seated(keys)
                yield len(keys)

    def close(self) -> None:
        self._copy.close()
        if self._cpu is not None:
            self._cpu.close()
        self.store.close()
