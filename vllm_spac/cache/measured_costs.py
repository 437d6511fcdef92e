"""Measures the rates that a balancer weighs at engine start, with the engine's own experts, kernels and threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, Rates
from vllm_spac.cpu_kernels._thread import ExecutorThread
from vllm_spac.decisions.costs import fit_compute
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.system.timing import ROWS, median, median_of


class RowsStore(ExpertStore):
    """Rows of host memory as the experts of one layer, to measure how fast these are loaded and computed."""

    addressable: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, rows: Mapping[str, Tensor]) -> None:
        """``rows``: name -> [rows, ...], of which as many are experts as a layer has at most."""
        self._rows = {name: tensor[: shape.experts] for name, tensor in rows.items()}
        count = min(len(tensor) for tensor in self._rows.values())
        super().__init__(replace(shape, layers=("rows",), experts=count), "")

    def holds(self, key: int) -> bool:
        return True

    def reserve(self, experts: int) -> None: ...

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        raise StoreError("spac: rows that are measured are read only")

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for name, tensor in into.items():
            tensor.copy_(self._rows[name][key])
        return self.shape.expert_bytes

    def view(self, key: int) -> Mapping[str, Tensor]:
        return {name: rows[key] for name, rows in self._rows.items()}

    def layer(self, number: int) -> Mapping[str, Tensor]:
        return self._rows

    def describe(self) -> str:
        return "host memory before a disk"


def serving_rates(
    store: ExpertStore,
    group: ExecutorThread,
    fast: Callable[[], object],
    *,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    io_threads: int,
    seconds: float = 0.1,
) -> Rates:
    """Measures the rates that a balancer weighs, in the engine that will serve.

    Args:
        store: holds every expert, in memory.
        group: computes on the CPU; measured while nothing else runs.
        fast: runs one row through ``shape.top_k`` experts in fast memory.
        device: of fast memory; ``shape.top_k`` more experts must fit there during the measurement.
        seconds: approximate duration of each of the five measurements.
    """
    shape, turn = store.shape, iter(range(1 << 62))
    x = torch.randn(ROWS[-1], hidden, generator=torch.Generator().manual_seed(0)).to(dtype)

    def compute(rows: int) -> None:
        layer, expert = shape.split(next(turn) % shape.total)
        ids = torch.full((rows, 1), expert, dtype=torch.int32)
        experts = store.layer(layer)
        assert experts is not None, "a store in memory"
        with group.computing(x[:rows], torch.ones(rows, 1, dtype=torch.float32), ids, experts) as computation:
            computation.result()

    with loads(store, shape.top_k, device, io_threads) as load:
        stream = median(load, seconds) / shape.top_k
        memory = shared_seconds(store, group, x[:1], load, shape.top_k, seconds)
    cpu = fit_compute({rows: median(partial(compute, rows), seconds) for rows in (1, ROWS[-1])}, 1, fixed=0.0)
    return Rates(
        fast=fast_seconds(fast, shape.top_k, device, seconds),
        stream=stream,
        cpu=float(cpu.seconds(1)),
        cpu_row=1 / cpu.flops_per_second if cpu.flops_per_second else 0.0,
        memory=memory,
    )


def fast_seconds(fast: Callable[[], object], experts: int, device: torch.device, seconds: float) -> float:
    """Returns the seconds per expert of ``fast``, which runs one row through ``experts`` in fast memory."""

    def synchronized() -> None:
        fast()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return median(synchronized, seconds) / experts


def shared_seconds(
    store: ExpertStore, group: ExecutorThread, x: Tensor, load: Callable[[], None], count: int, seconds: float
) -> float:
    """Returns ``Rates.memory``: the seconds per expert, loaded or computed, while the CPU computes whole layers.

    Args:
        x: a row, [1, hidden].
        load: loads ``count`` experts.
        seconds: approximate duration.
    """
    shape, turn = store.shape, iter(range(1 << 62))
    every = torch.arange(shape.experts, dtype=torch.int32)[None]

    def both() -> float:
        experts, loaded, begin = store.layer(next(turn) % len(shape.layers)), 0, time.perf_counter()
        assert experts is not None, "a store in memory"
        with group.computing(x, torch.ones(every.shape), every, experts) as computation:
            while not computation.done:
                load()
                loaded += count
            computation.result()
        return (time.perf_counter() - begin) / (shape.experts + loaded)

    return median_of(both, seconds)


@contextmanager
def loads(store: ExpertStore, count: int, device: torch.device, io_threads: int) -> Iterator[Callable[[], None]]:
    """Context with a function that loads ``count`` experts together; other arguments as in ``serving_rates``."""
    shape, settled = store.shape, set(store.settled)
    turn = cycle(key for key in range(shape.total) if key not in settled)
    transfers = Transfers(store, allocate(shape.tensors, count, device), io_threads, "profile")

    def load() -> None:
        for error in transfers.load([(next(turn), slot) for slot in range(count)], None).values():
            raise error
        transfers.finish()

    try:
        yield load
    finally:
        transfers.close()
