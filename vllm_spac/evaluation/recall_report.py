"""Formats the recall of predictors: a table and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from vllm_spac.predictors._recall import RECALLS
from vllm_spac.system.host_memory import gib

_TITLES = {
    "recall_at_k": "of the chosen experts, in the first k",
    "recall_at_2k": "in the first 2k",
    "recall_on_misses": "in the first k, of those that a cache misses",
}


def table(found: Mapping[str, dict], title: str, caption: str) -> Table:
    """Returns a table of all predictors, and under each its recall by horizon if it has several."""
    columns = ("predictor", "horizon", "R@k", "R@2k", "R@k on misses", "layers", "us per layer", "bytes")
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, justify="left" if column in ("predictor", "horizon") else "right")
    for name, one in ranked(found):
        horizons = list(one["by_horizon"])
        known = sum(layer is not None for layer in one["by_layer"])
        costs = (f"{known} of {len(one['by_layer'])}", f"{one['us_per_layer']:.0f}", gib(one["bytes"]))
        made.add_row(name, horizons[0] if len(horizons) == 1 else "last", *cells(one), *costs)
        for horizon in horizons if len(horizons) > 1 else ():
            made.add_row("", horizon, *cells(one["by_horizon"][horizon]), "", "", "")
    return made


def ranked(found: Mapping[str, dict]) -> list[tuple[str, dict]]:
    """Returns the predictors in the order of their recall, the lowest first."""
    return sorted(found.items(), key=lambda item: item[1]["recall_at_k"])


def cells(recalls: Mapping) -> list[str]:
    """Returns the three recalls as text."""
    return ["-" if recalls[name] is None else f"{recalls[name]:.3f}" for name in RECALLS]


def pictures(found: Mapping[str, dict], title: str, folder: Path) -> list[Path]:
    """Draws recall by layer (``layers.png``) and by horizon (``horizons.png``) into ``folder``; returns the files.

    Raises:
        ConfigError: a file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from vllm_spac.system.pictures import save_picture

    figure, axes = pyplot.subplots(1, len(RECALLS), figsize=(4 * len(RECALLS), 3.6), layout="constrained", sharey=True)
    for axis, recall in zip(axes, RECALLS, strict=True):
        for name, one in ranked(found):
            values = [
                (n, by[recall]) for n, by in enumerate(one["by_layer"]) if by is not None and by[recall] is not None
            ]
            axis.plot(*zip(*values, strict=True), marker=".", label=name) if values else None
        axis.set(title=_TITLES[recall], xlabel="layer", ylim=(0, 1))
        axis.title.set_fontsize(9)
    axes[0].set_ylabel("recall")
    axes[-1].legend(fontsize=7)
    figure.suptitle(title, fontsize=9)
    save_picture(figure, folder / "layers.png")

    ahead = [(name, one) for name, one in ranked(found) if one["reach"]]
    figure, axis = pyplot.subplots(figsize=(4.5, 3.4), layout="constrained")
    for name, one in ahead:
        points = sorted((int(h), recalls["recall_at_k"]) for h, recalls in one["by_horizon"].items() if h.isdecimal())
        axis.plot(*zip(*points, strict=True), marker="o", label=name)
    axis.set(xlabel="layers ahead", ylabel="recall in the first k", ylim=(0, 1))
    axis.set_xticks(range(1, 1 + max((one["reach"] for _, one in ahead), default=1)))
    if ahead:
        axis.legend(fontsize=7)
    axis.set_title(title, fontsize=9)
    save_picture(figure, folder / "horizons.png")
    return [folder / "layers.png", folder / "horizons.png"]
