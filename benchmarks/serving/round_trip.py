"""Measures how long rows take to an expert worker on this machine and back, as ``vllm-spac profile --peer loopback``.

A worker is started and sends rows back in the frames, through the sockets and with the checksums of serving. This is
repeated with a new worker each time; reported is the median of each, by bytes of rows.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, ROOT, exit_on_sigterm, provenance, write_result

from vllm_spac.profiling.fit import fit_network
from vllm_spac.profiling.peer import LOOPBACK, round_trips

AIM = 150e-6  # seconds for a row of 4 KiB
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__)
def main(
    repeats: Annotated[int, typer.Option(min=1, help="Workers, one after the other.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="Of each measurement.")] = 2.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "worker_round_trip.json",
) -> None:
    exit_on_sigterm()
    origin, folder = provenance(), ROOT / ".cache" / "serving"
    folder.mkdir(parents=True, exist_ok=True)
    console = Console()
    with console.status("starting a worker") as status:
        runs = [
            round_trips(LOOPBACK, folder, folder, seconds, lambda text: status.update(text)) for _ in range(repeats)
        ]
    found = {size: [run[size] for run in runs] for size in runs[0]}
    medians = {size: statistics.median(each) for size, each in found.items()}
    rows = [
        {"bytes": size, "median": medians[size], "low": min(each), "high": max(each)} for size, each in found.items()
    ]
    network = fit_network(medians, LOOPBACK)
    result: dict[str, Any] = {
        "rows": rows,
        "aim": AIM,
        "network": {"latency": network.latency, "bandwidth": network.bandwidth},
        "repeats": repeats,
        "seconds": seconds,
        "provenance": origin,
    }
    write_result(output, result)
    table = Table(title="rows to a worker on this machine and back, microseconds", title_justify="left")
    for name in ("bytes", "median of medians", "lowest", "highest"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(f"{row['bytes']:,}", *(f"{1e6 * row[name]:.0f}" for name in ("median", "low", "high")))
    console.print(table)
    console.print(f"wrote {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
