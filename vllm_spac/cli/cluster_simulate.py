"""``vllm-spac cluster simulate``: replays recorded routing with expert workers, on a virtual clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_spac.cache.sizing import parse_list, slot_counts
from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError

if TYPE_CHECKING:
    from vllm_spac.profiling.costs import Costs, Network

EXAMPLES = """[bold]Examples[/]

vllm-spac profile --peer tcp://10.0.0.7:5555 --model MODEL --output here.json

vllm-spac cluster simulate run.trace --profile here.json --workers 1,2,4 --slots 25%,50%

vllm-spac cluster simulate run.trace --profile here.json --latency 150e-6 --bandwidth 117e6   [dim]# another network[/]
"""


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
) -> None:
    """Show what expert workers would achieve on a recorded run: hits, waits, time per step. Calculated."""
    from vllm_spac.profiling.costs import Costs
    from vllm_spac.simulation.workers import LayerTimes, cached
    from vllm_spac.traces.format import Trace

    costs, recorded = Costs.read(profile), Trace.load(trace)
    facts = recorded.facts
    nbytes = expert_bytes or facts.expert_bytes
    if not nbytes:
        raise ConfigError(f"{trace} does not say how large an expert is; add --expert-bytes N")
    network, times = _network(costs, latency, bandwidth), LayerTimes.of(costs, facts, nbytes)
    caption = (
        f"{1e6 * network.latency:.0f} us one way, {network.bandwidth / 1e9:.2f} GB per second; of a layer, in ms: main "
        f"process {1e3 * times.main:.3f}, a row's experts {1e3 * times.compute:.3f}, a load {1e3 * times.load:.3f}"
    )
    title = f"{shown(trace)} at expert workers like {shown(costs.name)} ({costs.provenance.how}), calculated"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("workers", "slots", "hit rate", "waits for loads", "ms per step", "steps per second"):
        table.add_column(name, justify="right")
    for count in _counts(workers, facts.layers):
        for number in slot_counts(slots, facts):
            run = cached(recorded, count, min(1.0, number / facts.total), network, times, 2 * hidden)
            table.add_row(
                str(count),
                f"{100 * number / facts.total:.0f}%",
                f"{100 * run.hits / (run.hits + run.misses):.1f}%",
                f"{run.stalls:.2f} s",
                f"{1e3 * run.seconds / run.steps:.2f}",
                f"{run.per_second:.1f}",
            )
        table.add_section()
    Console().print(table)


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
