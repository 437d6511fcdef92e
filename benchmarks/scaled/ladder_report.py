"""Shows the rows of a ladder as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

_TIMES = ("slots", "rung", "TPOT ms [95 %]", "x first [95 %]", "of resident")
_COUNTS = ("hits", "loads", "on CPU", "ahead", "waits ms", "late ms", "late CPU", "= resident", "= first")


def table(rows: Sequence[dict], title: str) -> Table:
    """Returns the table of all rows; loads, experts on the CPU or ahead of need and waits are per step."""
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in (*_TIMES, *_COUNTS):
        view.add_column(name, justify="left" if name == "rung" else "right", no_wrap=True)
    for row in rows:
        counters, own = row["counters"], row["counters"]["own"]
        steps = max(1, sum(counters["steps"].values()))
        used = counters["hits"] + counters["misses"] + counters["cpu_experts"]
        view.add_row(
            row["slots"] if row["rung"] != "resident" else "100%",
            row["rung"],
            _spread(row, "tpot_median", "tpot_interval", 1e3),
            _spread(row, "speedup", "speedup_interval"),
            f"{100 * row['share_of_resident']:.0f}%",
            f"{100 * counters['hits'] / used:.1f}%" if used else "",
            *(f"{counters[name] / steps:.1f}" for name in ("loads", "cpu_experts", "prefetches")),
            f"{1e3 * (counters['stall_seconds'] + counters['cpu_wait_seconds']) / steps:.1f}",
            *(_late(own, kind) for kind in ("load", "cpu")),
            *(_equal(row, name) for name in ("resident", "first")),
        )
    return view


def _spread(row: dict, median: str, interval: str, unit: float = 1) -> str:
    low, high = row[interval]
    return f"{unit * row[median]:.2f} [{unit * low:.2f} - {unit * high:.2f}]"


def _late(own: dict, kind: str) -> str:
    """Returns by how many milliseconds deadlines were exceeded in the mean."""
    count = own[f"{kind}_waits"] + own[f"{kind}_missed"]
    late = own[f"{kind}_overshoot_seconds"] + own[f"{kind}_missed_seconds"]
    return f"{1e3 * late / count:.2f}" if count else ""


def _equal(row: dict, name: str) -> str:
    count, turns = row[f"equal_to_{name}"], row["turns"]
    text = f"{count}/{turns}"
    return text if count == turns else f"[{'yellow' if row['rounds'] else 'red'}]{text}[/]"
