"""Replays recorded routing with real loads of random experts of any size, under several policies and slots.

Random experts are written once, to a folder that is removed at the end. Then the pool of serving (residency, policy,
transfers, store) follows the trace; nothing is computed, so a step lasts as long as its loads and their bookkeeping.
The bound counts transfers only: bytes moved divided by the best rate measured here.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, Rate, Spread, disk_read_rates, exit_on_sigterm, provenance, write_result

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.cache.sizing import parse_list, slot_counts
from vllm_spac.core import MoEShape, RequestRows, RowKind, Step, TensorSpec
from vllm_spac.errors import ConfigError, SpacError
from vllm_spac.execution.slots_execution import SlotExecution
from vllm_spac.recording.trace_file import DRAFT, PADDING, PREFILL, ROW_KINDS, Trace
from vllm_spac.storage.base import ExpertStore
from vllm_spac.storage.disk import DiskStore
from vllm_spac.storage.host import HostStore
from vllm_spac.system.host_memory import available_host_bytes, gib
from vllm_spac.tools.traces.replayed import filling, parts
from vllm_spac.tools.traces.simulated_components import build_policy


class _Host(HostStore):
    def close(self) -> None:
        """Does nothing: the store is used by one pool after the other."""


STORES: dict[str, type[ExpertStore]] = {"disk": DiskStore, "host": _Host}
NAME = "w"
_COPIES = 20

EXAMPLES = """[bold]Examples[/]

python benchmarks/replay/run.py run.trace --expert-bytes 1500000 --slots 10%,25%,50% --policy lru,reuse

python benchmarks/replay/run.py run.trace --expert-bytes 9437184 --store host --picture replay.png   [dim]# a GPU[/]
"""

app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode="rich")


@dataclass(frozen=True)
class Case:
    """The result of one policy and number of slots.

    Attributes:
        steps: forwards replayed; ``complete``: whether these are all that were requested. Cases with different steps
            cannot be compared: the steps of prompts come first and need more experts.
        seconds: of those steps; ``stall_seconds``: the part in which a layer waited for experts.
        bytes: bytes moved, without the initial filling of the slots; ``gb_per_second``: bytes over ``seconds``.
        bound_seconds: lower bound for moving these bytes; ``ratio``: seconds / bound, None if nothing moved.
    """

    policy: str
    slots: int
    share: float
    steps: int
    complete: bool
    seconds: float
    stall_seconds: float
    hits: int
    misses: int
    hit_rate: float
    bytes: int
    gb_per_second: float
    bound_seconds: float
    ratio: float | None


@app.command(epilog=EXAMPLES)
def main(
    trace: Annotated[Path, typer.Argument(help="File written by --spac-trace.")],
    expert_bytes: Annotated[int | None, typer.Option(help="Size of an expert, instead of the trace's.", min=8)] = None,
    policy: Annotated[str, typer.Option(help="Policies, each optionally with knobs: name@knob=value.")] = "lru,reuse",
    slots: Annotated[str, typer.Option(help="Sizes of fast memory, as --spac-slots.")] = "10%,25%,50%",
    store: Annotated[str | None, typer.Option(help="disk or host; default: host with a GPU, else disk.")] = None,
    disk_dir: Annotated[Path, typer.Option(help="Scratch folder for experts.")] = Path("/tmp"),
    io_threads: Annotated[int, typer.Option(help="As --spac-io-threads.", min=1, max=64)] = 4,
    prefetch: Annotated[str, typer.Option(help="Prefetcher: off or utility.")] = "off",
    seconds: Annotated[float, typer.Option(help="No step of a policy and size starts after this many.", min=0)] = 10,
    steps: Annotated[int | None, typer.Option(help="Replay only this many steps.", min=1)] = None,
    output: Annotated[Path, typer.Option("--json", help="JSON to write.")] = RESULTS / "replay.json",
    picture: Annotated[Path | None, typer.Option(help="Draw times and hit rates, e.g. replay.png.")] = None,
) -> None:
    """Move the experts that a recorded run needed, and compare the time with the bound."""
    exit_on_sigterm()
    try:
        recorded = Trace.load(trace)
        nbytes = expert_bytes or recorded.facts.expert_bytes
        if nbytes < 8:
            raise ConfigError("the trace does not say how large an expert is; give --expert-bytes")
        store = store or ("host" if torch.cuda.is_available() else "disk")
        if store not in STORES:
            raise ConfigError(f"--store {store}: use disk or host")
        knobs = PrefetchSettings(prefetch=prefetch)
        sizes, policies = slot_counts(slots, recorded.facts), parse_list(policy)
        with packed(recorded, nbytes, store, disk_dir) as held:
            rate = best_rate(store, nbytes, disk_dir, io_threads + 1)
            cases = [
                replay(
                    recorded,
                    held,
                    count,
                    name,
                    knobs,
                    io_threads=io_threads,
                    seconds=seconds,
                    rate=rate.best,
                    steps=steps,
                )
                for count, name in track([(c, n) for c in sizes for n in policies], "replaying", console=_errors)
            ]
    except (SpacError, OSError) as error:
        _errors.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    facts = {"trace": trace.name, "model": asdict(recorded.facts), "expert_bytes": nbytes, "store": store}
    payload = {
        "provenance": provenance(rate if store == "disk" else None),
        **facts,
        "io_threads": io_threads,
        "prefetch": prefetch,
    }
    write_result(output, payload | {"rate": asdict(rate), "cases": [asdict(case) for case in cases]})
    Console().print(_table(cases, rate))
    Console().print(f"written: {output}", highlight=False, soft_wrap=True)
    if picture is not None:
        _draw(cases, picture, f"{trace.name}, experts of {nbytes / 1e6:.1f} MB from {store}")


_errors = Console(stderr=True)


def shape_of(trace: Trace, nbytes: int) -> MoEShape:
    facts = trace.facts
    names = tuple(f"layers.{layer}" for layer in range(facts.layers))
    return MoEShape(names, facts.experts, facts.top_k, {NAME: TensorSpec((nbytes,), torch.uint8)})


@contextmanager
def packed(trace: Trace, nbytes: int, store: str, folder: Path) -> Iterator[ExpertStore]:
    """Provides a store of random experts, each of which begins with its key; removes its files afterwards.

    Raises:
        StoreError: there is no room for them.
    """
    shape = shape_of(trace, nbytes)
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".replay-", dir=folder))
    try:
        held = STORES[store](shape, "replay", scratch)
        held.reserve(shape.total)
        rng = np.random.default_rng(0)
        with Progress(console=_errors, transient=True) as progress:
            for key in progress.track(range(shape.total), description=f"writing {shape.total} experts"):
                content = np.frombuffer(rng.bytes(nbytes), np.uint8).copy()
                content[:8] = _stamp(key)
                held.put(key, {NAME: torch.from_numpy(content)})
        yield held
    finally:
        shutil.rmtree(scratch)


def best_rate(store: str, nbytes: int, folder: Path, readers: int) -> Rate:
    """Measures plain reads by ``readers`` concurrent readers, or plain copies from host memory."""
    if store == "disk":
        return disk_read_rates(folder, nbytes, threads=readers)["parallel"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = max(1, (64 << 20) // nbytes)
    source = torch.ones(count, nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target, speeds = torch.ones(count, nbytes, dtype=torch.uint8, device=device), []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        if device == "cuda":
            torch.cuda.synchronize()
        speeds.append(source.numel() / (time.perf_counter() - start))
    return Rate(Spread.of(speeds), f"copies from host memory to {device}", {"bytes": source.numel()})


def replay(
    trace: Trace,
    store: ExpertStore,
    slots: int,
    policy: str,
    knobs: PrefetchSettings,
    *,
    io_threads: int,
    seconds: float,
    rate: float,
    steps: int | None = None,
) -> Case:
    """Follows ``trace`` with ``slots`` experts in fast memory, initially an equal share of each layer.

    Args:
        seconds: no step starts later.
        rate: bytes per second of the bound.
        steps: maximum number of steps.

    Raises:
        ConfigError: slots that no token can run with, or that there is no memory for; an unknown policy.
        StoreError: an expert could not be read, or another one was.
    """
    facts = trace.facts
    if not facts.top_k <= slots <= facts.total:
        raise ConfigError(f"{slots} slots: use from {facts.top_k} (one token's experts) to {facts.total} (all)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    needed, free = slots * store.shape.expert_bytes, available_host_bytes()
    if device == "cpu" and needed > free:
        raise ConfigError(f"{slots} slots take {gib(needed)}, {gib(free)} of memory are free; use fewer --slots")
    tensors = {NAME: torch.zeros(slots, store.shape.expert_bytes, dtype=torch.uint8, device=device)}
    chosen = build_policy(policy, trace, slots, future=lambda: _future(trace, slots))
    pool = SlotExecution(store.shape, slots, chosen, store, tensors, io_threads=io_threads, path="store", ahead=knobs)
    try:
        for _ in pool.fill():
            pass
        asked = min(trace.steps, steps or trace.steps)
        steps, took = _follow(trace, pool, asked, seconds)
        _check(pool, tensors[NAME])
        counts = pool.snapshot()
    finally:
        pool.close()
    moved, needed = sum(counts["bytes"].values()), counts["hits"] + counts["misses"]
    bound = moved / rate
    return Case(
        policy=policy,
        slots=slots,
        share=slots / facts.total,
        steps=steps,
        complete=steps == asked,
        seconds=took,
        stall_seconds=counts["stall_seconds"],
        hits=counts["hits"],
        misses=counts["misses"],
        hit_rate=counts["hits"] / needed if needed else 1.0,
        bytes=moved,
        gb_per_second=moved / took / 1e9 if took else 0.0,
        bound_seconds=bound,
        ratio=took / bound if bound else None,
    )


def step_of(kinds: np.ndarray) -> Step:
    """Returns the step with the requests of its rows; padding belongs to none."""
    starts = [0] if len(kinds) else []
    for row in range(1, len(kinds)):
        if kinds[row] != DRAFT and not kinds[row] == kinds[row - 1] in (PREFILL, PADDING):
            starts.append(row)
    requests = []
    for start, stop in itertools.pairwise([*starts, len(kinds)]):
        if kinds[start] != PADDING:
            drafts = int((kinds[start:stop] == DRAFT).sum())
            requests.append(RequestRows(start, stop, RowKind(ROW_KINDS[kinds[start]]), drafts))
    return Step(tuple(requests))


def _follow(trace: Trace, pool: SlotExecution, steps: int, seconds: float) -> tuple[int, float]:
    """Replays the trace; returns (steps replayed, their seconds)."""
    bounds = np.searchsorted(trace.record_step, np.arange(trace.steps + 1)).tolist()
    work = [step_of(trace.row_kind[a:b]) for a, b in zip(trace.row_start[:-1], trace.row_start[1:], strict=True)]
    ids = torch.from_numpy(trace.ids.astype(np.int32))
    start = time.perf_counter()
    for number, step in enumerate(work[:steps]):
        if time.perf_counter() - start >= seconds:
            return number, time.perf_counter() - start
        pool.begin_step(step)
        for record in range(bounds[number], bounds[number + 1]):
            rows = ids[trace.record_start[record] : trace.record_start[record + 1]]
            layer = int(trace.record_layer[record])
            pool.observe(layer, rows)
            for _ in () if pool.holds_all else pool.waves(layer, rows):  # as layers do in serving
                pass
        pool.end_forward()
    return steps, time.perf_counter() - start


def _future(trace: Trace, slots: int) -> list[int]:
    work = parts(trace, slots)
    return [*filling(trace, slots), *(key for record in work for part in record for key in part.keys)]


def _stamp(key: int) -> np.ndarray:
    return np.frombuffer(int(key).to_bytes(8, "little"), np.uint8)


def _check(pool: SlotExecution, slots: Tensor) -> None:
    """Raises ``ConfigError`` unless every slot holds the expert that the residency lists, or its read has not ended."""
    heads = slots[:, :8].cpu().numpy()
    for slot, key in enumerate(pool.residency.owner.tolist()):
        if key >= 0 and not pool.residency.is_loading(key) and (heads[slot] != _stamp(key)).any():
            raise ConfigError(f"slot {slot} does not hold expert {key}: the numbers are worth nothing, report this")


def _table(cases: Collection[Case], rate: Rate) -> Table:
    caption = f"best rate: {rate.best / 1e9:.2f} GB/s ({rate.what})"
    if not all(case.complete for case in cases):
        least = min(case.steps for case in cases)
        caption += f"\nstopped cases cannot be compared with others; use --steps {max(1, least)}, or more --seconds"
    table = Table(caption=caption, caption_justify="left")
    names = ("slots", "policy", "steps", "hit rate", "moved", "seconds", "GB/s", "bound s", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for case in cases:
        table.add_row(
            f"{case.slots} ({100 * case.share:.0f}%)",
            case.policy,
            f"{case.steps}" + ("" if case.complete else " (stopped)"),
            f"{100 * case.hit_rate:.1f}%",
            f"{case.bytes / 1e9:.2f} GB",
            f"{case.seconds:.2f}",
            f"{case.gb_per_second:.2f}",
            f"{case.bound_seconds:.2f}",
            "-" if case.ratio is None else f"{case.ratio:.2f}",
        )
    return table


def _draw(cases: list[Case], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from vllm_spac.system.pictures import save_picture

    figure, (times, hits) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    values: list[tuple[Any, Callable[[Case], float]]] = [
        (times, lambda case: 1e3 * case.seconds / max(1, case.steps)),
        (hits, lambda case: 100 * case.hit_rate),
    ]
    for policy in dict.fromkeys(case.policy for case in cases):
        mine = sorted((case for case in cases if case.policy == policy), key=lambda case: case.share)
        shares = [100 * case.share for case in mine]
        for axes, value in values:
            axes.plot(shares, [value(case) for case in mine], marker="o", label=policy)
        bounds = [1e3 * case.bound_seconds / max(1, case.steps) for case in mine]
        times.plot(shares, bounds, linestyle=":", color=times.lines[-1].get_color(), label=f"{policy}: bound")
    times.set(xlabel="experts in fast memory, %", ylabel="ms per step", ylim=(0, None))
    hits.set(xlabel="experts in fast memory, %", ylabel="hit rate, %", ylim=(0, 100))
    times.legend()
    figure.suptitle(title)
    save_picture(figure, path)


if __name__ == "__main__":
    app()
