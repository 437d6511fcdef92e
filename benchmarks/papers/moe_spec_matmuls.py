"""MoE-Spec's table 4: experts one after the other, or all in one batched product. Calculated, or with --time measured.

    python benchmarks/papers/moe_spec_matmuls.py
    python benchmarks/papers/moe_spec_matmuls.py --time

*Sequential*: for each expert its rows are gathered, run, weighted and added, as in the EAGLE code that the paper began
with. *Batched*: the weights of the active experts are stacked, and all run as one product (the paper's appendix C).
*Grouped*: rows sorted by expert, one product per group and no copies of weights, as fused kernels do in one launch. The
launches of both are counted, operation by operation. CALCULATED for a GPU: launches in turn, each as
long as --launch-us says, and the bytes of the active experts over the memory's bandwidth; batched, they are read,
written and read again. A CPU without AVX-512 emulates products in bf16: hence --dtype float32.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, Spread, provenance, show, write_result

from vllm_spac.decisions.costs import Costs

LAYERS, EXPERTS, TOP_K, HIDDEN, NEURONS = 16, 64, 8, 2048, 1024  # OLMoE-1B-7B
ROWS = 64  # of a tree of 63 nodes
PAPER = {  # tokens/s and tokens per step of its table 4: sequential, batched
    "GSM8K": ((17.1, 2.98), (25.2, 3.00)),
    "HumanEval": ((23.6, 4.16), (35.0, 4.20)),
    "CNN/DM": ((12.3, 1.93), (18.4, 1.96)),
}
VIEWS = ("view", "unsqueeze", "expand", "transpose", "select", "slice", "detach", "t", "_unsafe_view", "alias", "split")
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [rows, d], weights [rows, k], ids [rows, k], w13 [N, 2n, d], w2 [N, d, n]) -> [rows, d]."""


def sequential(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for expert in range(len(w13)):
        rows, places = torch.where(ids == expert)
        if len(rows):
            gate, up = F.linear(x[rows], w13[expert]).chunk(2, -1)
            out.index_add_(0, rows, F.linear(F.silu(gate) * up, w2[expert]) * weights[rows, places, None])
    return out


def batched(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    active = ids.unique()
    gate, up = torch.matmul(x, w13[active].transpose(1, 2)).chunk(2, -1)  # all rows by all active experts
    every = torch.bmm(F.silu(gate) * up, w2[active].transpose(1, 2))
    share = x.new_zeros(len(x), len(w13)).scatter_(1, ids, weights)[:, active]
    return torch.einsum("erd,re->rd", every, share)


def grouped(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    order = ids.flatten().argsort(stable=True)
    rows, counts = order // ids.shape[1], torch.bincount(ids.flatten(), minlength=len(w13)).tolist()
    parts = []
    for expert, part in enumerate(x[rows].split(counts)):
        if len(part):
            gate, up = F.linear(part, w13[expert]).chunk(2, -1)
            parts.append(F.linear(F.silu(gate) * up, w2[expert]))
    return torch.zeros_like(x).index_add_(0, rows, torch.cat(parts) * weights.flatten()[order, None])


WAYS: dict[str, Layer] = {"sequential": sequential, "batched": batched, "grouped": grouped}


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch kernels for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ not in VIEWS
        return func(*args, **(kwargs or {}))


def routed(active: int, hidden: int, neurons: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    """Inputs of a layer ``active`` of whose experts are selected, all of them, by ``ROWS`` rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(active, generator=generator)[:TOP_K] for _ in range(ROWS)])
    ids[:, 0] = torch.arange(ROWS) % active
    ids = torch.stack([(row[0] + torch.arange(TOP_K) * (active // TOP_K)) % active for row in ids])
    x, w13, w2 = (
        torch.randn(*shape, generator=generator).mul_(0.02).to(dtype)
        for shape in ((ROWS, hidden), (EXPERTS, 2 * neurons, hidden), (EXPERTS, hidden, neurons))
    )
    return x, torch.full((ROWS, TOP_K), 1 / TOP_K, dtype=x.dtype), ids, w13, w2


@app.command(help=__doc__)
def main(
    active: Annotated[str, typer.Option(help="Active experts per layer.")] = "50,32",
    launch_us: Annotated[str, typer.Option(help="Seconds of a launch, in millionths.")] = "5,8",
    profile: Annotated[str, typer.Option(help="Profile of the GPU.")] = "a100",
    timed: Annotated[bool, typer.Option("--time", help="Measure on this CPU as well.")] = False,
    turns: Annotated[int, typer.Option(min=2, help="Of each way, in turn.")] = 15,
    dtype: Annotated[str, typer.Option(help="Of what is measured: float32 or bfloat16.")] = "float32",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "moe_spec_matmuls.json",
) -> None:
    origin, costs, rows = provenance(), Costs.read(profile), []
    expert = 3 * HIDDEN * NEURONS * 2
    for count in map(int, active.split(",")):
        small = routed(count, 64, 32)
        counted = {}
        for name, way in WAYS.items():
            with Launches() as launches:
                way(*small)
            counted[name] = launches.count
        counted["fused"] = 4  # sort, two products, sum: as launched by vLLM's kernels
        del counted["grouped"]
        for micro in map(float, launch_us.split(",")):
            for name, launches in counted.items():
                copies = 3 if name == "batched" else 1
                moved = copies * count * expert / costs.fast.bytes_per_second
                step = LAYERS * max(launches * micro * 1e-6, moved)
                rows.append(
                    {"active": count, "launch_us": micro, "way": name, "launches": launches}
                    | {"bytes_ms": 1e3 * LAYERS * moved, "step_ms": 1e3 * step}
                )
    steps = {name: [1e3 * length / speed for speed, length in both] for name, both in PAPER.items()}
    result: dict[str, Any] = {"provenance": origin, "calculated": rows, "profile": profile, "paper_step_ms": steps}
    if timed:
        result["timed"] = [measured(count, turns, dtype) for count in map(int, active.split(","))]
    write_result(output, result)
    show("calculated", rows, "active", "launch_us", "way", "launches", "bytes_ms", "step_ms")
    if timed:
        show("measured, ms per layer", result["timed"], "active", "threads", *(f"{name}.median" for name in WAYS))


def measured(active: int, turns: int, dtype: str) -> dict[str, Any]:
    """Milliseconds of a layer on this CPU, the ways in turn; all must agree."""
    given = routed(active, HIDDEN, NEURONS, getattr(torch, dtype))
    first = sequential(*given).float()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with torch.inference_mode():
        for turn in range(1 + turns):
            for name, way in WAYS.items():
                begin = time.perf_counter()
                found = way(*given)
                if turn:
                    seconds[name].append(1e3 * (time.perf_counter() - begin))
                assert float((found.float() - first).norm() / first.norm()) < 0.02, f"{name} computes something else"
    spreads = {name: vars(Spread.of(each)) for name, each in seconds.items()}
    return {"active": active, "threads": torch.get_num_threads(), "dtype": dtype} | spreads


if __name__ == "__main__":
    app()
