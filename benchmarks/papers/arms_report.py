"""Shows the rows of ``arms`` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import over_exact
from rich.console import Console
from rich.table import Table

from vllm_spac.system.pictures import save_picture


def show(console: Console, rows: Sequence[dict[str, Any]], title: str, of_group: str) -> None:
    """Prints all rows; ``of_group`` names the value that they are grouped by, as key of a row.

    Of rows that draft also the speed over the same drafts, exact, is printed.
    """
    table = Table(title=title, title_justify="left")
    quality, drafts = ("perplexity", "top-1", "KL", "same prefix"), ("same drafts, exact",) * ("drafts" in rows[0])
    counted = ("experts/step", "loads/token", "dropped")
    for name in (of_group, "", "speed [95 %]", *drafts, "accepted", *quality, *counted):
        table.add_column(name, justify="right" if name else "left")
    for row, ratio in zip(rows, over_exact(rows), strict=True):
        low, high = row["speed_interval"]
        spread = "" if row["perplexity_deviation"] is None else f" ± {row['perplexity_deviation']:.3f}"
        table.add_row(
            f"{row[of_group]:g}",
            row["arm"],
            f"{row['speed']:.2f} [{low:.2f} - {high:.2f}]",
            *(["" if ratio is None else f"x {ratio:.2f}"] if drafts else []),
            f"{row['acceptance_length']:.2f}",
            f"{row['perplexity']:.3f}{spread}",
            f"{100 * row['top1_agreement']:.1f} %",
            "" if row["kl"] is None else f"{row['kl']:.3f}",
            "" if row["same_prefix"] is None else f"{100 * row['same_prefix']:.0f} %",
            f"{row['experts_per_step']:.1f}",
            f"{row['loads_per_token']:.1f}",
            f"{100 * row['dropped_share']:.1f} %",
        )
    console.print(table)


def draw(rows: Sequence[dict[str, Any]], title: str, of_group: str, path: Path) -> None:
    """Draws perplexity by speed, a panel for each value of ``of_group``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = sorted({row[of_group] for row in rows})
    figure, axes = pyplot.subplots(1, len(groups), figsize=(5 * len(groups), 4), layout="constrained", squeeze=False)
    for axis, group in zip(axes.flat, groups, strict=True):
        for row in (row for row in rows if row[of_group] == group):
            low, high = row["speed_interval"]
            place = row["speed"], row["perplexity"]
            axis.errorbar(
                *place, xerr=[[place[0] - low], [high - place[0]]], yerr=row["perplexity_deviation"], fmt="o", capsize=3
            )
            axis.annotate(row["arm"], place, fontsize=7, xytext=(4, 4), textcoords="offset points")
        axis.set(title=f"{of_group} {group:g}", xlabel="speed", ylabel="perplexity for stock vLLM")
        axis.invert_yaxis()
    figure.suptitle(title, fontsize=9)
    save_picture(figure, path)
