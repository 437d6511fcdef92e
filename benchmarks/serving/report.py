"""Shows rows as a table on the terminal and as a picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from common import Spread
from rich import box
from rich.table import Table
from summary import Row

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLUMNS = (
    "configuration",
    "tokens",
    "tokens/s",
    "x stock",
    "dropped",
    "TTFT ms",
    "TPOT ms",
    "hits",
    "misses",
    "on CPU",
    "ahead",
    "MiB",
    "stall s",
    "bound",
    "T/bound",
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
    cells = [f"{rate.median:.1f} [{rate.low:.1f}-{rate.high:.1f}]", _number(row.ratio_to_stock, ".2f")]
    cells += [f"{100 * row.dropped_share:.1f}%" if row.dropped_share is not None else ""]
    cells += [_milliseconds(row.ttft), _milliseconds(row.tpot)]
    if row.configuration.is_stock:
        return cells
    cells += [
        "-" if row.hit_rate is None else f"{100 * row.hit_rate:.1f}%",
        f"{counters['misses']:.0f}",
        f"{counters['cpu_experts']:.0f}",
        f"{counters['prefetches']:.0f}",
        f"{counters['bytes'] / 2**20:.1f}",
        f"{counters['stall_seconds']:.2f}",
    ]
    return [*cells, _number(row.bound_tokens_per_second, ".1f"), _number(row.ratio_to_bound, ".2f")]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _milliseconds(spread: Spread | None) -> str:
    return "-" if spread is None else f"{1e3 * spread.median:.1f}"


def picture(rows: list[Row], batches: list[int], title: str, path: Path) -> None:
    """Draws speed and, below it, hit rate over the share of experts in fast memory; one column per batch size."""
    figure, axes = plt.subplots(2, len(batches), figsize=(5.5 * len(batches), 7), sharex=True, squeeze=False)
    for column, batch in enumerate(batches):
        here = [row for row in rows if row.batch == batch and row.is_measured]
        _speed_panel(axes[0][column], here, batch)
        _hit_panel(axes[1][column], here)
    axes[0][0].set_ylabel("tokens/s (median, low to high)")
    axes[1][0].set_ylabel("hit rate, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="lower center", ncols=3, fontsize="small", frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.04 + 0.025 * (len(handles) // 3), 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _series(rows: list[Row]) -> dict[tuple[str | None, str], list[Row]]:
    """Returns (policy, speculation) -> rows by cache ratio; all experts resident is the end of every policy's line."""
    served = [row for row in rows if not row.configuration.is_stock]
    full = {row.configuration.speculation: row for row in served if row.cache_ratio == 1}
    found: dict[tuple[str | None, str], list[Row]] = {}
    for row in served:
        if row.share < 1:
            found.setdefault(row.configuration.series(), []).append(row)
    for speculation, row in full.items():
        mine = [line for (_, other), line in found.items() if other == speculation]
        for line in mine or [found.setdefault(row.configuration.series(), [])]:
            line.append(row)
    return {key: sorted(line, key=lambda row: row.share) for key, line in found.items()}


def _speed_panel(axis, rows: list[Row], batch: int) -> None:
    colours = iter(plt.rcParams["axes.prop_cycle"].by_key()["color"] * 4)
    for (policy, speculation), line in _series(rows).items():
        colour, name = next(colours), policy if speculation == "none" else f"{policy}, {speculation}"
        x, y = [100 * row.share for row in line], [row.rate for row in line]
        spread = [[s.median - s.low for s in y], [s.high - s.median for s in y]]
        axis.errorbar(x, [s.median for s in y], yerr=spread, color=colour, marker="o", capsize=3, label=f"spac {name}")
        bounds = [(100 * r.share, r.bound_tokens_per_second) for r in line if r.bound_tokens_per_second]
        if bounds:
            axis.plot(*zip(*bounds, strict=True), color=colour, linestyle="--", label=f"bound {name}")
    for row in (row for row in rows if row.configuration.is_stock):
        shade = "black" if row.configuration.speculation == "none" else next(colours)
        axis.axhline(row.rate.median, color=shade, label=row.configuration.label)
    axis.set_title(f"batch {batch}")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def _hit_panel(axis, rows: list[Row]) -> None:
    for line in _series(rows).values():
        points = [(100 * row.share, 100 * row.hit_rate) for row in line if row.hit_rate is not None]
        if points:
            axis.plot(*zip(*points, strict=True), marker="o")
    axis.set_xlabel("experts in fast memory, % of all")
    axis.set_xlim(0, 103)
    axis.set_ylim(0, 103)
    axis.grid(alpha=0.3)
