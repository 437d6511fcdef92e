"""Measures the host's own work in a layer over slots: to decide, to divide, to submit, to wait, to combine.

A ``SlotExecution`` serves rows that miss a given number of experts, over experts so small that loads and kernels take
no time. Before each layer as much memory is copied as caches hold, because the rest of a model's layer displaces there
what the decisions read: in a loop of their own they take a fraction of the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, Rates, RequestRows, RowKind, Step
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.decisions.balancers.waterfill import Waterfill
from vllm_spac.decisions.costs import WIDTH, ExpertSize, HostWork, fit_host_work
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.execution.base import ExecutionContext, Rows
from vllm_spac.execution.host.slots_execution import SlotExecution
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.storage.host import HostStore
from vllm_spac.system.machine import reset_affinity

LAYERS, EXPERTS, TOP_K = 16, 64, 8  # of the layers that are measured: OLMoE's
MEASUREMENTS = 4
HOST_WORK = "host work"  # of a profile's points
_SHARE = 4  # one expert of so many has a slot
_MISSED = (1, 2, 4)  # experts that a layer misses
_CACHES = 8 << 20  # bytes that are copied before each layer
_REPEATS = 5  # at least
_RESIDENT, _LOADING, _DIVIDING, _LOADS = (
    f"{HOST_WORK}: {what}"
    for what in ("all experts in slots", "experts that are loaded", "experts left to the CPU", "loads alone")
)
_ON_CPU = Rates(fast=0.0, stream=1e9, cpu=0.0)  # of which a balancer concludes that the CPU computes all that miss

Points = dict[int, float]


def measure_host_work(
    device: torch.device, io_threads: int, seconds: float, announce: Callable[[str], object] = lambda text: None
) -> dict[str, Points]:
    """Returns median seconds, by what was measured and by the number of experts.

    Args:
        seconds: approximate duration of each of the ``MEASUREMENTS`` measurements.
    """
    points = {}
    every, some = LAYERS * EXPERTS, LAYERS * EXPERTS // _SHARE
    announce("host: layers that miss nothing")
    with closing(LayerTimer(every, device, io_threads)) as timer:
        points[_RESIDENT] = timer.seconds((0,), seconds)
    with closing(LayerTimer(some, device, io_threads)) as timer:
        announce("host: layers that load")
        points[_LOADING] = timer.seconds((0, *_MISSED), seconds)
        timer.start_dividing()
        announce("host: layers that are divided")
        points[_DIVIDING] = timer.seconds(_MISSED, seconds)
    announce("host: loads of no size")
    points[_LOADS] = _loads(device, io_threads, seconds)
    return points


def host_work(points: Mapping[str, Points]) -> HostWork:
    """Returns what the ``points`` of ``measure_host_work`` amount to."""
    return fit_host_work(points[_RESIDENT][0], points[_LOADING], points[_LOADS], points[_DIVIDING])


class _NoKernel:
    """A kernel of layers that takes no time."""

    activation = "silu"
    takes_slots, by_expert = True, False

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        return torch.empty_like(x)


class _NoExperts(CpuExperts):
    """CPU experts that take no time, on the cores that also read experts."""

    def prepare(self, experts: Mapping[str, Tensor]) -> None:
        reset_affinity()

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        return torch.empty_like(x)

    def describe(self) -> str:
        return "none"


class LayerTimer:
    """Times layers over slots whose experts take no time."""

    def __init__(self, slots: int, device: torch.device, io_threads: int) -> None:
        self._device, store = device, _filled()
        self.shape, tensors = store.shape, allocate(store.shape.tensors, slots, device)
        self.execution = SlotExecution(
            ExecutionContext(self.shape, slots, Reuse(), store, tensors, io_threads=io_threads, path="host")
        )
        for _ in self.execution.fill():
            pass
        self._row = torch.zeros(1, WIDTH, dtype=torch.bfloat16, device=device)
        self._weights = torch.full((1, TOP_K), 1 / TOP_K, device=device)
        self._rng = np.random.default_rng(0)

    def start_dividing(self) -> None:
        """From now on the CPU computes what layers miss."""
        balancer = Waterfill(admit=False, rates=_ON_CPU, layers=LAYERS, top_k=TOP_K)
        self.execution.attach_balancer(balancer, ExecutorThread(_NoExperts(self.shape, 1, "silu"), [{}]))

    def seconds(self, missed: Sequence[int], seconds: float) -> Points:
        """Returns the median seconds of a layer by the experts that it misses; all are measured in turns."""
        times_of: dict[int, list[float]] = {count: [] for count in missed}
        begin = time.perf_counter()
        while min(map(len, times_of.values())) < _REPEATS or time.perf_counter() - begin < seconds:
            for count, times in times_of.items():
                times += self.step(count)
        return {count: statistics.median(times) for count, times in times_of.items()}

    def close(self) -> None:
        """Stops the threads."""
        self.execution.close()

    def step(self, missed: int, layers: int = LAYERS) -> list[float]:
        """Runs a step of ``layers`` layers that miss ``missed`` experts; returns the seconds of each.

        A layer that has too few slots at the moment, or too many, is left out.
        """
        times, kernel, rows = [], _NoKernel(), Rows(1, as_routed=True)
        self.execution.begin_step(Step((RequestRows(0, 1, RowKind.DECODE),)))
        for layer in range(layers):
            ids = self._chosen(layer, missed)
            if ids is None:
                continue
            _displace()
            start = time.perf_counter()
            self.execution.forward(layer, self._row, self._weights, ids, kernel, rows)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - start)
        self.execution.end_forward()
        return times

    def _chosen(self, layer: int, missed: int) -> Tensor | None:
        """Returns experts of a layer of which ``missed`` have no slot, int32 [1, top_k]; None if there are too few."""
        slots = self.execution.residency.slot_of[layer * EXPERTS : (layer + 1) * EXPERTS]
        near, far = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
        if len(near) < TOP_K - missed or len(far) < missed:
            return None
        chosen = *self._rng.choice(near, TOP_K - missed, replace=False), *self._rng.choice(far, missed, replace=False)
        return torch.tensor([chosen], dtype=torch.int32)


def _loads(device: torch.device, io_threads: int, seconds: float) -> Points:
    """Returns, by the number of loads that start together, the seconds until all have finished."""
    store, turn = _filled(), iter(range(1 << 62))
    times_of: dict[int, list[float]] = {count: [] for count in _MISSED}
    slots = allocate(store.shape.tensors, max(_MISSED), device)
    with closing(store), closing(Transfers(store, slots, io_threads, "host")) as transfers:
        begin = time.perf_counter()
        while len(times_of[_MISSED[0]]) < _REPEATS or time.perf_counter() - begin < seconds:
            for count, times in times_of.items():
                loads = [(next(turn) % store.shape.total, slot) for slot in range(count)]
                _displace()
                start = time.perf_counter()
                failed = transfers.load(loads, None)
                transfers.finish()
                times.append(time.perf_counter() - start)
                for error in failed.values():
                    raise error
    return {count: statistics.median(times) for count, times in times_of.items()}


def _filled() -> ExpertStore:
    """Returns a store of the smallest experts there are."""
    one = ExpertSize(WIDTH, WIDTH).shape(EXPERTS)
    store = HostStore(MoEShape(tuple(map(str, range(LAYERS))), EXPERTS, TOP_K, one.tensors), "")
    zeros = {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in one.tensors.items()}
    for key in range(store.shape.total):
        store.put(key, zeros)
    return store


def _displace() -> None:
    """Copies as much memory as caches hold."""
    source, target = _memory()
    np.copyto(target, source)


@cache
def _memory() -> tuple[np.ndarray, np.ndarray]:
    return np.ones(_CACHES, np.uint8), np.ones(_CACHES, np.uint8)
