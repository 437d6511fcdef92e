"""``vllm-spac cluster simulate``: replays recorded routing with expert workers, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from vllm_spac.cache.sizing import parse_list, slot_counts
from vllm_spac.cli.tables import compact, print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_spac.profiling.costs import Costs, Network
    from vllm_spac.simulation.workers import LayerTimes
    from vllm_spac.traces.format import Trace

EXAMPLES = """[bold]Examples[/]

vllm-spac profile --peer tcp://10.0.0.7:5555 --model MODEL --output here.json

vllm-spac cluster simulate run.trace --profile here.json --workers 1,2,4 --slots 25%,50%

vllm-spac cluster simulate run.trace --profile here.json --latency 150e-6 --bandwidth 117e6   [dim]# another network[/]

vllm-spac cluster simulate run.trace --profile here.json --workers 2,4 --divide workers --workers-per-layer 2

vllm-spac cluster simulate run.trace --profile here.json --divide engine,cpu,workers --engine-slots 25%
"""
_WHOLE = ("hit rate", "waits for loads")
_DIVIDED = ("hits", "loads", "CPU", "sent", "loads there")


def simulate(
    trace: Annotated[Path, typer.Argument(help="File written by --spac-trace.")],
    profile: Annotated[str, typer.Option(help="Costs of a machine like the workers': a file, or rtx4090 or h200.")],
    workers: Annotated[str, typer.Option(help="Numbers of workers.")] = "1,2,4",
    slots: Annotated[str, typer.Option(help="Slots of each worker, as --spac-slots.")] = "25%,50%,100%",
    latency: Annotated[
        float | None, typer.Option(min=0, help="Seconds one way.", show_default="that of the profile")
    ] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1, help="Bytes per second.", show_default="that of the profile")
    ] = None,
    hidden: Annotated[int, typer.Option(min=1, help="Width of a row of 16 bits.")] = 2048,
    expert_bytes: Annotated[int | None, typer.Option(help="Size of an expert, instead of the trace's.", min=1)] = None,
    divide: Annotated[
        str | None,
        typer.Option(
            help="Divide each layer's experts among these: engine (with slots), cpu, workers. An engine divides them "
            "among workers only.",
            show_default="whole layers at workers",
        ),
    ] = None,
    engine_slots: Annotated[
        str | None, typer.Option(help="With --divide, slots of the engine, as --spac-slots.", show_default="25%")
    ] = None,
    per_layer: Annotated[
        int | None,
        typer.Option("--workers-per-layer", min=1, help="With --divide, workers that have a layer.", show_default="1"),
    ] = None,
) -> None:
    """Show what expert workers would achieve on a recorded run: hits, waits, time per step. Calculated."""
    from vllm_spac.profiling.costs import Costs
    from vllm_spac.simulation.divided import Setup, divided
    from vllm_spac.simulation.workers import LayerTimes
    from vllm_spac.traces.format import Trace

    costs, recorded = Costs.read(profile), Trace.load(trace)
    facts = recorded.facts
    among, size = _among(divide, engine_slots, per_layer), per_layer or 1
    nbytes = expert_bytes or facts.expert_bytes
    if not nbytes:
        raise ConfigError(f"{trace} does not say how large an expert is; add --expert-bytes N")
    network, times = _network(costs, latency, bandwidth), LayerTimes.of(costs, facts, nbytes)
    caption = (
        f"{1e6 * network.latency:.0f} us one way, {network.bandwidth / 1e9:.2f} GB per second; of a layer, in ms: main "
        f"process {1e3 * times.main:.3f}, a row's experts {1e3 * times.compute:.3f}, a load {1e3 * times.load:.3f}"
    )
    title = f"{shown(trace)} at expert workers like {shown(costs.name)} ({costs.provenance.how}), calculated"
    own = 0.0
    if among:
        given = slot_counts(engine_slots or "25%", facts)
        if len(given) != 1:
            raise ConfigError(f"--engine-slots {engine_slots}: use one value, as 25%")
        own = given[0] / facts.total
        title += f"; experts divided among {', '.join(among)}"
        caption += (
            "\nof all experts: hits and loads of the engine, the CPU's, those sent to workers, and which of these they "
            "load; results are exact up to rounding only"
        )
        if set(among) != {"workers"}:
            caption += "; no engine divides layers with workers and has slots or a CPU for them, too"
    layers = exact = 0
    heads = ("workers", "slots", *(_DIVIDED if among else _WHOLE), "ms per step", "steps per second")
    rows: list[Sequence[str]] = []
    for count in _counts(workers, facts.layers):
        if count % size:
            raise ConfigError(
                f"--workers-per-layer {size}: {count} workers do not form such groups; use --workers {size}"
            )
        for number in slot_counts(slots, facts):
            share = min(1.0, number / facts.total)
            if among:
                setup = Setup(among, count, size, share, own, network, 2 * hidden, nbytes)
                run = divided(recorded, costs, setup)
                counts = run.hits, run.loads, run.cpu, run.sent, run.waited
                cells, seconds = [f"{100 * n / run.experts:.0f}%" for n in counts], run.seconds
                layers, exact = layers + run.layers, exact + run.exact
            else:
                cells, seconds = _whole(recorded, count, share, network, times, 2 * hidden)
            step = seconds / recorded.steps
            rows.append((str(count), f"{100 * share:.0f}%", *cells, f"{1e3 * step:.2f}", f"{1 / step:.1f}"))
        rows.append(())
    table = compact(title, heads, rows)
    table.caption = caption + (f"; fastest division known in {100 * exact / layers:.1f}% of layers" if among else "")
    print_table(Console(), table)


def _whole(
    trace: Trace, workers: int, share: float, network: Network, times: LayerTimes, row_bytes: int
) -> tuple[list[str], float]:
    """Returns (cells of ``_WHOLE``, seconds) of layers that are computed at their workers."""
    from vllm_spac.simulation.workers import cached

    run = cached(trace, workers, share, network, times, row_bytes)
    return [f"{100 * run.hits / (run.hits + run.misses):.1f}%", f"{run.stalls:.2f} s"], run.seconds


def _among(divide: str | None, engine_slots: str | None, per_layer: int | None) -> list[str]:
    """Returns what experts are divided among; empty if they are not.

    Raises:
        ConfigError: an unknown name, no workers, or an option that has no effect.
    """
    from vllm_spac.simulation.divided import PROCESSORS

    found = [] if divide is None else parse_list(divide)
    if divide is not None and (not set(found) <= set(PROCESSORS) or "workers" not in found):
        raise ConfigError(
            f"--divide {divide}: use workers and any of engine, cpu, as in engine,cpu,workers; for an engine without "
            "workers use vllm-spac simulate"
        )
    if per_layer is not None and not found:
        raise ConfigError("--workers-per-layer has no effect without --divide; add --divide workers")
    if engine_slots is not None and "engine" not in found:
        raise ConfigError(
            "--engine-slots has no effect unless the engine computes experts; add --divide engine,workers"
        )
    return [name for name in PROCESSORS if name in found]


def _network(costs: Costs, latency: float | None, bandwidth: float | None) -> Network:
    from vllm_spac.profiling.costs import Network

    known = costs.network
    if known is None and (latency is None or bandwidth is None):
        raise ConfigError(
            f"the profile {costs.name} has no network; run vllm-spac profile --peer ADDRESS, or give --latency SECONDS "
            "and --bandwidth BYTES_PER_SECOND"
        )
    found = {"latency": latency, "bandwidth": bandwidth}
    given = {name: value for name, value in found.items() if value is not None}
    return Network(**given) if known is None else known.model_copy(update=given)


def _counts(text: str, layers: int) -> list[int]:
    found = parse_list(text)
    if not found or not all(item.isdigit() and 1 <= int(item) <= layers for item in found):
        raise ConfigError(f"--workers {text}: use numbers from 1 to {layers}, the layers of the trace, as in 1,2,4")
    return list(map(int, found))
