"""``vllm-spac stats``: the counters of a running server as a table."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from vllm_spac.cli.tables import fitting, print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import SpacError
from vllm_spac.metrics import described
from vllm_spac.system.request_numbers import RequestNumbers
from vllm_spac.system.server_stats import fetch

EXAMPLES = """[bold]Examples[/]

vllm-spac stats http://localhost:8000

vllm-spac stats localhost:8000 --watch --interval 1

vllm-spac stats https://example.org --api-key KEY   [dim]# or in VLLM_API_KEY, or OPENAI_API_KEY[/]
"""


def stats(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://localhost:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 2.0,
    api_key: Annotated[
        str | None,
        typer.Option(envvar=["VLLM_API_KEY", "OPENAI_API_KEY"], show_envvar=True, help="The --api-key of the server."),
    ] = None,
) -> None:
    """Show the counters of a running vllm serve --plugin spac."""
    url, numbers = _normal(url), RequestNumbers()
    if not watch:
        print_table(Console(), _table(url, fetch(url, api_key), numbers))
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                table = _table(url, fetch(url, api_key), numbers)
                live.update(Group(*fitting(console, table)), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:  # how a watch ends
            return


def _table(url: str, counters: dict[str, Any], numbers: RequestNumbers) -> Table:
    try:
        return table(url, counters["workers"], numbers.add(counters.get("requests")))
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise SpacError(f"{url} returns invalid counters ({error!r}); is it vllm serve --plugin spac?") from error


def table(url: str, workers: list[dict[str, Any]], requests: dict[str, str]) -> Table:
    """The table of what is known of requests, and of the counters, with one column per worker."""
    view = Table(title=shown(url), title_justify="left")
    view.add_column("")
    for index in range(len(workers)):
        view.add_column(f"worker {index}", justify="right")
    texts = [described(worker) for worker in workers]
    for name, value in requests.items():  # of the server, whatever the number of its workers
        view.add_row(name, *([value] + [""] * len(workers))[: len(workers)])
    view.add_section()
    for name in dict.fromkeys(name for worker in texts for name in worker):
        view.add_row(shown(name), *(shown(worker.get(name, "")) for worker in texts))
    return view


def _normal(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")
