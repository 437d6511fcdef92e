"""Shows rows as a table on the terminal."""

from __future__ import annotations

from common import Spread
from rich import box
from rich.table import Table
from summary import Row

_COLUMNS = (
    "configuration",
    "tokens",
    "tokens/s",
    "x stock",
    "TTFT ms",
    "TPOT ms",
    "hits",
    "misses",
    "on CPU",
    "ahead",
    "MiB",
    "stall s",
)


def table(rows: list[Row], batch: int, title: str) -> Table:
    """Returns the table of one batch size.

    An exact configuration whose tokens differ from stock's is red and has no speeds. Where tokens may differ, the
    number of equal requests is next to the verdict.
    """
    view = Table(title=f"{title}, batch {batch}", title_justify="left", box=box.SIMPLE_HEAD)
    for name in _COLUMNS:
        view.add_column(name, justify="left" if name in ("configuration", "tokens") else "right", no_wrap=True)
    for row in (row for row in rows if row.batch == batch):
        if row.is_measured:
            colour = "green" if row.verdict == "same" else "yellow"
            equal = "" if row.verdict == "same" else f" {row.equal_requests}/{row.requests}"
            view.add_row(row.configuration.label, f"[{colour}]{row.verdict}{equal}[/]", *_speeds(row))
        else:
            view.add_row(row.configuration.label, row.verdict, style="red")
    return view


def reasons(rows: list[Row]) -> list[str]:
    """Returns why each red row has no speeds."""
    return [f"{row.configuration.label}, batch {row.batch}: {row.why}" for row in rows if not row.is_measured]


def _speeds(row: Row) -> list[str]:
    rate, counters = row.rate, row.counters
    over_stock = "-" if row.ratio_to_stock is None else f"{row.ratio_to_stock:.2f}"
    cells = [f"{rate.median:.1f} [{rate.low:.1f}-{rate.high:.1f}]", over_stock]
    cells += [_milliseconds(row.ttft), _milliseconds(row.tpot)]
    if row.configuration.is_stock:
        return cells
    return [
        *cells,
        "-" if row.hit_rate is None else f"{100 * row.hit_rate:.1f}%",
        f"{counters['misses']:.0f}",
        f"{counters['cpu_experts']:.0f}",
        f"{counters['prefetches']:.0f}",
        f"{counters['bytes'] / 2**20:.1f}",
        f"{counters['stall_seconds']:.2f}",
    ]


def _milliseconds(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.median:.1f}"
