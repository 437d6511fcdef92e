"""Draws the pictures of the pages from the JSON in ``benchmarks/results``, each by a function with its file's name.

Those of answered questions do not change any more: what drew them is in the history, as their scripts are.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.pages import result

WITH_REAL = {"flat routing (toy)": "toy", "carved model": "real"}  # routing -> begin of a result's name
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


def toy_policies(axes: Sequence[Axes]) -> None:
    for axis, (routing, name) in zip(axes, WITH_REAL.items(), strict=True):
        found = result(f"{name}_policies")
        for policy in ("lru", "layer_lru", "lfu", "pinned", "utility", "reuse", "belady"):
            style = {"belady": "k--"}.get(policy, "-")
            rates = [100 * rate for rate in found["mean_hit_rates"][policy]]
            axis.plot(found["shares_percent"], rates, style, marker=".", label=policy)
        axis.set(title=f"Hit rate, {routing}", xlabel="experts in fast memory, %", ylabel="%", ylim=(0, 100))


def real_speculating_experts(axes: Sequence[Axes]) -> None:
    found = result("real_speculating_experts")
    told, layers = found["told"], range(1, 1 + len(found["told"]["quasi"]["cosine_by_layer"]))
    shown = {"residual": "residual (gate)", "quasi": "quasi-hidden state", "one": "the paper's estimator"}
    shown |= {"neural": "a network per layer", "moe": "after the layer's experts", "shared": "and shared expert"}
    colours = {name: f"C{place}" for place, name in enumerate(shown)}
    for name in ("residual", "quasi", "shared", "moe"):
        axes[0].plot(layers, told[name]["cosine_by_layer"], color=colours[name], label=shown[name])
    for name in ("residual", "quasi", "shared", "one", "neural"):
        rates = [100 * rate for rate in told[name]["by_rank"]]
        axes[1].plot(range(1, 1 + len(rates)), rates, marker=".", color=colours[name], label=shown[name])
    curve = found["training"]["curve"]
    for name, key in (("one", "one"), ("neural", "per_layer")):
        rates = [100 * point[key] for point in curve]
        axes[2].plot([point["drawn"] for point in curve], rates, marker="o", color=colours[name], label=shown[name])
    untrained = [100 * told["quasi"]["recall_by_layer"][layer - 1] for layer in found["training"]["layers"]]
    axes[2].axhline(statistics.mean(untrained), color=colours["quasi"], label=shown["quasi"])
    axes[0].set(title="Cosine with the next router's input", xlabel="layer", ylim=(0.6, 1))
    axes[1].set(title="Found among the first 8 named", xlabel="rank by the router", ylabel="%", ylim=(None, 100))
    axes[2].set(title="Recall by training", xlabel="tokens drawn", ylabel="%", xlim=(0, None))
    for axis in axes:
        axis.legend(fontsize=7)


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
    toy_policies: 2,
    real_speculating_experts: 3,
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
    note = ", beside SmolLM2-135M made an MoE" * (PICTURES[file] is toy_policies)
    toy = f"toy model, not representative of a real one{note}"
    figure.supxlabel("SmolLM2-135M made an MoE" if file.startswith("real") else toy, fontsize=7)
    figure.savefig(RESULTS / file, dpi=120)
    pyplot.close(figure)
