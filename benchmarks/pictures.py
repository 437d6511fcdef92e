"""Draws the pictures of the pages from the JSON in ``benchmarks/results``, each by a function with its file's name."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.common import RESULTS
from benchmarks.pages import result

MODELS = {"flat": "toy", "local": "toy_local"}  # routing -> begin of a result's name
WITH_REAL = {"flat": "toy", "real": "real"}
ROUTING = {"flat": "flat routing (toy)", "local": "local routing (toy)", "real": "carved model"}
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


def serving_toy(axes: Sequence[Axes]) -> None:
    rows = [row for row in result("serving_toy")["rows"] if row["configuration"]["speculation"] == "none"]
    for place, row in enumerate(rows):
        rate = row["tokens_per_second"]
        spread = [[rate["median"] - rate["low"]], [rate["high"] - rate["median"]]]
        axes[0].bar(place, rate["median"], yerr=spread, capsize=4, color="grey" if row["name"] == "stock" else "C0")
    names = [row["name"].replace("spac 25% ", "25 %\n").replace("spac ", "") for row in rows]
    axes[0].set_xticks(range(len(rows)), names)
    axes[0].set(title="Speed beside stock vLLM, experts on disk, no drafts", ylabel="tokens/s")


def toy_trees(axes: Sequence[Axes]) -> None:
    for routing, name in MODELS.items():
        rows = result(f"{name}_trees")["rows"]
        for kind, style in {"chain": ":", "dynamic": "-"}.items():
            mine = [row for row in rows if row["kind"] == kind]
            for axis, value in zip(axes, ("acceptance_length", "experts_per_token"), strict=True):
                label = f"{kind}{' tree' * (kind != 'chain')}, {routing}"
                points = [row["drafts"] + 1 for row in mine], [row[value] for row in mine]
                axis.plot(*points, style, color=_colour(routing), marker="o", label=label)
    axes[0].set(title="Tokens that a step emits", xlabel="rows of a step", xscale="log", ylim=(0, None))
    axes[1].set(title="Experts per layer and emitted token", xlabel="rows of a step", xscale="log", ylim=(0, None))


def scaled_trees_toy(axes: Sequence[Axes]) -> None:
    rows = result("scaled_trees_toy")["rows"]
    marks = {"none": "*", "chain": "s", "tree": "o"}
    labels = {"none": "no drafts", "chain": "chain", "tree": "tree"}
    for axis, value, times in ((axes[0], "experts_per_step", 1), (axes[1], "top1_agreement", 100)):
        for kind, mark in marks.items():
            for budgeted in (True, False):
                mine = [row for row in rows if row["kind"] == kind and bool(row["budget"]) == budgeted]
                points = [times * row[value] for row in mine], [row["speed"] for row in mine]
                label = labels[kind] + (", budget" if budgeted else ", exact" * (kind != "none"))
                if mine:
                    axis.plot(*points, mark, color="C1" if budgeted else "C0", label=label)
        axis.axhline(1, color="grey", linewidth=0.8)
    axes[0].set(title="Speed over no drafts, by experts", xlabel="experts per layer and step", ylim=(0, None))
    axes[1].set(title="and by agreement with the exact model", xlabel="top-1 agreement, %", ylim=(0, None))


def toy_policies(axes: Sequence[Axes]) -> None:
    for axis, (routing, name) in zip(axes, WITH_REAL.items(), strict=True):
        found = result(f"{name}_policies")
        for policy in ("lru", "layer_lru", "lfu", "pinned", "utility", "reuse", "belady"):
            style = {"belady": "k--"}.get(policy, "-")
            rates = [100 * rate for rate in found["mean_hit_rates"][policy]]
            axis.plot(found["shares_percent"], rates, style, marker=".", label=policy)
        axis.set(title=f"Hit rate, {ROUTING[routing]}", xlabel="experts in fast memory, %", ylabel="%", ylim=(0, 100))


def toy_moe_spec(axes: Sequence[Axes]) -> None:
    for routing, name in WITH_REAL.items():
        found, label = result(f"{name}_moe_spec"), ROUTING[routing]
        _band(axes[0], found["sizes"], found["spread"]["distinct"], label)
        _band(axes[1], range(1, found["experts"] + 1), found["spread"]["mass_63"], label)
        _band(axes[2], range(found["layers"]), found["spread"]["pairs"], label)
    axes[2].axhspan(10, 33, color="grey", alpha=0.15, label="OLMoE (MoE-Spec)")
    axes[0].set(title="Experts per layer that rows select", xlabel="rows", xscale="log")
    axes[1].set(title="Selections of 63 rows by the best experts", xlabel="experts", ylabel="share", ylim=(0, 1.01))
    axes[2].set(title="The most frequent pair, times uniform", xlabel="layer", ylim=(0, None))


def toy_moe_spac(axes: Sequence[Axes]) -> None:
    for routing, name in WITH_REAL.items():
        curves = result(f"{name}_moe_spac")["spread"]
        _band(axes[0], range(len(curves["frequency"]["mean"])), curves["frequency"], ROUTING[routing])
    axes[0].set(title="Rows of the next step that select an expert", xlabel="score before the step", ylim=(0, None))


def toy_quality(axes: Sequence[Axes]) -> None:
    shown = {"toy": "flat routing (toy), 9 rows", "real_6": "carved model, 6 rows", "real_17": "carved model, 17 rows"}
    for axis, (name, title) in zip(axes, shown.items(), strict=True):
        found = result(f"{name}_quality")
        for colour, ranking in enumerate(("selected", "router", "coactivation")):
            of = [one for one in found["points"] if (one["ranking"], one["coverage"]) == (ranking, "substitution")]
            cut = [one for one in of if one["budget"]]
            saved = [100 * (1 - one["distinct"] / found["natural"]["distinct"]) for one in cut]
            change = [100 * one["perplexity_change"] for one in cut]
            error = [100 * one["perplexity_change_error"] for one in cut]
            if cut:
                axis.errorbar(saved, change, error, marker="o", capsize=3, color=f"C{colour}", label=ranking)
        axis.axhline(3, color="grey", linewidth=0.8)
        axis.set(title=f"Budgets, {title}", xlabel="bytes saved, %", ylabel="perplexity, % more", ylim=(-1, 20))


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


def resident_budgets_toy(axes: Sequence[Axes]) -> None:
    files = {"flat": "resident_budgets_toy", "local": "resident_budgets_toy_local"}
    for axis, (routing, name) in zip(axes, files.items(), strict=True):
        rows = [row for row in result(name)["rows"] if row["budget"]]
        for batch in dict.fromkeys(row["batch"] for row in rows):
            mine = [row for row in rows if row["batch"] == batch]
            points = [100 * row["top1_agreement"] for row in mine], [row["speed"] for row in mine]
            axis.plot(*points, marker="o", label=f"{batch} requests")
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(title=f"Speed over exact, {ROUTING[routing]}", xlabel="top-1 agreement, %")


def real_shadow(axes: Sequence[Axes]) -> None:
    found = result("real_shadow")
    names = {
        "1, 1": "tokens, keys and values",
        "1, never": "tokens",
        "never, 1": "keys and values",
        "never, never": "none",
    }
    for axis, shadow in zip(axes, ("int8", "nf4"), strict=False):
        for pair, name in names.items():
            rates = found["shadows"][shadow][pair]["by_token"]
            middles = [(place + 0.5) * found["block"] for place in range(len(rates))]
            axis.plot(middles, [100 * rate for rate in rates], marker=".", label=f"aligned: {name}")
        axis.set(title=f"Recall of an {shadow.upper()} shadow, %", xlabel="token", ylim=(0, 101))
    for tokens in (1, 2, 4, 8, 16):
        rates = [100 * found["shadows"]["int8"][f"{tokens}, {kv}"]["recall"] for kv in (1, 2, 4, 8, 16)]
        axes[2].plot((1, 2, 4, 8, 16), rates, marker="o", label=f"tokens every {tokens}")
    axes[2].set(
        title="INT8, by both periods, %", xlabel="keys and values every ... tokens", xscale="log", ylim=(90, 100)
    )
    axes[2].set_xticks((1, 2, 4, 8, 16), ("1", "2", "4", "8", "16"))
    axes[2].legend(fontsize=8)


def gpu_h100(axes: Sequence[Axes]) -> None:
    names = {
        "stock uva": "stock, UVA offloading",
        "stock prefetch": "stock, prefetching offloader",
        "ptr": "decisions=device",
        "slots": "decisions=host",
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
    serving_toy: 1,
    toy_trees: 2,
    scaled_trees_toy: 2,
    toy_policies: 2,
    toy_moe_spec: 3,
    toy_moe_spac: 1,
    toy_quality: 3,
    real_speculating_experts: 3,
    resident_budgets_toy: 2,
    real_shadow: 3,
    gpu_h100: 3,
}
WITH_REAL_MODEL = (toy_policies, toy_quality, toy_moe_spec, toy_moe_spac)
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
    note = ", beside SmolLM2-135M made an MoE" * (PICTURES[file] in WITH_REAL_MODEL)
    toy = f"toy model, not representative of a real one{note}"
    figure.supxlabel("SmolLM2-135M made an MoE" if file.startswith("real") else toy, fontsize=7)
    figure.savefig(RESULTS / file, dpi=120)
    pyplot.close(figure)


def _colour(routing: str) -> str:
    return f"C{list(MODELS).index(routing)}"


def _band(axis: Axes, x: Sequence[float], spread: Mapping[str, Sequence[float]], label: str) -> None:
    """Draws the mean over traces as a line in a band from the least to the most."""
    (line,) = axis.plot(x, spread["mean"], marker=".", label=label)
    axis.fill_between(x, spread["low"], spread["high"], color=line.get_color(), alpha=0.15, linewidth=0)
