"""``vllm-spac stats``: the counters of a running server as a table."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from vllm_spac.errors import SpacError
from vllm_spac.memory import gib

EXAMPLES = """[bold]Examples[/]

vllm-spac stats http://localhost:8000

vllm-spac stats localhost:8000 --watch --interval 1
"""

_TIMEOUT_SECONDS = 10
_ORDER = (
    "mode",
    "execution",
    "store",
    "policy",
    "layers",
    "experts",
    "slots",
    "resident",
    "slot_bytes",
    "expert_bytes",
)


def stats(
    url: Annotated[str, typer.Argument(help="Where the server listens.")] = "http://localhost:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 2.0,
) -> None:
    """Show the counters of a running vllm serve --plugin spac."""
    url = _normal(url)
    if not watch:
        Console().print(table(url, fetch(url)))
        return
    with Live(table(url, fetch(url)), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                live.update(table(url, fetch(url)), refresh=True)
        except KeyboardInterrupt:  # how a watch ends
            return


def fetch(url: str) -> list[dict[str, Any]]:
    """The counters of each worker of the server at ``url``.

    Raises:
        SpacError: no server answers, it is not vLLM's, or it runs without the plugin.
    """
    address = f"{url}/spac/stats"
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as response:
            workers = json.load(response)["workers"]
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise SpacError(f"the server at {url} runs without spac; start it with --plugin spac") from error
        raise SpacError(f"{address} answers {error.code} {error.reason}; see the log of that server") from error
    except urllib.error.URLError as error:
        raise SpacError(f"no server answers at {url} ({error.reason}); is vllm serve running there?") from error
    except TimeoutError as error:
        raise SpacError(f"the server at {url} does not answer within {_TIMEOUT_SECONDS} s") from error
    except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException) as error:
        raise SpacError(f"what listens at {url} is not vllm serve: {address} gives no counters") from error
    return workers


def table(url: str, workers: list[dict[str, Any]]) -> Table:
    """One column a worker."""
    view = Table(title=escape(url), title_justify="left")
    view.add_column("")
    for index in range(len(workers)):
        view.add_column(f"worker {index}", justify="right")
    described = [_describe(worker) for worker in workers]
    for name in dict.fromkeys(name for worker in described for name in worker):
        view.add_row(name, *(worker.get(name, "") for worker in described))
    return view


def _describe(worker: dict[str, Any]) -> dict[str, str]:
    """Name -> text for people; counters that this version does not know keep their names."""
    rest = {name: value for name, value in worker.items() if name not in _ORDER}
    shown = {name: _text(name, worker[name]) for name in _ORDER if name in worker}
    asked = worker.get("hits", 0) + worker.get("misses", 0)
    shown["hit rate"] = f"{100 * worker['hits'] / asked:.1f}%" if asked else "-"
    for name, value in rest.items():
        if isinstance(value, dict):
            shown |= {f"{name}: {key}": _text(name, number) for key, number in sorted(value.items())}
        else:
            shown[name] = _text(name, value)
    return shown


def _text(name: str, value: Any) -> str:
    if name == "bytes" or name.endswith("_bytes"):
        return gib(value)
    if name.endswith("_seconds"):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _normal(url: str) -> str:
    return (url if "://" in url else f"http://{url}").rstrip("/")
