"""Serves a model whose experts belong to three worker processes, kills one, and compares with stock vLLM.

    make demo-cluster

The model is ``demo.py``'s. Each worker has a third of the MoE layers, with a quarter of their experts in memory. In
the middle of the second prompt one is killed (SIGKILL): its rows are computed from the server's own disk until it is
back. Ends with exit code 1 if a token differs, or if the worker does not return. In float32, as ``demo.py`` says.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

import psutil
from rich.table import Table

from benchmarks import demo
from benchmarks.peers.process_memory import taken
from vllm_spac.methods.od_moe.places import MODULE

_BACK = 180.0  # seconds for a worker to be started again and tested
_PAUSE = 0.5


def worker_server(what: demo.Subject, options: argparse.Namespace) -> demo.Server:
    knobs = {"executor": f"processes@workers={options.workers}", "slots": options.slots}
    flags = [text for name, value in knobs.items() for text in (f"--spac-{name}", str(value))]
    arguments = [str(what.model), "--plugin", "spac", *flags, *demo.common_arguments(what, options)]
    return demo.Server("workers (an engine and its workers)", arguments, demo.environment(), options.timeout)


def worker_processes(server: demo.Server) -> list[psutil.Process]:
    """Returns the server's workers, the first started first."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    found = [child for child in children if MODULE in child.cmdline()]
    return sorted(found, key=lambda process: process.create_time())


def stats(server: demo.Server) -> dict:
    return json.loads(server.get("/spac/stats"))["workers"][0]


def serve_and_kill(server: demo.Server, what: demo.Subject) -> demo.Run:
    """Completes the prompts, and kills a worker when half of the second one's tokens have come."""
    killed: list[int] = []

    def kill_once(tokens: int) -> None:
        if tokens >= what.tokens // 2 and not killed:
            killed.append(worker_processes(server)[-1].pid)
            os.kill(killed[0], signal.SIGKILL)
            demo.console.print(f"\n[bold red]process {killed[0]}, a worker, was killed[/]")

    run = demo.Run()
    for number, prompt in enumerate(what.prompts, 1):
        demo.console.rule(f"{what.name}, prompt {number} of {len(what.prompts)}", align="left", style="dim")
        demo.console.print(prompt, end="\n" if what.chats else "", markup=False, style="dim")
        watched = kill_once if number == 2 else None
        run.replies.append(demo.complete(server, what, prompt, show=True, arrived=watched))
        demo.console.print()
    run.memory = taken(server.process.pid)["total"]
    return run


def wait_for_return(server: demo.Server, what: demo.Subject) -> bool:
    """Generates until every worker computes rows again; returns whether the one that was killed does."""
    end = time.monotonic() + _BACK
    with demo.console.status("until the worker is back"):
        while time.monotonic() < end:
            demo.complete(server, what, what.prompts[0], show=False, tokens=4)
            if any(worker["readmissions"] for worker in stats(server)["expert_workers"].values()):
                return True
            time.sleep(_PAUSE)
    return False


def shares(found: dict) -> Table:
    table = Table(title="rows of layers, by who computed them", title_justify="left")
    for column in ("", "rows", "lost", "returned"):
        table.add_column(column)
    for name, worker in found["expert_workers"].items():
        table.add_row(name, f"{worker['rows']:,}", f"{worker['rows_lost']:,}", str(worker["readmissions"]))
    table.add_row("this server, from its disk", f"{found['worker_rows_elsewhere']:,}", "", "")
    return table


def compare(what: demo.Subject, options: argparse.Namespace) -> int:
    with worker_server(what, options) as server:
        ours = serve_and_kill(server, what)
        back = wait_for_return(server, what)
        again = demo.complete(server, what, what.prompts[0], show=False)
        found = stats(server)
    with demo.stock_server(what, options) as server, demo.console.status("stock vLLM: the same prompts"):
        stock = demo.complete_all(server, what)
    table, equal = demo.comparison(what, ours, stock, [])
    parted = demo.difference(again, stock.replies[0])
    demo.console.print("\n", table, shares(found), sep="")
    demo.console.print(
        f"The first prompt again, with all workers: {'equal' if parted is None else f'differs {parted}'}."
    )
    if not back:
        demo.console.print(f"[red]The worker did not return within {_BACK:.0f} s.[/] Logs: {demo.LOGS}")
    return 0 if equal and parted is None and back else 1


def main() -> int:
    asked = demo.parser(__doc__)
    asked.add_argument("--workers", type=int, default=3, help="expert workers (default: %(default)s)")
    return demo.run("demo-cluster", compare, asked.parse_args())


if __name__ == "__main__":
    sys.exit(main())
