"""Draws the pictures of the pages from the JSON in ``benchmarks/results``, each by a function with its file's name.

Those of answered questions do not change any more: what drew them is in the history, as their scripts are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.pages import result

Axes = Any


def scaled_rtx4090_toy_local(axes: Sequence[Axes]) -> None:
    ladder, names = result("scaled_rtx4090_toy_local"), {"layer_lru": "LRU per layer", "prefetch": "(reads ahead)"}
    for slots in dict.fromkeys(row["slots"] for row in ladder["rows"]):
        rows = [row for row in ladder["rows"] if row["slots"] == slots and row["rung"] != "resident"]
        rates = [1 / row["tpot_median"] for row in rows]
        ends = [[1 / end for end in reversed(row["tpot_interval"])] for row in rows]
        spread = [[rate - low for rate, (low, _) in zip(rates, ends, strict=True)]]
        spread += [[high - rate for rate, (_, high) in zip(rates, ends, strict=True)]]
        labels = [names.get(row["rung"], f"+ {row['rung']}") for row in rows]
        axes[0].errorbar(labels, rates, spread, marker="o", capsize=4, label=f"{slots} of the experts in fast memory")
    whole = statistics.mean(1 / row["tpot_median"] for row in ladder["rows"] if row["rung"] == "resident")
    axes[0].axhline(whole, color="grey", linestyle="--", label="all experts in fast memory")
    axes[0].set(title="What each knob adds (scaled to an RTX 4090 machine)", ylabel="tokens/s, scaled", ylim=(0, None))


def gpu_h100(axes: Sequence[Axes]) -> None:
    names = {
        "stock uva": "stock, UVA offloading",
        "stock prefetch": "stock, prefetching offloader",
        "ptr": "plane=pointers",
        "slots": "plane=slots",
    }
    rows = [row for row in result("gpu_h100")["serving"] if row["run"] == 4 and row["speculation"] == "none"]
    for place, name in enumerate(names):
        (row,) = (row for row in rows if row["name"] == name)
        for axis, decode in zip(axes, row["decode"], strict=True):
            colour = "grey" if name.startswith("stock") else "C0"
            axis.bar(place, decode["tokens_per_second"], color=colour, alpha=1 if name == "ptr" else 0.6)
            axis.set(title=f"25 % on an H100, batch size {decode['batch']}", xticks=range(len(names)))
            axis.set_xticklabels(names.values(), rotation=30, ha="right", fontsize=7)
    axes[0].set_ylabel("tokens/s")


PANELS: dict[Callable[[Sequence[Axes]], None], int] = {
    scaled_rtx4090_toy_local: 1,
    gpu_h100: 3,
}
PICTURES = {f"{draw.__name__}.png": draw for draw in PANELS}


def draw(file: str) -> None:
    """Draws the picture ``file`` of ``benchmarks/results``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = PANELS[PICTURES[file]]
    size = (6.5, 4) if count == 1 else (4.2 * count, 3.6)
    figure, axes = pyplot.subplots(1, count, figsize=size, layout="constrained", squeeze=False)
    PICTURES[file](axes[0])
    if axes[0][0].get_legend_handles_labels()[0]:
        axes[0][0].legend(fontsize=8)
    figure.supxlabel("toy model, not representative of a real one", fontsize=7)
    figure.savefig(RESULTS / file, dpi=120)
    pyplot.close(figure)
