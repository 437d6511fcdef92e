"""Bytes per second of the kernels of CPU experts over a plain read of the same memory; and a request there and back.

Experts have the sizes of Qwen3-30B-A3B's (hidden 2048, intermediate 768), and a request selects eight; all of a
format's experts together are larger than the caches, and are computed in turns. A round reads the experts by as many
threads, then times every instruction set and number of rows; a share is the median of the rounds', each over its own
read. The mailbox: the device is a thread that shares the other cores with Python's; the one that answers has its own.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from torch import Tensor
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm
from vllm_spac.kernels.types import Mail, Quantised

from benchmarks.common import RESULTS, Script, progress, provenance, show, write_result
from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.cpu_kernels._library import isas
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.cpu_kernels.simd import Simd
from vllm_spac.storage.base import allocate

FORMATS = {
    "bf16": None,
    "int4": Format("int4", 128),
    "int4-zeros": Format("int4", 128, zeros=True),
    "int8": Format("int8"),
    "fp8-block": Format("e4m3", 128, 128, activations=128),
    "fp8-channel": Format("e4m3", activations=0),
    "mxfp4": Format("e2m1", 32),
    "nvfp4": Format("e2m1", 16),
}
HIDDEN, INTERMEDIATE, TOP_K, BYTES = 2048, 768, 8, 400_000_000
ROWS = (1, 2, 4, 8, 32)
GAPS = (20e-6, 200e-6, 2e-3)  # seconds between an answer and the next request

script = Script("Writes two results: the rates, and beside them mailbox.json.")


class Layer(NamedTuple):
    """Experts of random weights, whose sums stay small."""

    shape: MoEShape
    experts: dict[str, Tensor]

    @classmethod
    def of(cls, kind: Format | None, nbytes: int = BYTES) -> Layer:
        sizes = {"w13": (2 * INTERMEDIATE, HIDDEN), "w2": (HIDDEN, INTERMEDIATE)}
        one = sum(rows * columns for rows, columns in sizes.values()) * 2 // (1 if kind is None else 2 * kind.per_byte)
        count, rng = nbytes // one // TOP_K * TOP_K, torch.Generator().manual_seed(0)
        experts: dict[str, Tensor] = {}
        for name, (rows, columns) in sizes.items():
            if kind is None:
                experts[f"{name}_weight"] = torch.randn(count, rows, columns, generator=rng, dtype=torch.bfloat16) / 64
                continue
            codes = torch.randint(0, 256, (count, *kind.code_shape(rows, columns)), dtype=torch.uint8, generator=rng)
            experts[f"{name}_weight"] = codes.masked_fill_(codes & 127 == 127, 0) if kind.codes == "e4m3" else codes
            experts[f"{name}_scale"] = _scales(kind, (count, *kind.scale_shape(rows, columns)))
        specs = {name: TensorSpec(tuple(t.shape[1:]), t.dtype) for name, t in experts.items()}
        stored = allocate(specs, count, "cpu")  # as a store does: in huge pages
        for name, tensor in stored.items():
            tensor.copy_(experts.pop(name))
        return cls(MoEShape(("layer",), count, TOP_K, specs, kind), stored)

    def requests(self, rows: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (x, weights, ids) until every expert has been selected once."""
        x, weights = torch.randn(rows, HIDDEN).bfloat16(), torch.full((rows, TOP_K), 1 / TOP_K)
        for first in range(0, self.shape.experts, TOP_K):
            yield x, weights, (torch.arange(TOP_K, dtype=torch.int32) + first).expand(rows, TOP_K).contiguous()


class Twin(CpuExperts):
    """The torch twin of our kernel: a loop that dequantises an expert at each use."""

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        tables = {name: torch.tensor([part.data_ptr() for part in tensor]) for name, tensor in experts.items()}
        kind = self.shape.packed
        quantised = None if kind is None else Quantised(kind, tables["w13_scale"], tables["w2_scale"])
        w13, w2 = tables["w13_weight"], tables["w2_weight"]
        return grouped_gemm(x, w13, w2, weights, ids, INTERMEDIATE, quantised=quantised)

    def describe(self) -> str:
        return "the torch twin"


def _scales(kind: Format, shape: tuple[int, ...]) -> Tensor:
    if kind.codes == "e2m1":  # e8m0 of 2**-7; or e4m3 of 1, and 2**-7 of the row
        words = torch.full(shape, 0x78787878 if kind.exponents else 0x38383838, dtype=torch.int32)
        if kind.row_scales:
            words[:, 0] = torch.tensor(2.0**-7).view(torch.int32)
        return words
    if kind.codes == "int4":  # 2**-8 in bfloat16; a zero point of 8, or the same scale for the second group
        return torch.full(shape, 0x00083B80 if kind.zeros else 0x3B803B80, dtype=torch.int32)
    return torch.full(shape, 2.0**-8)


def seconds_of(executor: CpuExperts, layer: Layer, rows: int) -> float:
    """Seconds of the median request."""
    taken = []
    for request in layer.requests(rows):
        begin = time.perf_counter()
        executor.run(*request, layer.experts)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def read_rate(layer: Layer) -> float:
    """Bytes per second of a plain read of the weights by torch's threads."""
    weights = [tensor.view(-1).view(torch.int64) for name, tensor in layer.experts.items() if name.endswith("weight")]
    begin = time.perf_counter()
    for tensor in weights:
        tensor.sum()
    return sum(tensor.nbytes for tensor in weights) / (time.perf_counter() - begin)


def rates(name: str, threads: int, rounds: int, tick: Callable[[], None]) -> list[dict]:
    """Rows of the result: each instruction set and number of rows, and the torch twin for one row."""
    layer = Layer.of(FORMATS[name])
    nbytes = TOP_K * layer.shape.expert_bytes
    executors: dict[str, CpuExperts] = {isa: Simd(layer.shape, threads, "silu", isa=isa) for isa in isas()[1:]}
    few, loop = Layer.of(FORMATS[name], 2 * nbytes), Twin(layer.shape, threads, "silu")
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {(isa, rows): [] for isa in executors for rows in ROWS}
    measured["torch", 1] = []
    for _ in range(rounds):
        for isa, rows in measured:
            read = read_rate(layer)
            seconds = seconds_of(loop, few, 1) if isa == "torch" else seconds_of(executors[isa], layer, rows)
            measured[isa, rows].append((nbytes / seconds / read, seconds))
            tick()
    for executor in executors.values():
        executor.close()
    return [
        {"format": name, "rows": rows, "isa": isa, "threads": threads, "bytes": nbytes}
        | {"seconds": statistics.median(s for _, s in taken), "share_of_read": statistics.median(r for r, _ in taken)}
        for (isa, rows), taken in measured.items()
    ]


def mailbox(requests: int) -> list[dict]:
    """Rows of the other result: seconds of a request of one tiny expert, also while a thread of Python's is at work."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("a C compiler is needed for the device's side of the mailbox")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "ask.so"
        source = Path(__file__).with_name("ask.c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
        device = ctypes.CDLL(str(library))
    specs = {"w13_weight": TensorSpec((64, 32), torch.bfloat16), "w2_weight": TensorSpec((32, 32), torch.bfloat16)}
    experts = {name: torch.zeros(2, *spec.shape, dtype=spec.dtype) for name, spec in specs.items()}
    sizes: dict[str, tuple] = {
        "ids": (torch.int32, 1, 1),
        "weights": (torch.float32, 1, 1),
        "x": (torch.bfloat16, 1, 32),
    }
    sizes |= {"asked": (torch.int64, 1), "answered": (torch.int64, 1), "head": (torch.int32, 2)}
    mail = Mail(**{n: torch.ones(s, dtype=t) for n, (t, *s) in sizes.items()}, results=torch.zeros(1, 32))
    mail.asked[0] = mail.head[0] = 0
    executor = Simd(MoEShape(("layer",), 2, 1, specs), 1, "silu")
    server, found, first = executor.serve(mail, [experts]), [], 1
    cores = os.sched_getaffinity(0)
    assert executor.pool is not None
    os.sched_setaffinity(0, others := cores - set(executor.pool.cpus) or cores)
    for busy in (False, True):
        done = threading.Event()
        spinning = threading.Thread(target=_spin, args=(done, others))
        if busy:
            spinning.start()
        for gap in GAPS:
            taken, addresses = (ctypes.c_double * requests)(), (mail.asked.data_ptr(), mail.answered.data_ptr())
            server.wake()
            device.ask(*map(ctypes.c_void_p, addresses), ctypes.c_int64(first), requests, ctypes.c_double(gap), taken)
            first += requests
            parts = statistics.quantiles(taken, n=100)
            found.append({"python_busy": busy, "gap": gap, "median": parts[49], "p99": parts[98]})
        done.set()
    os.sched_setaffinity(0, cores)
    server.close()
    executor.close()
    return found


def _spin(done: threading.Event, cores: set[int]) -> None:
    os.sched_setaffinity(0, cores)
    while not done.is_set():
        pass


@script.main
def main(
    output: Annotated[Path, typer.Option(help="the JSON file to write; mailbox.json is written beside it")] = RESULTS
    / "cpu_rates.json",
    threads: Annotated[int, typer.Option(min=0, help="of each request, and of the read; 0: all cores")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each format")] = 5,
    short: Annotated[bool, typer.Option("--short", help="one round")] = False,
) -> None:
    made = {"provenance": provenance()}
    threads, rounds = threads or len(os.sched_getaffinity(0)), 1 if short else rounds
    torch.set_num_threads(threads)
    rows: list[dict] = []
    with progress() as bar:
        task = bar.add_task("rates", total=len(FORMATS) * rounds * (len(ROWS) * len(isas()[1:]) + 1))
        for name in FORMATS:
            rows += rates(name, threads, rounds, lambda: bar.advance(task))
    sizes = {"hidden": HIDDEN, "intermediate": INTERMEDIATE, "top_k": TOP_K}
    write_result(output, {"rows": rows, **sizes, "rounds": rounds, **made})
    show("Share of a plain read", rows, "format", "isa", "rows", "seconds", "share_of_read")
    answers = mailbox(200 if short else 2000)
    write_result(output.with_name("mailbox.json"), {"rows": answers, **made})
    show("A request there and back, seconds", answers, "python_busy", "gap", "median", "p99")


if __name__ == "__main__":
    script()
