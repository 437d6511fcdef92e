"""Compares the grouped GEMM over pointers with vLLM's Triton fused MoE, and over PCIe with a plain copy.

Needs a CUDA device. Results of an H100 are in ``benchmarks/results/gpu.md``.

1. All experts in HBM, M = 1 ... 256: both kernels' time, ours also in bytes of experts per second and as a share of the
   rate of a device-to-device copy. vLLM takes the tuned configuration that it ships for this GPU, if it has one.
2. All experts in pinned host memory, the same launch: bytes per second as a share of a plain pinned copy's.
3. A share of the experts in HBM, the rest in pinned memory: hits and misses in one launch.
4. The cost of deciding in a layer, when nothing is admitted. The simulator assumes 5 us.
5. Experts that the GEMM itself copies into their slots, beside hits: plain ones and quantised ones (random).
6. Quantised experts (random ones) in HBM and in pinned memory, in bytes as they are stored; compared with the same
   kernel over dequantised weights. ``--dry-run`` computes 5 and 6, tiny, in Triton's interpreter: it times nothing.

Each time is that of one replay of a CUDA graph, with L2 overwritten before; results are compared before anything is
timed. Measurements are written at once: a run that is stopped keeps what it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from torch import Tensor

from benchmarks.common import RESULTS, Script, Spread, provenance, write_result
from vllm_spac.tools.selftest.random_experts import FORMATS, RandomExperts, RoutedRows, addresses

REPEATS = 30
FLUSH_BYTES = 512 << 20  # more than any L2
COPY_BYTES = 1 << 30
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHORT_ROWS = (1, 4, 64)
# As a share of the greatest element: both kernels round bfloat16 values (2**-8) six times, in different order.
TOLERANCE = 2.0**-5

app = Script()


@dataclass(frozen=True)
class Shape:
    """One MoE layer; bfloat16. The default is Qwen3-30B-A3B's."""

    hidden: int = 2048
    intermediate: int = 768
    experts: int = 128
    top_k: int = 8

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * 2


def needed_bytes(shape: Shape, ids: Tensor, chosen: Tensor | None = None) -> int:
    """Bytes of the distinct experts that the rows need; only of those in ``chosen`` [experts] bool, if given."""
    used = ids.unique().long()
    return shape.expert_bytes * int(len(used) if chosen is None else chosen[used].sum())


def make_rows(rows: int, shape: Shape, device: str = "cuda") -> RoutedRows:
    return RoutedRows.make(rows, shape.hidden, shape.experts, shape.top_k, device)


def make_weights(shape: Shape) -> tuple[Tensor, Tensor]:
    """w13 [experts, 2 * intermediate, hidden] and w2 [experts, hidden, intermediate], on the device."""
    rng = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=rng, device="cuda", dtype=torch.bfloat16) / size[-1] ** 0.5

    e, d, ff = shape.experts, shape.hidden, shape.intermediate
    return normal(e, 2 * ff, d), normal(e, d, ff)


def seconds(work: Callable[[], object]) -> Spread:
    """Measures one replay of ``work``, captured in a CUDA graph after three runs outside it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(REPEATS):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return Spread.of(times)


def copy_rates() -> dict[str, float]:
    """Measures bytes per second of plain copies: within HBM (counted twice: read and write) and from the host."""
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    other, host = torch.empty_like(device), torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    return {
        "hbm": 2 * COPY_BYTES / seconds(lambda: device.copy_(other)).median,
        "pinned": COPY_BYTES / seconds(lambda: device.copy_(host, non_blocking=True)).median,
    }


def compare(ours: Tensor, theirs: Tensor, what: str) -> float:
    """Returns the greatest difference as a share of the greatest element.

    Raises:
        typer.Exit: they differ by more than ``TOLERANCE``, or are not finite.
    """
    share = float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())
    if not share <= TOLERANCE:
        fail(
            f"{what}: the answers differ by {share:.2g} of the greatest element, {TOLERANCE:.2g} is allowed; not timed"
        )
    return share


def _pinned(weight: Tensor) -> Tensor:
    return torch.empty_like(weight, device="cpu", pin_memory=True).copy_(weight)


def fail(message: str) -> NoReturn:
    typer.echo(f"benchmarks/kernels: {message}", err=True)
    raise typer.Exit(2)


def stock(given: RoutedRows, w13: Tensor, w2: Tensor) -> Callable[[], Tensor]:
    """Returns a call of vLLM's fused MoE in Triton, as its layer calls it."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return lambda: fused_experts(given.x, w13, w2, given.weights, given.ids)


def measure(shape: Shape, rows: int, w13: Tensor, w2: Tensor, pinned: tuple[Tensor, Tensor], resident: float) -> dict:
    """Measures one M: in HBM compared with vLLM, all pinned, and mixed."""
    from vllm_spac.kernels.grouped_gemm import grouped_gemm, tile_for

    given = make_rows(rows, shape)
    in_hbm = addresses(w13), addresses(w2)
    on_host = addresses(pinned[0]), addresses(pinned[1])
    is_hit = torch.arange(shape.experts, device="cuda") < round(resident * shape.experts)
    mixed = [torch.where(is_hit, fast, slow) for fast, slow in zip(in_hbm, on_host, strict=True)]

    def ours(tables: Sequence[Tensor]) -> Callable[[], Tensor]:
        w13, w2 = tables
        return lambda: grouped_gemm(given.x, w13, w2, given.weights, given.ids, shape.intermediate)

    theirs = stock(given, w13, w2)
    difference = compare(ours(in_hbm)(), theirs(), f"M={rows}, HBM against vLLM")
    for tables, where in ((on_host, "pinned"), (mixed, "mixed")):
        if not torch.equal(ours(tables)(), ours(in_hbm)()):
            fail(f"M={rows}: {where} experts give other bits than the same experts in HBM; not timed")
    needed, missed = needed_bytes(shape, given.ids), needed_bytes(shape, given.ids, ~is_hit)
    times = {"hbm": seconds(ours(in_hbm)), "vllm": seconds(theirs), "pinned": seconds(ours(on_host))}
    times["mixed"] = seconds(ours(mixed))
    return {
        "rows": rows,
        "tile": asdict(tile_for(rows)),
        "difference_from_vllm": difference,
        "seconds": {name: asdict(spread) for name, spread in times.items()},
        "bytes": {"needed": needed, "missed_when_mixed": missed},
        "speedup_over_vllm": times["vllm"].median / times["hbm"].median,
        "hbm_bytes_per_second": needed / times["hbm"].median,
        "pinned_bytes_per_second": needed / times["pinned"].median,
        "mixed_missed_bytes_per_second": missed / times["mixed"].median,
    }


def measure_admission(shape: Shape, rows: int, pinned: tuple[Tensor, Tensor], resident: float) -> dict:
    """Measures the decision at one M with a share ``resident`` in slots; without offers, all replays see one state."""
    from vllm_spac.kernels.admit import admit
    from vllm_spac.kernels.types import Experts, Offers

    given, slots = make_rows(rows, shape), max(1, round(resident * shape.experts))
    integers: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    room = [torch.empty((slots, *weight.shape[1:]), dtype=weight.dtype, device="cuda") for weight in pinned]
    hosts, places = (torch.stack([addresses(weight) for weight in weights]) for weights in (pinned, room))
    owner = torch.arange(slots, **integers)
    slot_of = torch.full((shape.experts,), -1, **integers)
    slot_of[:slots] = owner
    table = torch.where(slot_of >= 0, places[:, slot_of.clamp(min=0).long()], hosts)
    state = Experts(slot_of, owner, table, hosts, places)
    nothing, unknown = torch.zeros(slots, **integers), torch.zeros(shape.experts, device="cuda")
    offers = Offers(torch.zeros(2, **integers), nothing, nothing, unknown[:slots], unknown)
    counts, sources = torch.zeros(shape.experts, **integers), torch.zeros(shape.experts, **integers)
    copies = torch.zeros(1 + 2 * shape.experts, **integers)
    decided = seconds(lambda: admit(given.ids, given.weights, 0, state, offers, counts, sources, copies))
    return {"rows": rows, "seconds": {"nothing admitted": asdict(decided)}}


def expected(packed: RandomExperts, given: RoutedRows) -> Tensor:
    """Returns what the same kernel computes over dequantised weights; sums on the CPU where it rounds rows, too."""
    from vllm_spac.kernels.grouped_gemm import grouped_gemm, tile_for

    assert packed.kind is not None
    if packed.kind.activations is not None:
        return packed.expected(given).to(given.x)
    return packed.call_plain(grouped_gemm, given, tile=tile_for(len(given.x), packed.kind))()


def measure_packed(shape: Shape, rows: int, packed: RandomExperts, pinned: tuple[Tensor, ...], what: str) -> dict:
    """Measures quantised experts at one M, in HBM and all pinned."""
    from vllm_spac.kernels.grouped_gemm import grouped_gemm

    given = make_rows(rows, shape)
    ours, on_host = packed.call(grouped_gemm, given), packed.call(grouped_gemm, given, pinned)
    difference = compare(ours(), expected(packed, given), f"M={rows}, {what}")
    if not torch.equal(ours(), on_host()):
        fail(f"M={rows}, {what}: pinned experts give other bits than the same experts in HBM; not timed")
    needed = packed.expert_bytes * len(given.ids.unique())
    times = {"hbm": seconds(ours), "pinned": seconds(on_host)}
    return {
        "format": what,
        "rows": rows,
        "difference_from_dequantised": difference,
        "seconds": {name: asdict(spread) for name, spread in times.items()},
        "expert_bytes": packed.expert_bytes,
        "bytes": {"needed": needed},
        "hbm_bytes_per_second": needed / times["hbm"].median,
        "pinned_bytes_per_second": needed / times["pinned"].median,
    }


def filling(
    shape: Shape, rows: int, packed: RandomExperts, hosts: tuple[Tensor, ...], resident: float, what: str, device: str
) -> tuple[Callable[[], Tensor], int, int]:
    """Returns a GEMM that copies its misses into slots, their number, and that of selected experts, once it is right.

    Raises:
        typer.Exit: answers differ from those of experts in place, or slots from their experts; not timed.
    """
    from vllm_spac.kernels.grouped_gemm import grouped_gemm

    given = make_rows(rows, shape, device)
    hits = torch.arange(shape.experts, device=device) < round(resident * shape.experts)
    ours, slots = packed.call_filling(grouped_gemm, given, hosts, hits)
    if not torch.equal(ours(), packed.call(grouped_gemm, given)()):
        fail(
            f"M={rows}, {what}: experts that are copied first give other bits than the same experts in place; not timed"
        )
    used = given.ids.unique().long()
    filled = hits.clone()
    filled[used] = True
    for slot, tensor in zip(slots, packed.stored, strict=True):
        if not torch.equal(slot[filled], tensor[filled]) or slot[~filled].any():
            fail(f"M={rows}, {what}: slots hold other experts than the missed ones; not timed")
    return ours, int((~hits[used]).sum()), len(used)


def measure_fills(
    shape: Shape, rows: int, packed: RandomExperts, hosts: tuple[Tensor, ...], resident: float, what: str
) -> dict:
    """Measures the GEMM that copies its misses, at one M with a share ``resident`` in slots; each replay copies all."""
    ours, missed, selected = filling(shape, rows, packed, hosts, resident, what, "cuda")
    time = seconds(ours)
    return {
        "format": what,
        "rows": rows,
        "experts_copied": missed,
        "experts_selected": selected,
        "seconds": {"filled": asdict(time)},
        "copied_bytes_per_second": missed * packed.expert_bytes / time.median,
    }


def dry_run(names: Sequence[str]) -> None:
    """Computes a tiny layer of each format in Triton's interpreter, as it is measured, and compares."""
    from vllm_spac.kernels.grouped_gemm import grouped_gemm

    shape = Shape(256, 128, 6, 2)
    given = make_rows(3, shape, "cpu")
    for name in ("bfloat16", *names):
        packed = RandomExperts.make(FORMATS.get(name), shape.hidden, shape.intermediate, shape.experts, "cpu")
        _, missed, selected = filling(shape, 3, packed, packed.stored, 0.5, name, "cpu")
        typer.echo(f"{name:10} {missed} of {selected} experts are copied into slots, with the bits of those in place")
        if packed.kind is None:
            continue
        share = compare(packed.call(grouped_gemm, given)(), expected(packed, given), name)
        typer.echo(f"{name:10} {packed.expert_bytes} B per expert, differs by {share:.2g} of the greatest element")


def measure_all_fills(
    payload: dict[str, Any], output: Path, shape: Shape, sizes: Sequence[int], packed: RandomExperts,
    hosts: tuple[Tensor, ...], resident: float, what: str,
) -> None:  # fmt: skip
    """Measures fills at each M, and writes each at once."""
    pinned = payload["copy_bytes_per_second"]["pinned"]
    for rows in sizes:
        row = measure_fills(shape, rows, packed, hosts, resident, what)
        payload["fills"].append(row)
        write_result(output, payload)
        typer.echo(
            f"M={rows:<4} {what:10} {row['experts_copied']} of {row['experts_selected']} copied by the GEMM at "
            f"{row['copied_bytes_per_second'] / pinned:4.0%} of pinned copy"
        )


def line(row: dict, rates: dict[str, float]) -> str:
    fast, slow = row["hbm_bytes_per_second"], row["pinned_bytes_per_second"]
    return (
        f"M={row['rows']:<4} {row['seconds']['hbm']['median'] * 1e6:8.1f} us  {row['speedup_over_vllm']:5.2f}x vLLM  "
        f"{fast / 1e9:7.1f} GB/s = {fast / rates['hbm']:4.0%} of HBM copy  "
        f"pinned {slow / 1e9:5.1f} GB/s = {slow / rates['pinned']:4.0%} of pinned copy"
    )


@app.main
def main(
    hidden: int = Shape.hidden,
    intermediate: int = Shape.intermediate,
    experts: int = Shape.experts,
    top_k: int = Shape.top_k,
    resident: Annotated[float, typer.Option(help="Share of the experts in HBM in the mixed run.", min=0, max=1)] = 0.25,
    short: Annotated[bool, typer.Option("--short", help=f"M = {', '.join(map(str, SHORT_ROWS))} alone.")] = False,
    formats: Annotated[
        str, typer.Option(help=f"Quantised formats to measure, of {','.join(FORMATS)}; empty: none.")
    ] = ",".join(FORMATS),
    dry: Annotated[
        bool, typer.Option("--dry-run", help="Only compute tiny quantised layers, with TRITON_INTERPRET=1.")
    ] = False,
    output: Annotated[Path, typer.Option(help="JSON to write.")] = RESULTS / "kernels.json",
) -> None:
    """Compare grouped_gemm with vLLM's fused MoE and with plain copies, on this machine's GPU."""
    chosen = [name for name in formats.split(",") if name]
    if unknown := [name for name in chosen if name not in FORMATS]:
        fail(f"--formats {unknown[0]}: use some of {','.join(FORMATS)}")
    if dry:
        if os.environ.get("TRITON_INTERPRET") != "1":
            fail("--dry-run needs TRITON_INTERPRET=1 in the environment, which Triton reads when it is imported")
        dry_run(chosen)
        return
    if not torch.cuda.is_available():
        fail("needs a CUDA device, and torch sees none; `make test` checks the kernels without one")
    shape = Shape(hidden, intermediate, experts, top_k)
    device = torch.cuda.get_device_properties(0)
    gpu = {"name": device.name, "capability": [device.major, device.minor], "l2_bytes": device.L2_cache_size}
    payload: dict[str, Any] = {"provenance": provenance(), "gpu": gpu, "shape": asdict(shape), "resident": resident}
    w13, w2 = make_weights(shape)
    try:
        pinned = _pinned(w13), _pinned(w2)
    except RuntimeError as error:
        fail(f"{shape.experts * shape.expert_bytes >> 20} MiB of host memory cannot be pinned: {error}")
    rates = copy_rates()
    typer.echo(f"copies: HBM {rates['hbm'] / 1e9:.1f} GB/s, from pinned memory {rates['pinned'] / 1e9:.1f} GB/s")
    payload |= {"copy_bytes_per_second": rates, "rows": [], "admission": []}
    sizes = SHORT_ROWS if short else ROWS
    for rows in sizes:
        row = measure(shape, rows, w13, w2, pinned, resident)
        payload["rows"].append(row)
        write_result(output, payload)
        typer.echo(line(row, rates))
    for rows in sizes:
        row = measure_admission(shape, rows, pinned, resident)
        payload["admission"].append(row)
        write_result(output, payload)
        typer.echo(f"M={row['rows']:<4} nothing admitted {row['seconds']['nothing admitted']['median'] * 1e6:6.1f} us")
    payload |= {"fills": [], "packed": []}
    plain = RandomExperts.make(None, shape.hidden, shape.intermediate, shape.experts, "cuda")
    measure_all_fills(payload, output, shape, sizes, plain, tuple(map(_pinned, plain.stored)), resident, "bfloat16")
    for name in chosen:
        packed = RandomExperts.make(FORMATS[name], shape.hidden, shape.intermediate, shape.experts, "cuda")
        on_host = tuple(map(_pinned, packed.stored))
        measure_all_fills(payload, output, shape, sizes, packed, on_host, resident, name)
        for rows in sizes:
            row = measure_packed(shape, rows, packed, on_host, name)
            payload["packed"].append(row)
            write_result(output, payload)
            typer.echo(
                f"M={row['rows']:<4} {name:10} {row['seconds']['hbm']['median'] * 1e6:8.1f} us  "
                f"{row['hbm_bytes_per_second'] / rates['hbm']:4.0%} of HBM copy  "
                f"pinned {row['pinned_bytes_per_second'] / rates['pinned']:4.0%} of pinned copy"
            )
    typer.echo(f"written: {output}")


if __name__ == "__main__":
    app()
