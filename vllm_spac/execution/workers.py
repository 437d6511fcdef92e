"""Execution whose layers belong to expert workers: rows go there, and no expert is kept in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Self, cast

import torch
from torch import Tensor

from vllm_spac.cache.residency import Residency
from vllm_spac.core import MoEShape, Step
from vllm_spac.distributed.layer_call import Forward
from vllm_spac.distributed.store import WorkerStore
from vllm_spac.execution._row_shares import runnable
from vllm_spac.execution.base import Execution, ExecutionContext, LayerKernel, Room, Rows
from vllm_spac.metrics import Counters
from vllm_spac.policies.base import Policy

if TYPE_CHECKING:
    from vllm_spac.knobs.types import Slots


class WorkerExecution(Execution):
    """Sends whole rows of each layer to the worker that serves it, so that results keep the bits of vLLM's kernel.

    Args:
        shape: the layers and experts.
        policy: decides nothing here, where there are no slots; each worker has its own.
        store: the workers' experts; owned.
    """

    offline: ClassVar[str] = "it is taken with --spac-executor processes"

    def __init__(self, shape: MoEShape, policy: Policy, store: WorkerStore) -> None:
        self.shape, self.store, self._client = shape, store, store.client
        self.tensors = {name: torch.empty((0, *spec.shape), dtype=spec.dtype) for name, spec in shape.tensors.items()}
        self.counters = Counters()
        self.holds_all = False
        self._residency = Residency(shape.total, 0, policy)
        self._steps = 0
        self._forward = Forward()
        self._filled = False

    @classmethod
    def of(cls, context: ExecutionContext) -> Self:
        return cls(context.shape, context.policy, cast(WorkerStore, context.store))

    @classmethod
    def divide(cls, slots: Slots, staging: str, shape: MoEShape, free_bytes: int) -> Room:
        """Takes nothing: the knob ``slots`` is that of each worker."""
        return Room(0, False, 0)

    @property
    def residency(self) -> Residency:
        return self._residency

    def fill(self) -> Iterator[int]:
        """Has the workers fill their slots."""
        self._client.fill()
        self._filled = True
        yield 0

    def begin_step(self, step: Step) -> None:
        self._steps += 1
        self._forward = Forward(self._steps, step.prompts)
        self.counters.began(step.kind)

    def end_forward(self) -> None:
        self._forward = Forward()

    def forward(self, layer: int, x: Tensor, weights: Tensor, ids: Tensor, kernel: LayerKernel, rows: Rows) -> Tensor:
        real = slice(0, rows.real)
        if rows.record is not None:
            rows.record(layer, ids[real], weights[real])
        if rows.real == 0:
            return torch.zeros_like(x)
        if not rows.as_routed:
            ids, weights = runnable(ids, rows.real), weights.masked_fill(ids < 0, 0)
        found = self._client.compute(self._forward, layer, x[real], weights[real], ids[real])
        if rows.real == len(x):
            return found
        out = torch.zeros_like(x)  # padding is not used
        out[real] = found
        return out

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
