"""Compares two ways to read a layer's missing experts from disk: the plugin's threads, and io_uring.

Batches of packed experts are read into slots and checked, each batch by both ways in turns. [bold]bare[/] is io_uring
with files that are open and nothing checked: as fast as this disk reads such a batch, whatever submits it. Between two
batches one thread computes, as a layer does.

Needs: pip install liburing (its binding of 2026.3 asks for Linux 6.14)
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import xxhash
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy"))
from common import RESULTS, ROOT, provenance, write_result
from inflate import parse_bytes

from vllm_spac.cache.transfers import Transfers
from vllm_spac.checkpoint.packed_format import HEADER, PAGE
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.tiers.base import Slots, allocate
from vllm_spac.tiers.disk import DiskStore
from vllm_spac.tuning.comparison import interval, orders

WAYS = ("threads", "io_uring", "bare")
_NAME = "w"
_EPILOG = """[bold]Example[/]

python benchmarks/replay/submitted.py --sizes 1.2MB,9.4MB --batches 1,2,4,8
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


class Ring:
    """Reads whole files of a ``DiskStore`` into slots: one system call submits a batch, each is checked as it comes.

    Args:
        store: of experts with one tensor.
        slots: where they go, one per expert of the largest batch.
        checked: opens each file, and checks what was read; else files stay open and nothing is checked.
    """

    def __init__(self, store: DiskStore, slots: Slots, count: int, checked: bool) -> None:
        import liburing

        self._uring, self._store, self._checked = liburing, store, checked
        self._memory = [(slots[number].memory or {})[_NAME] for number in range(count)]
        self._headers = [np.frombuffer(mmap.mmap(-1, HEADER), np.uint8) for _ in range(count)]
        self._ends = [np.frombuffer(mmap.mmap(-1, PAGE), np.uint8) for _ in range(count)]  # a longer file is noticed
        self._parts = [
            liburing.Iovec([part.data for part in parts])
            for parts in zip(self._headers, self._memory, self._ends, strict=True)
        ]
        self._open = {} if checked else {key: self._opened(key) for key in range(store.shape.total)}
        self._ring, self._done = liburing.Ring(), liburing.Cqe()
        liburing.io_uring_queue_init(2 * count, self._ring)

    def load(self, loads: Sequence[tuple[int, int]]) -> None:
        """Reads each (key, slot)."""
        uring = self._uring
        files = [self._open.get(key) or self._opened(key) for key, _ in loads]
        for number, (file, (_, slot)) in enumerate(zip(files, loads, strict=True)):
            entry = uring.io_uring_get_sqe(self._ring)
            uring.io_uring_prep_readv(entry, file, self._parts[slot], 0)
            entry.user_data = number + 1
        uring.io_uring_submit(self._ring)
        for _ in loads:
            uring.io_uring_wait_cqe(self._ring, self._done)  # Python's lock is not released meanwhile
            entry = self._done[0]
            number, size = entry.user_data - 1, entry.res
            uring.io_uring_cq_advance(self._ring, 1)
            key, slot = loads[number]
            assert size == self._store.file_bytes, f"expert {key}: {size} bytes"
            if self._checked:
                digest = xxhash.xxh3_128_hexdigest(self._memory[slot].data)
                assert digest.encode() in self._headers[slot].tobytes(), f"expert {key} is damaged"
                os.close(files[number])

    def close(self) -> None:
        """Closes the ring and the open files."""
        self._uring.io_uring_queue_exit(self._ring)
        for file in self._open.values():
            os.close(file)

    def _opened(self, key: int) -> int:
        return os.open(self._store.path(key), os.O_RDONLY | os.O_DIRECT)


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    sizes: Annotated[str, typer.Option(help="Bytes of an expert.")] = "1.2MB,4.7MB,9.4MB",
    batches: Annotated[str, typer.Option(help="Experts that a layer misses.")] = "1,2,3,4,8",
    experts: Annotated[int, typer.Option(min=8, help="Files, of which each batch takes any.")] = 64,
    repeats: Annotated[int, typer.Option(min=2, help="Batches of each kind and way.")] = 100,
    threads: Annotated[int, typer.Option(min=1, help="As --spac-io-threads.")] = 4,
    pause: Annotated[float, typer.Option(min=0, help="Seconds of computing between two batches.")] = 0.001,
    folder: Annotated[Path, typer.Option(help="On the disk to measure.", show_default=".cache")] = ROOT / ".cache",
    seed: Annotated[int, typer.Option(help="Of batches and turns.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "reads_submitted.json",
) -> None:
    torch.set_num_threads(1)
    counts = [int(part) for part in batches.split(",")]
    result: dict[str, Any] = {"threads": threads, "pause": pause, "repeats": repeats, "rows": []}
    result["provenance"] = provenance()
    folder.mkdir(parents=True, exist_ok=True)
    for size in sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="submitted-", dir=folder) as files:
            store = packed(Path(files), parse_bytes(size), experts, seed)
            assert store.direct, f"{folder} has no direct I/O"
            result["rows"] += measured(store, counts, repeats, threads, pause, seed)
    write_result(output, result)
    show(result)


def packed(folder: Path, size: int, experts: int, seed: int) -> DiskStore:
    """Returns a store of random experts of about ``size`` bytes."""
    spec = TensorSpec((size // PAGE * PAGE,), torch.uint8)
    store = DiskStore(MoEShape(("layer",), experts, 1, {_NAME: spec}), "random", folder)
    random_bytes = torch.Generator().manual_seed(seed)
    for key in track(range(experts), "writing", transient=True):
        store.put(key, {_NAME: torch.randint(0, 256, spec.shape, dtype=torch.uint8, generator=random_bytes)})
    os.sync()
    return store


def measured(
    store: DiskStore, counts: Sequence[int], repeats: int, threads: int, pause: float, seed: int
) -> list[dict]:
    """Returns a row per number of experts: seconds of a batch by each way, and of both ways in turns."""
    most, draw = max(counts), random.Random(seed)
    tensors = allocate(store.shape.tensors, most, "cpu")
    tensors[_NAME].zero_()
    slots = Slots(tensors)
    rows = []
    with (
        closing(Transfers(store, tensors, threads, "disk")) as pool,
        closing(Ring(store, slots, most, checked=True)) as ring,
        closing(Ring(store, slots, most, checked=False)) as bare,
    ):
        ways: list[Callable[[Sequence[tuple[int, int]]], object]] = [
            lambda loads: pool.load(loads, None), ring.load, bare.load
        ]  # fmt: skip
        for count in track(counts, f"{store.shape.expert_bytes / 1e6:.1f} MB", transient=True):
            seconds: dict[str, list[float]] = {name: [] for name in WAYS}
            for _, order in zip(range(repeats + 3), orders(seed, len(WAYS)), strict=False):
                for which in order:
                    loads = [(key, slot) for slot, key in enumerate(draw.sample(range(store.shape.total), count))]
                    compute(pause)
                    start = time.perf_counter()
                    ways[which](loads)
                    seconds[WAYS[which]].append(time.perf_counter() - start)
            kept = {name: values[3:] for name, values in seconds.items()}  # the first ones warm up
            ratios = [mine / theirs for mine, theirs in zip(kept["io_uring"], kept["threads"], strict=True)]
            rows.append(
                {
                    "expert_bytes": store.shape.expert_bytes,
                    "experts": count,
                    "seconds": {name: statistics.median(values) for name, values in kept.items()},
                    "ratio": statistics.median(ratios),
                    "interval": list(interval(ratios, seed)),
                }
            )
    return rows


def compute(seconds: float) -> None:
    """Computes for about this long."""
    matrix, end = torch.ones(256, 256), time.perf_counter() + seconds
    while time.perf_counter() < end:
        matrix @ matrix


def show(result: dict) -> None:
    """Prints a table."""
    table = Table("MB", "experts", *(f"{name}, GB/s" for name in WAYS), "seconds, io_uring / threads (95 %)")
    for row in result["rows"]:
        total = row["experts"] * row["expert_bytes"]
        rates = [f"{total / row['seconds'][name] / 1e9:.2f}" for name in WAYS]
        low, high = row["interval"]
        ratio = f"{row['ratio']:.2f} ({low:.2f} - {high:.2f})"
        table.add_row(f"{row['expert_bytes'] / 1e6:.1f}", str(row["experts"]), *rates, ratio)
    Console().print(table)


if __name__ == "__main__":
    app()
