"""Measures the costs of experts on this machine with the serving code.

Random experts of the size in question are written to a temporary folder, read, copied, computed, and removed.
A measurement is the median of its repeats.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import psutil
import torch
from torch import Tensor

from vllm_spac.cache.measured_costs import loads, shared_seconds
from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.cpu_kernels._library import missing
from vllm_spac.cpu_kernels._thread import ExecutorThread, threads_of
from vllm_spac.cpu_kernels.simd import Simd
from vllm_spac.decisions.costs import (
    FORMAT,
    WIDTH,
    Capacity,
    Costs,
    ExpertSize,
    Provenance,
    Rate,
    fit_compute,
    fit_load,
)
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.execution.address_table import kernels_for
from vllm_spac.integration.hooks.device import request_amx
from vllm_spac.storage.base import ExpertStore, allocate
from vllm_spac.storage.disk import DiskStore
from vllm_spac.storage.host import HostStore
from vllm_spac.system.files import LockFile, prepare_folder
from vllm_spac.system.host_memory import available_host_bytes, gib
from vllm_spac.system.machine import Machine
from vllm_spac.system.timing import ROWS, median
from vllm_spac.tools.machine.host_work import EXPERTS, LAYERS, MEASUREMENTS, TOP_K, host_work, measure_host_work

_POOL_BYTES = 256 << 20  # of experts used in rotation: more than caches hold
_MOST_EXPERTS = 128
_TINY = WIDTH  # hidden and intermediate size of an expert whose bytes take no time

Announce = Callable[[str], object]


@dataclass(frozen=True)
class Kernel:
    """A kernel that computes experts on the CPU or GPU.

    ``prepare`` takes w13 [experts, 2 * intermediate, hidden] and w2 [experts, hidden, intermediate], and returns a
    function that runs rows: x [rows, hidden], weights [rows, 1] float32, ids [rows, 1] int32.
    """

    name: str
    prepare: Callable[[Tensor, Tensor], Callable[[Tensor, Tensor, Tensor], object]]


def measure(
    nbytes: int,
    folder: Path,
    *,
    store: Literal["host", "disk"] | None = None,
    io_threads: int = 4,
    seconds: float = 0.5,
    kernel: Kernel | None = None,
    source: str = "vllm_spac.tools.machine.measure.measure",
    announce: Announce = lambda text: None,
) -> Costs:
    """Measures this machine with experts of about ``nbytes``.

    Args:
        folder: on the disk where packed experts will be stored; files written there are removed.
        store: the store that ``Costs.load`` describes; default as in serving: host where there is a GPU, else disk.
        io_threads: reads in flight at once, in addition to the caller's own.
        seconds: approximate duration of each of the ``measurements(io_threads)`` measurements.
        kernel: computes on the CPU; the torch reference unless given.

    Raises:
        ConfigError: the experts are too small to be measured.
        StoreError: there is no room for them.
    """
    size, gpu, kernel = ExpertSize.of(nbytes), torch.cuda.is_available(), kernel or _REFERENCE
    device = torch.device("cuda" if gpu else "cpu")
    kinds = _kinds(store)
    points = {
        f"{name} reads at once": _loads(kind, size, folder, device, io_threads, seconds, announce)
        for name, kind in kinds.items()
    }
    announce("memory to memory")
    points["memory copy of bytes"] = {size.nbytes: _copy(size.nbytes, seconds)}
    points["CPU expert by rows"], fixed = _computes(size, torch.device("cpu"), kernel, seconds, announce)
    cpu = fast = fit_compute(points["CPU expert by rows"], size.nbytes, fixed)
    if gpu:
        points["GPU expert by rows"], fixed = _computes(size, device, _TRITON, seconds, announce)
        fast = fit_compute(points["GPU expert by rows"], size.nbytes, fixed)
    memory = None
    if _shares_memory(store):
        each = host_memory(size, folder, device, io_threads, seconds, announce)
        points["host memory of an expert, link and CPU"] = {size.nbytes: each}
        memory = size.nbytes / each
    points |= measure_host_work(device, io_threads, seconds, announce)
    store = store or ("host" if gpu else "disk")
    load = fit_load(points[f"{store} reads at once"], size.nbytes)
    host = disk = None
    if store == "host":
        disk = fit_load(points["disk reads at once"], size.nbytes)
    if store == "disk":  # on a machine without a GPU, a load from host memory is a copy
        copied = Rate(bytes_per_second=size.nbytes / points["memory copy of bytes"][size.nbytes])
        host = fit_load(points["host reads at once"], size.nbytes) if gpu else copied
    origin = _provenance(source, size, store, kernel, folder, points)
    return Costs(
        format=FORMAT, name="here", provenance=origin, fast=fast, load=load, host=host, disk=disk, cpu=cpu,
        memory=memory, capacity=_capacity(gpu), load_at_once=io_threads + 1,
        host_work=host_work(points),
    )  # fmt: skip


def _capacity(gpu: bool) -> Capacity:
    host = psutil.virtual_memory().total
    if not gpu:
        return Capacity(host=host)
    total, capability = torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_capability(0)
    return Capacity(gpu=total, host=host, capability=capability)


def _provenance(
    source: str, size: ExpertSize, store: str, kernel: Kernel, folder: Path, points: dict[str, dict[int, float]]
) -> Provenance:
    return Provenance(
        how="measured",
        source=source,
        assumes=(
            f"experts of {size.nbytes} bytes (bfloat16); other sizes are calculated from them",
            f"loads come from {store}; {torch.get_num_threads()} threads compute on the CPU, with {kernel.name}",
            "seconds per draft token and outside of experts are left out: they depend on the model",
            f"host work: of one row over {LAYERS} layers of {EXPERTS} experts, top-{TOP_K}, a quarter of them in slots",
        ),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=Machine.here(folder),
        versions={"python": platform.python_version(), "torch": torch.__version__, "vllm-spac": version("vllm-spac")},
        points=points,
        expert_bytes=size.nbytes,
        store=store,
    )


def measurements(io_threads: int, store: Literal["host", "disk"] | None = None) -> int:
    """Returns how often ``measure`` calls ``announce``."""
    processors = 1 + torch.cuda.is_available()
    reads = len(_kinds(store)) * (1 + len(_in_flight(io_threads)))
    return reads + 1 + _shares_memory(store) + processors * (1 + len(ROWS)) + MEASUREMENTS


def _shares_memory(store: str | None) -> bool:
    """Whether loads and CPU experts read host memory at once, and there is a kernel for the latter."""
    return torch.cuda.is_available() and store != "disk" and not missing()


def _kinds(store: str | None) -> dict[str, type[ExpertStore]]:
    """Returns the stores to measure: the disk always, host memory if it is not fast memory itself or was requested."""
    kinds: dict[str, type[ExpertStore]] = {"disk": DiskStore}
    if store == "host" or torch.cuda.is_available():
        kinds["host"] = HostStore
    return kinds


def _in_flight(threads: int) -> list[int]:
    return list(range(1, threads + 2))


def _loads(
    kind: type[ExpertStore],
    size: ExpertSize,
    folder: Path,
    device: torch.device,
    threads: int,
    seconds: float,
    announce: Announce,
) -> dict[int, float]:
    """Returns, by the number of loads that start together, the seconds until all have finished."""
    name = "disk" if kind is DiskStore else "host"
    announce(f"{name}: writing experts")
    with _packed(kind, size, folder, threads + 1) as store:
        slots = allocate(store.shape.tensors, threads + 1, device)
        transfers = Transfers(store, slots, threads, name)
        seconds_of, turn = {}, 0

        def load(count: int) -> None:
            nonlocal turn
            keys = [(turn + index) % store.shape.total for index in range(count)]
            turn += count
            for error in transfers.load(list(zip(keys, range(count), strict=True)), None).values():
                raise error
            transfers.finish()

        try:
            for key in range(store.shape.total):  # warm-up; also opens files that stay open
                for error in transfers.load([(key, 0)], None).values():
                    raise error
            for count in _in_flight(threads):
                announce(f"{name}: {count} at once")
                seconds_of[count] = median(partial(load, count), seconds)
        finally:
            transfers.close()
    return seconds_of


_SCRATCH, _HELD = ".profile-", "lock"


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Context with a new folder in ``folder``, which is removed at its end, or by the next one if it was killed."""
    prepare_folder(folder)
    for left in folder.glob(f"{_SCRATCH}*"):
        _remove_left(left)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=folder) as name, closing(LockFile(Path(name, _HELD))) as lock:
        if not (lock.take() and Path(name, _HELD).exists()):  # found by ``_remove_left`` before it was held
            raise StoreError(f"spac: another vllm-spac check --measure has removed {name} while it was made; try again")
        yield Path(name)


def _remove_left(scratch: Path) -> None:
    """Removes the scratch folder of a process that has ended: the system has released its lock, on any machine."""
    if scratch.is_symlink() or scratch.lstat().st_uid != os.geteuid():
        return
    try:
        lock = LockFile(scratch / _HELD, read_only=True)
    except OSError:  # it has just been made, or is removed right now, or is none
        return
    with closing(lock):
        if lock.take():
            shutil.rmtree(scratch)


@contextmanager
def _packed(kind: type[ExpertStore], size: ExpertSize, folder: Path, least: int) -> Iterator[ExpertStore]:
    experts = max(2 * least, min(_MOST_EXPERTS, _POOL_BYTES // size.nbytes))
    with _scratch(folder) as scratch:
        store = kind(size.shape(experts), "profile", scratch)
        try:
            store.reserve(experts)
            rng = torch.Generator().manual_seed(0)
            for key in range(experts):
                store.put(key, _expert(size, rng))
            yield store
        finally:
            store.close()


def _expert(size: ExpertSize, rng: torch.Generator) -> dict[str, Tensor]:
    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=rng, dtype=torch.float32).div_(columns**0.5).bfloat16()

    return {
        "w13_weight": normal(2 * size.intermediate, size.hidden),
        "w2_weight": normal(size.hidden, size.intermediate),
    }


def _copy(nbytes: int, seconds: float) -> float:
    count = _turns(nbytes)
    source = np.ones((count, nbytes), np.uint8)
    target, turn = np.ones_like(source), iter(range(1 << 62))
    return median(lambda: np.copyto(target[(at := next(turn) % count)], source[at]), seconds)


def host_memory(
    size: ExpertSize, folder: Path, device: torch.device, io_threads: int, seconds: float, announce: Announce
) -> float:
    """Returns the seconds per expert, loaded to ``device`` or computed on the CPU, while both read host memory."""
    announce("host: loads and CPU experts at once")
    count = io_threads + 1
    with _packed(HostStore, size, folder, count) as store:
        group = ExecutorThread(Simd(store.shape, threads_of(device), "silu"))
        try:
            with loads(store, count, device, io_threads) as load:
                return shared_seconds(store, group, torch.randn(1, size.hidden).bfloat16(), load, count, seconds)
        finally:
            group.close()


def _computes(
    size: ExpertSize, device: torch.device, kernel: Kernel, seconds: float, announce: Announce
) -> tuple[dict[int, float], float]:
    """Returns the seconds of an expert by rows, with its weights in no cache, and those of an almost empty expert."""
    announce(f"{device.type}: an empty expert")
    fixed = _compute(ExpertSize(_TINY, _TINY), device, kernel, 1, 1, seconds)
    seconds_of = {}
    for rows in ROWS:
        announce(f"{device.type}: {rows} rows")
        seconds_of[rows] = _compute(size, device, kernel, rows, _turns(size.nbytes), seconds)
    return seconds_of, fixed


def _compute(size: ExpertSize, device: torch.device, kernel: Kernel, rows: int, count: int, seconds: float) -> float:
    one = _expert(size, torch.Generator().manual_seed(0))
    run_rows = kernel.prepare(*(one[name].to(device).repeat(count, 1, 1) for name in ("w13_weight", "w2_weight")))
    x = torch.randn(rows, size.hidden).bfloat16().to(device)
    weights = torch.ones(rows, 1, device=device)
    ids = [torch.full((rows, 1), index, dtype=torch.int32, device=device) for index in range(count)]
    turn = iter(range(1 << 62))

    def run() -> None:
        run_rows(x, weights, ids[next(turn) % count])
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    return median(run, seconds)


def _by_address(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], object]:
    """``Kernel.prepare`` of the grouped GEMM over tables of addresses, or of its torch twin on a CPU."""
    grouped_gemm = kernels_for(w13.device).grouped_gemm
    tables = [torch.tensor([expert.data_ptr() for expert in experts], device=w13.device) for experts in (w13, w2)]

    def run(x: Tensor, weights: Tensor, ids: Tensor, keep: tuple = (w13, w2)) -> Tensor:  # the tables own nothing
        return grouped_gemm(x, *tables, weights, ids, w2.shape[2])

    return run


_REFERENCE, _TRITON = Kernel("the torch reference", _by_address), Kernel("Triton", _by_address)


def compiled(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], object]:
    """``Kernel.prepare`` of ``cpu_kernels.simd``, in as many threads as beside a GPU."""
    experts = {"w13_weight": w13, "w2_weight": w2}
    tensors = {name: TensorSpec(tuple(each.shape[1:]), each.dtype) for name, each in experts.items()}
    simd = Simd(MoEShape(("profile",), len(w2), 1, tensors), threads_of(torch.device("cuda")), "silu")

    def run(x: Tensor, weights: Tensor, ids: Tensor) -> None:
        simd.run(x, weights, ids, experts)

    weakref.finalize(run, simd.close)
    return run


def cpu_kernel() -> Kernel | None:
    """The kernel of CPU experts here: ours beside a GPU, else vLLM's fused one; None: neither was compiled."""
    if torch.cuda.is_available():
        return None if missing() else Kernel("compiled kernels", compiled)
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        return None
    request_amx()
    special = (cpu_moe.X86CPUUnquantizedExperts, cpu_moe.ArmCPUUnquantizedExperts, cpu_moe.PowerCPUUnquantizedExperts)
    isa = next((cls.isa for cls in special if cls._supports_current_device()), cpu_moe.CPUUnquantizedExperts.isa)

    def prepare(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], object]:
        w13, w2 = (ops.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2))

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> None:
            ops.cpu_fused_moe(torch.empty_like(x), x, w13, w2, None, None, weights, ids, "silu", isa)

        return run

    return Kernel(f"vLLM's fused MoE kernel ({isa})", prepare)


def _turns(nbytes: int) -> int:
    """Returns how many experts are used in rotation; raises ``ConfigError`` if two copies do not fit in memory."""
    count = max(2, min(_MOST_EXPERTS, _POOL_BYTES // nbytes))
    needed, free = 2 * count * nbytes, available_host_bytes()
    if needed > free:
        raise ConfigError(f"measuring needs {gib(needed)} of memory, {gib(free)} are free; stop something else first")
    return count
