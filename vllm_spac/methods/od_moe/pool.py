"""The experts of some layers over slots of their own: what a worker computes with, without vLLM's model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.residency import NOWHERE
from vllm_spac.cache.sizing import resolve
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.decisions.policies.base import PolicyContext
from vllm_spac.decisions.predictors.base import Guess, Predictor, PredictorInputs
from vllm_spac.errors import SpacError
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.methods.od_moe.layer_call import Forward
from vllm_spac.methods.od_moe.wire import Service, Speed
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.system.timing import median

_MANY_ROWS = 64  # at which an expert's arithmetic takes its time
_MEASURED = 0.01  # seconds per measurement


class SomeLayers(ExpertStore):
    """Some layers of a store, numbered from 0. Closing it closes the store.

    Args:
        store: of all layers; owned.
        layers: numbers of the layers, ascending.
    """

    def __init__(self, store: ExpertStore, layers: Sequence[int]) -> None:
        names = tuple(store.shape.layers[layer] for layer in layers)
        whole = store.shape
        super().__init__(MoEShape(names, whole.experts, whole.top_k, whole.tensors, whole.packed), store.fingerprint)
        self._store, self._layers = store, tuple(layers)

    def holds(self, key: int) -> bool:
        return self._store.holds(self._key(key))

    def reserve(self, experts: int) -> None:
        self._store.reserve(experts)

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        self._store.put(self._key(key), tensors)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        return self._store.read(self._key(key), into)

    @property
    def retries(self) -> int:
        return self._store.retries

    def describe(self) -> str:
        return self._store.describe()

    def close(self) -> None:
        self._store.close()

    def _key(self, key: int) -> int:
        layer, expert = self.shape.split(key)
        return self._store.shape.key(self._layers[layer], expert)


class _PoolKernel:
    """The kernel of one layer as a ``LayerKernel``, over ``tensors``: the slots, or the layer's own experts."""

    takes_slots, by_expert = True, False

    def __init__(self, kernel: Kernel, activation: str, tensors: Mapping[str, Tensor]) -> None:
        self._kernel, self.activation, self._tensors = kernel, activation, tensors

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        return self._kernel(x, weights, ids, self._tensors).to(x.dtype)


class _Hinted(Predictor):
    """The engine's hints: they come between layers, by ``ExpertPool.hint``, and not when this is asked."""

    needs = frozenset()

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        return ()


class _SomeSlots(SlotExecution):
    """Slots of some of a model's layers: others, which run elsewhere, come between two of them."""

    def prefetch(self, layer: int, experts: np.ndarray) -> None:
        """Reads ahead ``experts`` (int, distinct, likeliest first) for the next run of ``layer``; between layers."""
        if not self.holds_all:
            self._loader.prefetcher.prefetch(layer, experts)

    def end_layer(self) -> None:
        """The layer that ran last has its output."""
        if not self.holds_all:
            self._loader.end_layer()


class ExpertPool:
    """Residency, policy, loads and kernel of some layers. Called by one thread.

    Args:
        store: has the experts of ``service.own_layers``; owned.
        kernel: computes experts in the layout of the store.

    Raises:
        ConfigError: the slots do not fit, or are too few.
        StoreError: an expert cannot be read.
    """

    def __init__(self, service: Service, store: ExpertStore, kernel: Kernel, free_bytes: int) -> None:
        view = SomeLayers(store, service.own_layers)
        self.shape = shape = view.shape
        self._number = {layer: index for index, layer in enumerate(service.own_layers)}
        slots = resolve(SlotCount.parse(service.slots), shape, free_bytes)
        kind = components.find("policies", service.policy)
        policy = components.build("policies", service.policy, kind.of, context=PolicyContext(slots, shape.top_k, None))
        tensors = allocate(shape.tensors, slots, "cpu")
        loads = {name: getattr(service, name) for name in ("extra", "depth", "background")}
        ahead = PrefetchSettings(prefetch="hints", built=_Hinted(), **loads) if service.hints else PrefetchSettings()
        everything = torch.arange(shape.experts) if service.divides else None  # rows come with some of their experts
        context = ExecutionContext(
            shape, slots, policy, view, tensors, path="disk", io_threads=service.io_threads, ahead=ahead,
            local_of=everything,
        )  # fmt: skip
        self._execution = _SomeSlots(context)
        self._divides = service.divides
        own = (slice(i * shape.experts, (i + 1) * shape.experts) for i in range(len(shape.layers)))
        parts = own if self._execution.holds_all else [slice(None)] * len(shape.layers)
        self._kernels = [
            _PoolKernel(kernel, service.activation, {name: tensor[part] for name, tensor in tensors.items()})
            for part in parts
        ]
        self._hidden = service.hidden
        self._step = 0
        self._ran = 0, -1  # step and layer of the last rows
        self._hinted: dict[int, int] = {}  # layer -> sequence of the last hint about it
        self._hints = 0
        self._name, self._calls, self._rows, self._seconds = secrets.token_hex(8), 0, 0, 0.0
        start = time.perf_counter()
        try:
            for _ in self._execution.fill():
                pass
        except BaseException:
            self._execution.close()
            raise
        self._load = (time.perf_counter() - start) / slots
        self._execution.counters.reset()

    def speed(self, dtype: torch.dtype) -> Speed:
        """Measures how fast this pool computes; ``load`` is that of the start."""
        hidden, top_k = self._hidden, self.shape.top_k
        ids, kernel = torch.arange(top_k, dtype=torch.int32), self._kernels[0]

        def seconds(rows: int) -> float:
            x, weights = torch.zeros(rows, hidden, dtype=dtype), torch.ones(rows, top_k, dtype=torch.float32)
            chosen = ids.expand(rows, -1).contiguous()
            return median(lambda: kernel(x, weights, chosen), _MEASURED) / top_k

        return Speed(expert=seconds(1), row=seconds(_MANY_ROWS) / _MANY_ROWS, load=self._load)

    def resident(self) -> np.ndarray:
        """Returns whether each expert of ``service.own_layers`` has a slot, bool, by layer."""
        return self._execution.residency.slot_of != NOWHERE

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._execution.residency.slots

    def run(self, forward: Forward, layer: int, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """Computes rows of a layer; returns [rows, hidden] like ``x``.

        Args:
            forward: the step; one with another number than the last begins a step.
            layer: number of the layer in the model, one of ``service.own_layers``; of others, ``SpacError``.
            x: [rows, hidden].
            weights: [rows, top_k] float32.
            ids: int32 [rows, top_k], experts of the layer. Where a group divides experts: up to ``top_k`` of them, and
                -1 where a row has fewer than others.
        """
        number = self._number.get(layer)
        if number is None:
            raise SpacError(f"spac: layer {layer} is not served here")
        several = range(1, self.shape.top_k + 1) if self._divides else (self.shape.top_k,)
        least = NOWHERE if self._divides else 0
        if ids.shape[1] not in several or int(ids.min()) < least or int(ids.max()) >= self.shape.experts:
            raise SpacError(f"spac: rows with experts that layer {layer} does not have")
        start = time.perf_counter()
        self._begin(forward, len(x))
        out = self._execution.forward(number, x, weights, ids, self._kernels[number], Rows(len(x), as_routed=True))
        self._execution.end_layer()
        self._ran = forward.number, layer
        self._calls, self._rows = self._calls + 1, self._rows + len(x)
        self._seconds += time.perf_counter() - start
        return out

    def hint(self, step: int, layer: int, sequence: int, experts: np.ndarray) -> bool:
        """Reads ahead what a layer will probably need; returns whether the hint was in time, and newer than others.

        Args:
            step: number of the forward in which the layer runs next.
            layer: number of the layer in the model, one of ``service.own_layers``; of others, ``SpacError``.
            sequence: greater than those of earlier hints.
            experts: int64 [n], experts of the layer, the likeliest first.
        """
        number = self._number.get(layer)
        if number is None:
            raise SpacError(f"spac: a hint about layer {layer}, which is not served here")
        if experts.min() < 0 or experts.max() >= self.shape.experts or len(set(experts.tolist())) < len(experts):
            raise SpacError(f"spac: a hint with experts that layer {layer} does not have, or twice")
        if (step, layer) <= self._ran or sequence <= self._hinted.get(layer, 0):
            return False
        self._hinted[layer] = sequence
        self._hints += 1
        self._execution.prefetch(number, experts)
        return True

    def counts(self) -> dict[str, Any]:
        """Returns the counters, the sizes of fast memory, and a name for this pool, as plain data.

        ``calls`` and ``rows`` of ``run``, ``compute_seconds`` in it, waits for loads among them, and ``hints`` in time.
        """
        sizes = {"slots": self.slots, "slot_bytes": self.slots * self.shape.expert_bytes}
        ran = {"calls": self._calls, "rows": self._rows, "compute_seconds": self._seconds, "hints": self._hints}
        resident = self._execution.residency.resident
        return {"pool": self._name, **sizes, **ran, "resident": resident, **self._execution.snapshot()}

    def close(self) -> None:
        """Stops threads and closes the store."""
        self._execution.close()

    def _begin(self, forward: Forward, rows: int) -> None:
        if forward.number == self._step:
            return
        if self._step:
            self._execution.end_forward()
        self._step = forward.number
        if self._step:
            kind = RowKind.PREFILL if forward.prompts else RowKind.DECODE
            self._execution.begin_step(Step((RequestRows(0, rows, kind),)))
