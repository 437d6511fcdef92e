"""``vllm-spac stats``: how a running server does."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from vllm_spac.cli.tables import examples, fitting, print_table, shown
from vllm_spac.errors import SpacError
from vllm_spac.recording.metrics import described, summary
from vllm_spac.tools.machine.server_stats import RequestNumbers, WaitShares, fetch

EXAMPLES = examples("""
vllm-spac stats http://localhost:8000
vllm-spac stats localhost:8000 --watch --interval 1
vllm-spac stats --all   [dim]# every counter, also those that are zero[/]
vllm-spac stats https://example.org --api-key KEY   [dim]# or in VLLM_API_KEY[/]
""")

_BETWEEN = 1.0  # seconds
_GENERATED = "tokens generated"  # of which the table has the rate
_NOTHING = ("-", "0")  # values of requests that nobody needs to see


def stats(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://localhost:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 2.0,
    everything: Annotated[bool, typer.Option("--all", help="Show every counter, also those that are zero.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="The --api-key of the server."),
    ] = None,
) -> None:
    """Show how a running vllm serve --plugin spac does: its speed, and what it has loaded since its start."""
    url = normal_url(url)
    readings = _Readings(url, everything)
    if not watch:
        found = readings.table(fetch(url, api_key))
        if readings.busy:  # two readings give a speed
            time.sleep(_BETWEEN)
            found = readings.table(fetch(url, api_key))
        print_table(Console(), found)
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                table = readings.table(fetch(url, api_key))
                live.update(Group(*fitting(console, table)), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:  # how a watch ends
            return


class _Readings:
    """The tables of a server's counters, one for each reading."""

    def __init__(self, url: str, everything: bool) -> None:
        self._url, self._everything = url, everything
        self._numbers, self._waits = RequestNumbers(), WaitShares()
        self.busy = False  # requests ran at the last reading

    def table(self, counters: dict[str, Any]) -> Table:
        """Returns the table of a reading; ``SpacError`` if it is none."""
        try:
            workers, counted = counters["workers"], counters.get("requests")
            requests = self._numbers.add(counted)
            self.busy = bool(counted and counted["running"])
            if self._everything:
                return _table(self._url, requests, [described(worker) for worker in workers])
            waited = self._waits.add([float(worker.get("stall_seconds", 0.0)) for worker in workers])
            tokens = counted["tokens"] if counted else None
            texts = [summary(worker, tokens, share) for worker, share in zip(workers, waited, strict=True)]
            rates = {name: value for name, value in requests.items() if value not in _NOTHING and name != _GENERATED}
            view = _table(self._url, rates, texts)
            view.caption, view.caption_justify = (
                "loads and waits since the start of the server; --all shows every counter",
                "left",
            )
            return view
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            problem = f"{self._url} returns invalid counters ({error!r}); is it vllm serve --plugin spac?"
            raise SpacError(problem) from error


def _table(url: str, requests: dict[str, str], workers: list[dict[str, str]]) -> Table:
    """The table of what is known of requests and of workers, with one column per worker."""
    view = Table(title=shown(url), title_justify="left", show_header=len(workers) != 1)
    view.add_column("")
    for index in range(len(workers)):
        view.add_column(f"worker {index}", justify="right")
    for name, value in requests.items():  # of the server, whatever the number of its workers
        view.add_row(name, *([value] + [""] * len(workers))[: len(workers)])
    view.add_section()
    for name in dict.fromkeys(name for worker in workers for name in worker):
        view.add_row(shown(name.replace("_", " ")), *(shown(worker.get(name, "")) for worker in workers))
    return view


def normal_url(url: str) -> str:
    """Returns the address of a server as a URL."""
    return (url if "://" in url else f"http://{url}").rstrip("/")
