"""The kernels of CPU experts beside others that a CPU has: torch's int4pack, and vLLM's fused MoE.

Experts and requests are those of ``cpu.py``. Of torch, matrix products are timed alone: an expert's three matrices, for
the rows that select it, one expert of the request after the other. It keeps weights in a layout of its own, with groups
of 128. vLLM's fused MoE computes whole requests, as ours does. All run in as many threads, in turns; each ratio is the
median of the rounds', and is greater than 1 where ours takes less time.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from benchmarks.common import RESULTS, Script, provenance, show, write_result
from benchmarks.kernels.cpu import FORMATS, HIDDEN, INTERMEDIATE, ROWS, Layer, seconds_of
from vllm_spac.cpu_kernels.base import CpuExperts
from vllm_spac.cpu_kernels.native import Native
from vllm_spac.cpu_kernels.simd import Simd

GROUP = 128

script = Script("Writes the ratios of each number of rows.")


class Int4Pack(CpuExperts):
    """The products of ``_weight_int4pack_mm_for_cpu``; rows of a request select the same experts: none is routed."""

    def __init__(self, layer: Layer, threads: int) -> None:
        super().__init__(layer.shape, threads, "silu")
        self._w13 = [_packed(codes, HIDDEN) for codes in layer.experts["w13_weight"]]
        self._w2 = [_packed(codes, INTERMEDIATE) for codes in layer.experts["w2_weight"]]
        self._h = torch.randn(max(ROWS), INTERMEDIATE).bfloat16()

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        product, h = torch.ops.aten._weight_int4pack_mm_for_cpu, self._h[: len(x)]
        out = x
        for expert in ids[0].tolist():
            (w13, scales13), (w2, scales2) = self._w13[expert], self._w2[expert]
            product(x, w13, GROUP, scales13)
            out = product(h, w2, GROUP, scales2)
        return out

    def describe(self) -> str:
        return "torch's int4pack"


def _packed(codes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K / 2] in torch's layout, and as many scales and zero points."""
    whole = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()
    scales = torch.full((columns // GROUP, len(codes), 2), 2.0**-8, dtype=torch.bfloat16)
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(whole, 1), scales


def fused(layer: Layer, threads: int) -> CpuExperts:
    """vLLM's fused MoE, over weights in its layout."""
    from vllm import _custom_ops as ops

    own = {name: ops.cpu_prepack_moe_weight(tensor, "vec") for name, tensor in layer.experts.items()}

    def kernel(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        out = torch.empty_like(x)
        w13, w2 = own["w13_weight"], own["w2_weight"]
        ops.cpu_fused_moe(out, x, w13, w2, None, None, weights, ids, "silu", "vec", False)
        return out

    return Native(layer.shape, threads, "silu", kernel)


def ratios(name: str, other: Callable[[Layer, int], CpuExperts], threads: int, rounds: int) -> list[dict]:
    """Rows of the result: seconds of the median request of both, and the ratio, by number of rows."""
    layer = Layer.of(FORMATS[name])
    ours, theirs = Simd(layer.shape, threads, "silu"), other(layer, threads)
    found = []
    for rows in ROWS:
        taken = [(seconds_of(theirs, layer, rows), seconds_of(ours, layer, rows)) for _ in range(rounds)]
        their, own = (statistics.median(seconds) for seconds in zip(*taken, strict=True))
        ratio = statistics.median(t / o for t, o in taken)
        found.append({"format": name, "rows": rows, "seconds": own, "their_seconds": their, "ratio": ratio})
    ours.close()
    return [row | {"isa": ours.isa, "other": theirs.describe(), "threads": threads} for row in found]


@script.main
def main(
    output: Annotated[Path, typer.Option(help="the JSON file to write")] = RESULTS / "cpu_beside.json",
    threads: Annotated[int, typer.Option(min=0, help="of each request; 0: all cores")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="rounds of each number of rows")] = 5,
) -> None:
    made = {"provenance": provenance()}
    torch.set_num_threads(threads := threads or len(os.sched_getaffinity(0)))
    rows = ratios("int4", Int4Pack, threads, rounds) + ratios("bf16", fused, threads, rounds)
    write_result(output, {"rows": rows, "rounds": rounds, **made})
    show("Times their seconds over ours", rows, "format", "other", "rows", "seconds", "their_seconds", "ratio")


if __name__ == "__main__":
    script()
