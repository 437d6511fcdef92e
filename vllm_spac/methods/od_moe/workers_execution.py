"""Execution whose layers belong to expert workers: rows go there, and no expert is kept in this process.

Its store packs experts here and keeps them there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, cast

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.named import named
from vllm_spac.cache.residency import SlotOwners
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape, Step
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.predictors.base import START, Predictor, PredictorInputs
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Room, Rows
from vllm_spac.execution.host.step_routing import StepRouting
from vllm_spac.execution.row_shares import runnable
from vllm_spac.methods.od_moe.client import WorkerClient
from vllm_spac.methods.od_moe.layer_call import Forward
from vllm_spac.methods.od_moe.roster import name as name_of
from vllm_spac.methods.od_moe.wire import Frame, FrameKind, expert_payload
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.execution.exchange import Exchange


_STORE = 60.0  # seconds for a worker to answer
logger = logging.getLogger("vllm.spac")


class WorkerStore(ExpertStore):
    """Sends experts to the workers that serve their layers, and reads them there.

    Args:
        client: the workers; owned, connected here.
    """

    persistent: ClassVar[bool] = True
    offline: ClassVar[str] = "it is taken with --spac-executor processes"

    def __init__(self, shape: MoEShape, fingerprint: str, client: WorkerClient, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self.client, self._connections = client, client.connections
        self._held: dict[int, set[int]] = {}
        self._connections.open()
        self._ask_again()

    def holds(self, key: int) -> bool:
        return all(key in self._held[worker] for worker in self._having(key))

    def reserve(self, experts: int) -> None:
        """Does nothing: each worker has its own disk."""

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        payload = expert_payload(self.shape, tensors)
        for worker in self._having(key):
            if key not in self._held[worker]:
                self._ask(worker, FrameKind.PUT, key, payload)
                self._held[worker].add(key)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        frame = self._ask(self._having(key)[0], FrameKind.FETCH, key)
        if frame.header.kind != FrameKind.EXPERT:
            raise StoreError(f"spac: expert {key} was not given by its worker")
        for name, tensor in frame.expert(self.shape).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def drop(self, key: int) -> None:
        for worker in self._having(key):
            self._ask(worker, FrameKind.DROP, key)
            self._held[worker].discard(key)

    def verify(self, threads: int) -> Iterator[str | None]:
        """Asks the workers again: what one could not read, it holds no more."""
        self._ask_again()
        yield None

    def fill(self) -> None:
        """Completes this machine's copy, and has the workers fill their slots; raises as ``Connections.fill``."""
        self.client.copy.open(self)
        self.client.fill()

    def describe(self) -> str:
        return f"workers: {self.client.describe()}"

    def close(self) -> None:
        self.client.close()

    def _ask_again(self) -> None:
        self._held = {worker: self._connections.held(worker) for worker in self._connections.links}

    def _having(self, key: int) -> tuple[int, ...]:
        return self.client.roster.having(self.shape.split(key)[0])

    def _ask(self, worker: int, kind: FrameKind, key: int, payload: bytes = b"") -> Frame:
        """Asks a worker about an expert; ``StoreError`` if it does not do what it is asked for."""
        try:
            return self._connections.links[worker].ask(kind, _STORE, payload, layer=key)
        except (SpacError, KeyError) as error:
            raise StoreError(f"spac: {name_of(worker)} did not {kind.name} expert {key}: {error}") from error


class WorkerExecution(Execution):
    """Sends the rows of each layer to the worker that serves it, or divides their experts among several.

    Whole rows keep the bits of vLLM's kernel on a CPU; those whose experts are divided are exact up to rounding. So are
    all rows of quantised experts, and of an engine on a GPU: they come to the host with their routing, in one wait for
    the router.

    Args:
        policy: decides nothing here, where there are no slots; each worker has its own.
        store: the workers' experts; owned.
        predictor: what it guesses of layers is told to their workers, which load it ahead. One that counts is asked
            after each step.
        names: experts that a row names, and number of the first layers that they may be of; None: top-k, and all.
        threshold: the lowest score of a predictor that counts of which workers are told.
        exchange: copies rows to the host and results to the device that runs the layers; None on a CPU.
    """

    offline: ClassVar[str] = "it is taken with --spac-executor processes"
    knobs: ClassVar[frozenset[str]] = frozenset({"prefetch"})
    repacks: ClassVar[bool] = True

    def __init__(
        self,
        shape: MoEShape,
        policy: Policy,
        store: WorkerStore,
        predictor: Predictor | None = None,
        names: tuple[int, int] | None = None,
        exchange: Exchange | None = None,
        threshold: int = 1,
    ) -> None:
        self._exchange = exchange
        self.shape, self.store, self._workers, self._client = shape, store, store, store.client
        self.tensors = {name: torch.empty((0, *spec.shape), dtype=spec.dtype) for name, spec in shape.tensors.items()}
        self.counters = Counters()
        self.holds_all = False
        self.keeps_bits = exchange is None and shape.packed is None and not self._client.divides
        self.residency, self.policy = SlotOwners(shape.total, 0), policy
        self._steps = 0
        self._forward = Forward()
        self._filled = False
        self._predictor, self._names = predictor, names or (shape.top_k, len(shape.layers))
        self._inputs: PredictorInputs | None = (
            None  # at the start of the step; None outside, and where nothing is guessed
        )
        self._counting, self._threshold = predictor is not None and not predictor.observes_layers(), threshold
        self._step: Step | None = None  # whose selections are counted
        self._routed = StepRouting(shape, partly=True)
        self.signals = frozenset() if predictor is None or self._counting else predictor.needs

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        settings, shape = context.ahead, context.shape
        predictor = None if settings.prefetch == "off" else settings.build(shape.total)
        names = settings.k or shape.top_k, len(shape.layers) if settings.cutoff is None else settings.cutoff
        store = cast(WorkerStore, context.store)
        return cls(shape, context.policy, store, predictor, names, context.exchange, settings.threshold)

    @classmethod
    def divide(cls, slots: SlotCount, shape: MoEShape, free_bytes: int) -> Room:
        """Takes nothing: the knob ``slots`` is that of each worker."""
        return Room(0, 0)

    def fill(self) -> Iterator[int]:
        """Has the workers fill their slots."""
        self._workers.fill()
        self._filled = True
        yield 0

    def begin_step(self, step: Step) -> None:
        self._steps += 1
        self._forward = Forward(self._steps, step.prompts)
        self.counters.count_step(step.kind)
        self._routed.reset()  # of a forward that failed
        self._step = step if self._counting else None
        guessed = self._predictor is not None and not self._counting and step.requests and not step.prompts
        self._inputs = self._at_start(step.draft) if guessed else None
        if self._inputs is not None:
            self._hint(self._inputs, self._steps)

    def draft(self, read: Tensor) -> None:
        self._hint(self._at_start(read), self._steps + 1)

    def end_forward(self) -> None:
        self._forward, self._inputs = Forward(), None
        step, self._step = self._step, None
        if step is not None:
            self._count(step)

    def _count(self, step: Step) -> None:
        """Tells workers what the counts of ``step`` are worth in the next one, the greatest score first."""
        counts = self._routed.counts(step.generating, step.generating_weights) if self._routed else None
        self._routed.reset()
        if counts is None or self._predictor is None:
            return
        try:
            self._predictor.observe_step(counts)
            scores = self._predictor.scores.reshape(-1, self.shape.experts)
        except Exception:
            self._forget_predictor()
            return
        for layer, own in enumerate(scores):
            if count := np.count_nonzero(own >= self._threshold):
                self._client.send_hint(self._steps + 1, layer, np.argsort(-own, kind="stable")[:count])

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        real = slice(0, rows.real)
        if rows.real == 0:
            return torch.zeros_like(x)
        on_device = x
        if self._exchange is not None:
            x, weights, ids = self._exchange.all_to_host([x[real], weights[real], ids[real]])
        if rows.record is not None:
            rows.record(layer, ids[real], weights[real])
        if self._step is not None:
            self._routed.add(layer, ids[real])
        runs = (ids[real] >= 0).any(1) if rows.cut else None
        if not rows.as_routed:
            ids, weights = runnable(ids, rows.real), weights.masked_fill(ids < 0, 0)
        meanwhile = None
        if self._inputs is not None and self._predictor is not None and self._predictor.reach:
            inputs = PredictorInputs(layer, x[real], ids[real], weights[real])
            meanwhile = partial(self._hint, inputs, self._steps)
        results = self._computed(layer, x[real], weights[real], ids[real], runs, meanwhile)
        if self._exchange is not None:
            results = self._exchange.to_device(results)
        if rows.real == len(on_device):
            return results
        out = torch.zeros_like(on_device)  # padding is not used
        out[real] = results
        return out

    def _computed(
        self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, runs: Tensor | None, meanwhile: Callable | None
    ) -> Tensor:
        """Returns the workers' results; only rows of ``runs``, bool [rows], go to them, if given."""
        if runs is None or runs.all():
            return self._client.compute(self._forward, layer, x, weights, ids, meanwhile)
        out = torch.zeros_like(x)
        out[runs] = self._client.compute(self._forward, layer, x[runs], weights[runs], ids[runs], meanwhile)
        return out

    def _at_start(self, read: Tensor | None) -> PredictorInputs:
        """What is known of a step before its layers, on the host, where the predictor is; waits for the device."""
        if self._exchange is not None and read is not None:
            [read] = self._exchange.all_to_host([read])
        return PredictorInputs(START, draft_ids=read)

    def _hint(self, inputs: PredictorInputs, step: int) -> None:
        """Tells workers what is guessed of their layers in a step; one that has run is guessed for the next step."""
        if self._predictor is None:
            return
        try:
            guesses = list(self._predictor.guesses(inputs))
        except Exception:
            self._forget_predictor()
            return
        for guess in guesses:
            for layer, experts in named(guess, self.shape.experts, self._names[0]):
                if len(experts) and layer != inputs.layer and layer < self._names[1]:
                    self._client.send_hint(step + (layer < inputs.layer), layer, experts)

    def _forget_predictor(self) -> None:
        """After an error of any predictor, also of another package: it moves experts ahead of need, and no more."""
        logger.exception("spac: the predictor of prefetch (--spac-prefetch) failed; workers get no more hints")
        self._predictor = None

    def snapshot(self) -> dict:
        """Returns the counters of all workers together and of each, their slots, and what became of the rows."""
        counts, shares = self._client.counts(), self._client.shares
        return {
            **self.counters.snapshot(),
            **counts,
            "steps": dict(self.counters.steps),
            "worker_rows_elsewhere": shares.elsewhere,
            "worker_answers_dropped": shares.dropped,
        }

    def describe(self) -> str:
        return f"{self._client.slots} slots at the workers"

    def close(self) -> None:
        """Closes the store; one that could not be filled stays open, so that what is damaged is packed again."""
        if self._filled:
            self.store.close()
