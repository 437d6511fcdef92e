"""Measures how long rows take to an expert worker on this machine and back, as ``vllm-spac profile --peer loopback``.

A worker is started and sends rows back in the frames, through the sockets and with the checksums of serving. This is
repeated with a new worker each time; reported is the median of each, by bytes of rows. Beside it, what zmq alone takes:
a process that sends each message back as it is.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import zmq
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, ROOT, exit_on_sigterm, provenance, write_result

from vllm_spac.decisions.costs import fit_network
from vllm_spac.system.timing import median
from vllm_spac.tools.machine.peer import LOOPBACK, round_trips

AIM = 150e-6  # seconds for a row of 4 KiB
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


def send_back(port: Any) -> None:
    """Body of a process that sends back what it receives until it is ended; tells its port to the pipe ``port``."""
    socket = zmq.Context().socket(zmq.ROUTER)
    port.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while True:
        socket.send_multipart(socket.recv_multipart())


def zmq_alone(nbytes: int, seconds: float) -> float:
    """Returns the median seconds of a round trip of one message to another process."""
    spawned, (here, there) = multiprocessing.get_context("spawn"), multiprocessing.Pipe()
    process = spawned.Process(target=send_back, args=(there,), daemon=True)
    process.start()
    try:
        socket: zmq.Socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{here.recv()}")
        message = os.urandom(nbytes)

        def there_and_back() -> None:
            socket.send(message)
            socket.recv()

        found = median(there_and_back, seconds)
        socket.close(linger=0)
        return found
    finally:
        process.terminate()
        process.join()


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
        alone = [zmq_alone(min(runs[0]), seconds) for _ in range(repeats)]
    found = {size: [run[size] for run in runs] for size in runs[0]}
    medians = {size: statistics.median(each) for size, each in found.items()}
    rows = [
        {"bytes": size, "median": medians[size], "low": min(each), "high": max(each)} for size, each in found.items()
    ]
    network = fit_network(medians, LOOPBACK)
    result: dict[str, Any] = {
        "rows": rows,
        "aim": AIM,
        "zmq_alone": {"bytes": min(runs[0]), "median": statistics.median(alone), "low": min(alone), "high": max(alone)},
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
    console.print(f"zmq alone, {min(runs[0]):,} bytes: {1e6 * statistics.median(alone):.0f}")
    console.print(f"wrote {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
