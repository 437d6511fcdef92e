"""Shared by all benchmarks: provenance of results, and the rates of this machine's memory and disk."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_spac.system.files import replacing
from vllm_spac.system.host_blocks import HUGE_PAGE, huge_pages
from vllm_spac.system.machine import UNKNOWN, code, command, machine, now, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TRACES = ROOT / "benchmarks" / "traces"
TOY = ROOT / "benchmarks" / "toy"
PAGE = 4096
_REQUIRED = ("command", "git", "versions", "machine", "date")
_FILES_BYTES = 256 << 20  # of one disk measurement, all its files
_MAX_FILES = 256


class ProvenanceError(RuntimeError):
    """A result would be written without its provenance."""


def provenance(disk: Rate | None = None) -> dict:
    """Returns the provenance of the numbers of this process.

    Args:
        disk: the measured read rate of the disk, if there is one.

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
        "machine": machine() | {"disk_read": asdict(disk) if disk else None},
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


@dataclass(frozen=True)
class Rate:
    """A measured rate in bytes per second, and how it was measured."""

    bytes_per_second: Spread
    what: str
    details: dict = field(default_factory=dict)

    @property
    def best(self) -> float:
        """The fastest repeat: the rate of the machine without other load."""
        return self.bytes_per_second.high


def memory_copy_rate(size: int = 256 << 20, threads: int | None = None, repeats: int = 5, seconds: float = 3.0) -> Rate:
    """Measures the bytes per second of a memory-to-memory copy; each byte is read once and written once.

    Args:
        size: bytes of the source, divided between the threads; must exceed the caches, which are measured otherwise.
        threads: concurrent copies; default: the cores that this process may use.
        repeats: maximum number of repeats.
        seconds: no repeat starts after this time.
    """
    threads = threads or len(os.sched_getaffinity(0))
    source = np.ones(size, np.uint8)
    target = np.zeros_like(source)  # written once, so that no page is missing when the clock runs
    parts = list(zip(np.array_split(target, threads), np.array_split(source, threads), strict=True))
    with ThreadPoolExecutor(threads) as pool:
        rates = _repeat(lambda: list(pool.map(lambda part: np.copyto(*part), parts)), size, repeats, seconds)
    return Rate(Spread.of(rates), "numpy copy, memory to memory", {"bytes": size, "threads": threads})


def disk_read_rates(
    folder: Path, file_bytes: int, threads: int = 4, repeats: int = 5, seconds: float = 5.0
) -> dict[str, Rate]:
    """Measures the read rates of the disk under ``folder``, bypassing the page cache, one whole file after the other.

    Args:
        folder: where files are written, read and removed again.
        file_bytes: size of a file: that of one packed expert.
        threads: readers of the parallel measurement.
        repeats: maximum number of repeats.
        seconds: no repeat starts after this time; both measurements share it.

    Returns:
        ``sequential`` (one reader) and ``parallel``. ``details["direct"]`` is False on a file system without
        direct I/O, where pages are dropped after each read instead.
    """
    count = max(threads, min(_MAX_FILES, _FILES_BYTES // file_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".rate-", dir=folder) as scratch:
        paths = _write_files(Path(scratch), count, file_bytes)
        direct = _opens_direct(paths[0])
        facts = {"file_bytes": file_bytes, "files": count, "direct": direct}
        rates = {}
        for name, readers in (("sequential", 1), ("parallel", threads)):
            speeds = _read_speeds(paths, file_bytes, direct, readers, repeats, seconds / 2)
            rates[name] = Rate(Spread.of(speeds), f"{name} reads of whole files", facts | {"threads": readers})
    return rates


def _read_speeds(
    paths: Sequence[Path], size: int, direct: bool, readers: int, repeats: int, seconds: float
) -> list[float]:
    shares = [paths[reader::readers] for reader in range(readers)]
    with ThreadPoolExecutor(readers) as pool:
        return _repeat(
            lambda: list(pool.map(lambda share: _read_files(share, size, direct), shares)),
            len(paths) * size,
            repeats,
            seconds,
        )


def _repeat(job: Callable[[], object], size: int, repeats: int, seconds: float) -> list[float]:
    """Returns the bytes per second of each repeat of ``job``, which moves ``size`` bytes; at least one."""
    rates: list[float] = []
    begin = time.perf_counter()
    while len(rates) < repeats and (not rates or time.perf_counter() - begin < seconds):
        start = time.perf_counter()
        job()
        rates.append(size / (time.perf_counter() - start))
    return rates


def _write_files(folder: Path, count: int, size: int) -> list[Path]:
    """Writes files that are on the disk and not in the page cache."""
    data = np.random.default_rng(0).bytes(size)  # not zeros, which a disk may compress
    paths = [folder / f"{index:04d}" for index in range(count)]
    for path in paths:
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return paths


def _opens_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # EINVAL, e.g. tmpfs; the caller records it in the result
        return False
    return True


def _read_files(paths: Sequence[Path], size: int, direct: bool) -> None:
    # Page-aligned, as direct I/O requires, and in huge pages, as slots are: scattered ones halve the rate.
    buffer = huge_pages(max(HUGE_PAGE, -(-size // PAGE) * PAGE)).numpy()[: -(-size // PAGE) * PAGE].data
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            done = 0
            while done < size:
                count = os.preadv(descriptor, [buffer[done:]], done)
                if count == 0:
                    raise OSError(f"{path.name} ends after {done} of {size} bytes")
                done += count
            if not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def over_exact(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    """Returns the speed of each budgeted row over that of the same drafts at the same temperature without a budget.

    Args:
        rows: ``kind`` and number of ``drafts``, ``temperature``, ``budget`` (empty: none) and ``speed``.

    Returns:
        For each row; None for rows without drafts or budget.
    """
    key = itemgetter("kind", "drafts", "temperature")
    exact = {key(row): row["speed"] for row in rows if row.get("drafts") and not row["budget"]}
    return [row["speed"] / exact[key(row)] if row.get("drafts") and row["budget"] else None for row in rows]
