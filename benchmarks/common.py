"""Shared by all benchmarks: provenance of results, and how they are shown."""

from __future__ import annotations

import functools
import hashlib
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac.errors import SpacError
from vllm_spac.system.files import replacing
from vllm_spac.system.machine import UNKNOWN, code, command, machine, now, versions
from vllm_spac.tools.tuning.measurer import MeasuringError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRACES = ROOT / "benchmarks" / "traces"
TOY = ROOT / "benchmarks" / "toy"
_REQUIRED = ("command", "git", "versions", "machine", "date")


class PlanError(ValueError):
    """The run cannot be made as requested; the message names the option to change."""


class ProvenanceError(RuntimeError):
    """A result would be written without its provenance."""


def provenance() -> dict:
    """Returns the provenance of the numbers of this process.

    Call it before measuring. If git cannot name the commit, this is printed at once and recorded in the result.
    """
    found = code(ROOT)
    if "why" in found:
        named = "" if found["commit"] == UNKNOWN else ", named by SPAC_COMMIT"
        print(f"provenance: {found['commit']}{named} ({found['why']})", file=sys.stderr)
    return {
        "command": command(["python", *sys.argv], ROOT),
        "git": found,
        "versions": versions(),
        "machine": machine(),
        "date": now(),
    }


def write_result(path: Path, payload: dict) -> None:
    """Writes ``payload`` as JSON atomically: a killed process leaves the earlier file intact.

    Raises:
        ProvenanceError: ``payload["provenance"]`` is not what ``provenance`` returns.
    """
    known = payload.get("provenance")
    missing = [name for name in _REQUIRED if not (isinstance(known, dict) and known.get(name))]
    if missing:
        raise ProvenanceError(f"{path.name} is not written: its provenance has no {', '.join(missing)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(payload, indent=1, allow_nan=False) + "\n"
    with replacing(path) as partial:
        partial.write_text(text)


def show(title: str, rows: Iterable[Mapping[str, Any]], *columns: str) -> None:
    """Prints ``rows`` as a table.

    Args:
        columns: keys; ``a.b`` is the entry b of a. An interval is shown as its ends, more numbers as their median.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_cell(row, column) for column in columns))
    wide(160).print(table)


def _cell(row: Mapping[str, Any], column: str) -> str:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [f"{number:.4g}" for number in (value if len(value) == 2 else [statistics.median(value)])]
        return " - ".join(numbers)
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def progress() -> Progress:
    """Returns a bar with what is done, how many of how many, and the time; on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


class Script(typer.Typer):
    """A script of one command: ``@script.main`` makes a function it.

    SIGTERM raises SystemExit, so that engines and scratch files are cleaned up. What cannot be made as requested is one
    line and ends with 2; an engine that fails is one line, too, and ends with 1.

    Args:
        text: its help; default: what the function says. ``examples``: below it.
    """

    def __init__(self, text: str | None = None, examples: str = "") -> None:
        super().__init__(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)
        self._text, self._examples = text, examples

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return super().__call__(*args, **kwargs)

    def main(self, function: Callable[..., None]) -> Callable[..., None]:
        """Makes ``function`` the command, and returns it as it is."""

        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> None:
            try:
                function(*args, **kwargs)
            except (PlanError, SpacError, MeasuringError) as error:
                Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
                raise typer.Exit(1 if isinstance(error, MeasuringError) else 2) from error

        self.command(help=self._text, epilog=self._examples)(command)
        return function


def wide(least: int = 140) -> Console:
    """Returns a terminal of ``least`` columns or more: narrower, tables cannot be read."""
    return Console(width=max(least, Console().width))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def trace_files(given: Sequence[Path] | None) -> list[Path]:
    """Returns the traces in ``given``, files and folders of them; default: those of benchmarks/traces."""
    return [file for path in given or [TRACES] for file in (sorted(path.glob("*.trace")) if path.is_dir() else [path])]


def is_toy(model: Path) -> bool:
    """Returns whether ``model`` is a toy model, inflated or not, whose numbers must be labelled as such."""
    return model.resolve().is_relative_to(TOY) or "toy" in model.resolve().parts


@dataclass(frozen=True)
class Spread:
    """Median and range of the repeats of one measurement."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))


def over_exact(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Returns the speed of each budgeted row over that of the same drafts at the same temperature without a budget.

    Args:
        rows: ``kind`` and number of ``drafts``, ``temperature``, ``budget`` (empty: none) and ``speed``; ``drafter``,
            if there are several.

    Returns:
        For each row; None for rows without drafts or budget.
    """

    def key(row: Mapping[str, Any]) -> tuple:
        return row["kind"], row["drafts"], row.get("drafter"), row["temperature"]

    exact = {key(row): row["speed"] for row in rows if row.get("drafts") and not row["budget"]}
    return [row["speed"] / exact[key(row)] if row.get("drafts") and row["budget"] else None for row in rows]
