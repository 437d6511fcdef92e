"""Shared by all benchmarks: provenance of results, and how they are shown."""

from __future__ import annotations

import hashlib
import json
import signal
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac.system.files import replacing
from vllm_spac.system.machine import UNKNOWN, code, command, machine, now, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRACES = ROOT / "benchmarks" / "traces"
TOY = ROOT / "benchmarks" / "toy"
_REQUIRED = ("command", "git", "versions", "machine", "date")


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
    Console(width=max(160, Console().width)).print(table)


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


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that engines and scratch files are cleaned up."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


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
