"""Compares the two values of --spac-io-submit: a layer's missing experts are read by threads, or by io_uring.

Batches of packed experts are read into slots and checked, in turns. [bold]bare[/] is io_uring
with files that are open and nothing checked: as fast as this disk reads such a batch, whatever submits it. Between two
batches one thread computes, as a layer does.

Needs: pip install "vllm-spac[io-uring]"
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
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "toy"))
from common import RESULTS, ROOT, provenance, write_result
from inflate import parse_bytes

from vllm_spac.cache.transfers import Transfers
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.decisions.comparison import interval, orders
from vllm_spac.storage.base import Slots, allocate
from vllm_spac.storage.checkpoint.packed_folder import HEADER, PAGE
from vllm_spac.storage.disk import DiskStore
from vllm_spac.system.io_uring import Ring

WAYS = ("threads", "io_uring", "bare")
_NAME = "w"
_EPILOG = """[bold]Example[/]

python benchmarks/replay/submitted.py --sizes 1.2MB,9.4MB --batches 1,2,4,8
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


class Bare:
    """Reads experts of one tensor into slots by io_uring from files that stay open, and checks nothing."""

    def __init__(self, store: DiskStore, slots: Slots, count: int) -> None:
        self._memory = [(slots[number].memory or {})[_NAME] for number in range(count)]
        self._headers = [np.frombuffer(mmap.mmap(-1, HEADER), np.uint8) for _ in range(count)]
        self._files = [os.open(store.path(key), os.O_RDONLY | os.O_DIRECT) for key in range(store.shape.total)]
        self._ring, self._size = Ring(), store.file_bytes

    def load(self, loads: Sequence[tuple[int, int]]) -> None:
        """Reads each (key, slot)."""
        self._ring.submit([(slot, self._files[key], (self._headers[slot], self._memory[slot])) for key, slot in loads])
        left = len(loads)
        while left:
            for slot, size in self._ring.completed():
                assert size == self._size, f"slot {slot}: {size} bytes"
                left -= 1

    def close(self) -> None:
        """Closes the ring and the files."""
        self._ring.close()
        for file in self._files:
            os.close(file)


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
        closing(Transfers(store, tensors, threads, "disk", ring=Ring())) as together,
        closing(Bare(store, slots, most)) as bare,
    ):
        ways: list[Callable[[Sequence[tuple[int, int]]], object]] = [
            lambda loads: pool.load(loads, None), lambda loads: together.load(loads, None), bare.load
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
