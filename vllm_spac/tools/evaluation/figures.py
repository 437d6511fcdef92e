"""Draws a quality sweep: quality against bytes and speed, and MoE-Spec's figures redrawn for the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_spac.system.pictures import begin_picture, save_picture

_MARKS = {"substitution": "o", "truncation": "x"}
_LINES = {"substitution": "-", "truncation": "--"}
_COLORS = {
    "oracle": "k",
    "selected": "tab:purple",
    "coactivation": "tab:green",
    "router": "tab:blue",
    "resident": "tab:orange",
}
_OTHER = "tab:red"
_SMALL = ("axes.labelsize", "xtick.labelsize", "ytick.labelsize")


def pareto(results: dict, path: Path) -> None:
    """Draws agreement and perplexity over the bytes per verify step and, if tokens were generated, over tokens/s."""
    speeds = {_name(item): item for item in results["generation"] if item.get("ranking")}
    figure, axes = _figure(1, 3 if speeds else 2, results["title"])
    natural, unit = results["natural"]["distinct"], results["step_bytes_per_expert"] / 2**20
    for (ranking, coverage, alpha), items in _groups(results["points"]):
        style, moved = _style(ranking, coverage, alpha), [unit * item["distinct"] for item in items]
        label = f"{ranking}, {coverage}" if alpha is None else None
        axes[0].plot(moved, [100 * item["agreement"] for item in items], label=label, **style)
        axes[1].plot(moved, [100 * item["perplexity_change"] for item in items], **style)
        both = [(speeds[_name(item)]["tokens_per_second"], item) for item in items if _name(item) in speeds]
        if both:
            rates, those = zip(*both, strict=True)
            axes[2].plot(rates, [100 * item["agreement"] for item in those], **style | {"linestyle": ""})
    axes[0].axhline(99, color="0.7", zorder=0)
    axes[1].axhspan(-1, 1, color="0.9", zorder=0)
    axes[1].set_yscale("symlog", linthresh=1)
    for axis in axes[:2]:
        axis.axvline(unit * natural, color="0.7", linestyle=":", zorder=0)
        axis.set_xlabel("MiB of experts per verify step (dotted: no budget)")
    axes[0].set_ylabel("top-1 agreement, %")
    axes[1].set_ylabel("change of perplexity, %")
    if speeds:
        exact = next(item for item in results["generation"] if not item.get("ranking"))
        axes[2].plot([exact["tokens_per_second"]], [100], "k*", markersize=10)
        axes[2].set(xlabel="tokens per second (star: no budget)", ylabel="top-1 agreement, %")
    axes[0].legend(fontsize=7)
    save_picture(figure, path)


def figures(results: dict, path: Path) -> None:
    """Draws MoE-Spec's figures 2b, 2c, 4a, 5a, 5b and 6."""
    figure, axes = _figure(2, 3, results["title"])
    routing, budgets = results["routing"]["sizes"], results["routing"]["budgets"]
    sizes = [item["size"] for item in routing]
    natural = [item["natural"] for item in routing]
    axes[0].plot(sizes, natural, marker="o", color="k")
    axes[0].set(title="2b: experts of a step", xlabel="rows of the step", ylabel="distinct experts per layer")
    axes[0].set_ylim(0, results["facts"]["experts"])
    for item in routing:
        if item["size"] in (results["window"], sizes[-1]):
            shares = [100 * share for share in item["curve"]]
            axes[1].plot(range(1, len(shares) + 1), shares, label=f"{item['size']} rows")
    axes[1].set(title="2c: router mass of the best", xlabel="experts", ylabel="router mass, %", ylim=(0, 101))
    axes[2].plot(sizes, natural, marker="o", color="k", label="no budget")
    for column, budget in enumerate(budgets):
        axes[2].plot(sizes, [item["distinct"][column] for item in routing], marker=".", label=f"B={budget}")
    axes[2].set(title="4a: experts under a budget", xlabel="rows of the step", ylabel="distinct experts per layer")
    for axis in (axes[0], axes[2]):
        axis.set_xscale("log")
        axis.set_xticks(sizes, map(str, sizes))
        axis.minorticks_off()
    _ablations(results, axes[3], axes[4])
    for (ranking, coverage, _), items in _groups((results["reconstruction"] or {}).get("points", ())):
        if coverage == "truncation":
            style = _style(ranking, coverage) | {"linestyle": "-", "marker": "."}
            axes[5].plot([i["budget"] for i in items], [100 * i["error"] for i in items], label=ranking, **style)
    axes[5].set(title="6: reconstruction error (truncation)", xlabel="budget", ylabel="% of the output's square")
    for axis in axes[1:]:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7)
    save_picture(figure, path)


def _ablations(results: dict, rankings: Any, coverages: Any) -> None:
    """Draws figures 5a and 5b, with perplexity instead of the paper's tasks; the oracle is offline only."""
    best = results["reference"]["perplexity"]
    shown = "substitution" if any(p["coverage"] == "substitution" for p in results["points"]) else "truncation"
    uniform = [p for p in results["points"] if p["budget"] is not None and p.get("votes_alpha") is None]
    for (ranking, coverage, _), items in _groups(uniform):
        kept = [100 * best / item["perplexity"] for item in items]
        style, over = _style(ranking, coverage), [item["budget"] for item in items]
        if coverage == shown:
            rankings.plot(over, kept, label=ranking, **style)
        if ranking == "selected":
            coverages.plot(over, kept, label=coverage, **style)
    rankings.set(title=f"5a: rankings ({shown})", xlabel="budget", ylabel="exact / budgeted perplexity, %")
    coverages.set(title="5b: coverages (selected)", xlabel="budget", ylabel="exact / budgeted perplexity, %")


def _groups(points: Sequence[dict]) -> Iterator[tuple[tuple[str, str, float | None], list[dict]]]:
    """Groups points by ranking, coverage and ``votes_alpha``, each group sorted by distinct experts."""
    kinds = [(point["ranking"], point["coverage"], point.get("votes_alpha")) for point in points]
    for kind in dict.fromkeys(kinds):
        mine = [point for point, its in zip(points, kinds, strict=True) if its == kind]
        yield kind, sorted(mine, key=lambda point: point.get("distinct") or point["budget"])


def _name(item: dict) -> tuple:
    return tuple(item.get(key) for key in ("ranking", "coverage", "budget", "mass", "mass_of", "votes_alpha"))


def _style(ranking: str, coverage: str, alpha: float | None = None) -> dict:
    """Points of weighted votes are marked by their ``alpha``."""
    color = _COLORS.get(ranking, _OTHER)
    mark, size = (_MARKS.get(coverage, "s"), 4) if alpha is None else (f"${alpha:g}$", 9)
    return {"color": color, "marker": mark, "linestyle": _LINES.get(coverage, ""), "linewidth": 1, "markersize": size}


def _figure(rows: int, columns: int, title: str):
    from matplotlib import rcParams

    rcParams.update({"axes.titlesize": 10} | dict.fromkeys(_SMALL, 8))
    figure, axes = begin_picture(rows, columns, figsize=(3.6 * columns, 3.1 * rows))
    figure.suptitle(title, fontsize=9)
    return figure, axes.flatten()
