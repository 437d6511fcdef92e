"""Renders the tables and numbers of the documents from the results in ``benchmarks/results``.

In a document, ``<!-- results:NAME -->`` and ``<!-- end -->`` enclose what ``rendered()[NAME]`` returns: a table on
lines of its own, or a number within a line.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "scaled"))
import proportions
from common import RESULTS, ROOT, over_exact

from vllm_spac.tools.traces.locality import PUBLISHED

DOCUMENTS = ("README.md", "benchmarks/README.md", "vllm_spac/USAGE.md")
_KEPT = 0.965  # top-1 agreement of budgets that are compared with the exact tree
_MARKED = re.compile(r"(<!-- results:([\w.]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
Values = dict[str, str]


def document(text: str, values: Values) -> str:
    """Returns ``text`` with the content of all markers rendered.

    Raises:
        KeyError: a marker has a name that is not in ``values``.
    """

    def filled(found: re.Match) -> str:
        begin, name, content, end = found.groups()
        value = values[name]
        return begin + (f"\n{value}\n" if content.startswith("\n") else value) + end

    return _MARKED.sub(filled, text)


def update() -> list[str]:
    """Renders all documents in place; returns the names of those that changed."""
    changed = [(path, text) for path, old, text in _rendered_documents() if text != old]
    for path, text in changed:
        path.write_text(text, encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path, _ in changed]


def problems() -> Iterator[str]:
    """Yields the documents that differ from what is rendered, and names that no document has."""
    found: set[str] = set()
    values = rendered()
    for path, old, text in _rendered_documents():
        found.update(name for _, name, _, _ in _MARKED.findall(old))
        for before, after in zip(old.split("\n"), text.split("\n"), strict=False):
            if before != after:
                yield f"{path.relative_to(ROOT)}: {before.strip()!r} should be {after.strip()!r}"
                break
    yield from (f"{name}: rendered, and no document shows it" for name in sorted(set(values) - found))


def _rendered_documents() -> Iterator[tuple[Path, str, str]]:
    values = rendered()
    for path in (ROOT / name for name in DOCUMENTS):
        old = path.read_text(encoding="utf-8")
        yield path, old, document(old, values)


def rendered() -> Values:
    """Returns the text of each name."""
    sections: tuple[Callable[[], Values], ...] = (
        durations,
        acceptance,
        trees,
        serving,
        bounds,
        peers,
        batches,
        paired,
        layer_ahead,
        three_tiers,
        submitted,
        tree_step,
        recipe,
        prefetched,
        under_load,
        quantised,
        one_after_the_other,
        locality,
        seeds,
        scaled,
        scaled_trees,
        scaled_trees_sampled,
        resident_budgets,
        policies,
        tried,
        waves,
        budgets,
        budget_cost,
        votes,
        predictors,
        recall,
        ceilings,
        speculated,
        shadow,
        executions,
        papers,
        reuse_of_experts,
        moe_spac_tables,
        od_moe,
        workers,
        worker_faults,
        planned,
        tuned,
        soak,
    )
    return {name: text for section in sections for name, text in section().items()}


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


# -- sections, in the order of the documents ---------------------------------------------------------------


def durations() -> Values:
    """How long it takes to make all figures again."""
    from reproduce import FIGURES  # which imports this module

    made = [figure for figure in FIGURES.values() if figure.commands and figure.files]
    return {
        "minutes": str(sum(figure.minutes for figure in made if not figure.timed)),
        "minutes.timed": str(sum(figure.minutes for figure in made if figure.timed)),
        "minutes.soak": str(FIGURES["soak"].minutes),
    }


def acceptance() -> Values:
    columns = {
        "ngram-5": "ngram, 5 drafts",
        "eagle3-5": "EAGLE-3, 5",
        "draft-5": "dense draft, 5",
        "int8-5": "INT8 copy, 5",
    }
    lines, values = [], {}
    for model, file in {"flat": "toy_acceptance", "local": "toy_local_acceptance"}.items():
        methods = result(file)["methods"]
        lines.append([model, *(f"{methods[name]['acceptance_length']:.2f}" for name in columns)])
        equal = sorted({run["requests_equal_to_no_speculation"] for run in methods.values()})
        values[f"acceptance.equal.{model}"] = " to ".join(map(str, dict.fromkeys((equal[0], equal[-1]))))
        values["acceptance.requests"] = _one({str(run["requests"]) for run in methods.values()})
    return values | {"acceptance": table(("routing", *columns.values()), lines)}


def trees() -> Values:
    flat, local = result("toy_trees"), result("toy_local_trees")
    lines = []
    for rows in zip(flat["rows"], local["rows"], strict=True):
        [(kind, drafts)] = {(row["kind"], row["drafts"]) for row in rows}
        named = {"none": "none", "chain": f"chain, {drafts}"}.get(kind, f"{kind} tree, {drafts}")
        numbers = [(row["acceptance_length"], row["experts_per_step"], row["experts_per_token"]) for row in rows]
        lines.append([named, *(f"{one:.2f} / {other:.2f}" for one, other in zip(*numbers, strict=True))])
    head = ("drafts", "tokens per step, flat / local", "experts per layer and step", "per emitted token")
    return {
        "trees": table(head, lines),
        "trees.prompts": _one({str(found["prompts"]["count"]) for found in (flat, local)}),
        "trees.equal": _one({str(row["equal"]) for found in (flat, local) for row in found["rows"]}),
    }


def serving() -> Values:
    rows = {(row["name"], row["configuration"]["speculation"]): row for row in result("serving_toy")["rows"]}
    names = {
        "stock": "stock vLLM, all in RAM",
        "spac 100%": "spac, all experts resident",
        "spac 25% layer_lru": "spac, 25 %, `layer_lru`",
        "spac 25% reuse": "spac, 25 %, `reuse`",
    }
    lines = []
    for name, shown in names.items():
        plain, drafted = rows[name, "none"], rows[name, "eagle3"]
        bound = _ratio(plain["ratio_to_bound"])
        note = " (`guard=on` skips drafts that do not pay)" * (name == "spac 100%")
        ratios = f"{plain['ratio_to_stock']:.2f}", f"{drafted['ratio_to_stock']:.2f}{note}"
        lines.append([shown, _spread(plain), ratios[0], bound, _spread(drafted), ratios[1]])
    head = ("tokens/s (lowest – highest)", "no drafts", "× stock", "time / bound", "EAGLE-3, 4 drafts", "× stock")
    return {"serving": table(head, lines)}


def bounds() -> Values:
    """Seconds of a run over their lower bound, by slots and by what submits reads."""
    lines = []
    models = {
        "": ("flat", "1.2"),
        "_local": ("local", "1.2"),
        "_large": ("flat", "9.4"),
        "_local_large": ("local", "9.4"),
    }
    in_turn: dict[str, list[float]] = {"1.2": [], "9.4": []}
    for name, model in models.items():
        content = result(f"serving_bound_toy{name}")
        rows = {row["name"]: row for row in content["rows"]}
        assert all(row["verdict"] == "same" for row in rows.values())
        tokens = content["output_tokens"] * content["prompts"]["count"]
        for slots in ("100%", "10%", "25%", "50%"):
            threads = rows[f"spac {slots}" + " reuse" * (slots != "100%")]
            together = rows.get(f"spac {slots} reuse+io_uring")
            waited = 1e3 * threads["counters"]["stall_seconds"] / tokens
            rest = 1e3 / threads["tokens_per_second"]["median"] - waited
            cells = [_percent(threads["hit_rate"]), _rate(threads), f"{waited:.1f}", f"{rest:.1f}", *_over(threads)]
            cells += ["", "", ""] if together is None else [_rate(together), *_over(together)]
            lines.append([*model, _spaced(slots), *cells])
            if slots != "100%":
                in_turn[model[1]].append(threads["ratio_in_turn"])
    ratios = "time / in turn", "time / bound"
    head = (
        *("routing", "MB", "slots", "hits in %", "threads: tokens/s", "ms waited per token", "ms else", *ratios),
        *("io_uring: tokens/s", *ratios),
    )
    small, large = in_turn.values()
    values = {"bounds.small": f"{min(small):.2f} to {max(small):.2f}", "bounds.large": f"{max(large):.2f}"}
    return {"bounds": table(head, lines)} | values


def _over(row: dict[str, Any]) -> list[str]:
    """Formats the seconds of a run over those of loads and computation in turn, and over its bound."""
    return [_ratio(row[name]) for name in ("ratio_in_turn", "ratio_to_bound")]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def peers() -> Values:
    """The plugin beside llama.cpp."""
    lines = []
    labels = {"all": "all of it", "weights": "the same bytes of weights", "process": "the same bytes in all"}
    for name in ("peers_toy", "peers_8gb_toy"):
        content = result(name)
        (row,) = content["rows"]
        size = f"{content['gguf_bytes'] / 1e9:.1f} GB"
        ours = row["plugin"]
        for theirs in row["peers"]:
            limit = "" if theirs["limit_bytes"] is None else f"{theirs['limit_bytes'] / 1e9:.1f}"
            lines.append(
                [
                    size,
                    _spaced(row["slots"]),
                    labels[theirs["name"]],
                    limit,
                    f"{ours['tokens_per_second']:.1f}",
                    f"{theirs['tokens_per_second']:.1f}",
                    _with_interval(theirs["ratio"], theirs["interval"]),
                    f"{1e3 * ours['cpu_seconds_per_token']:.0f} / {1e3 * theirs['cpu_seconds_per_token']:.0f}",
                    f"{ours['read_bytes_per_token'] / 1e6:.0f} / {theirs['read_bytes_per_token'] / 1e6:.0f}",
                    f"{theirs['equal_answers']} of {len(ours['turns']['tpot'])}",
                ]
            )
    head = (
        *("weights", "slots", "llama.cpp's memory", "GB", "tokens/s", "llama.cpp's", "ratio (95 %)"),
        *("CPU ms per token", "MB read per token", "equal answers"),
    )
    large = {peer["name"]: peer for peer in row["peers"]}  # of the larger model, the last one
    ratios = {name: _with_interval(large[name]["ratio"], large[name]["interval"]) for name in large}
    return {
        "peers": table(head, lines),
        "peers.read_ahead": str(content["read_ahead_kib"]),
        "peers.weights": ratios["weights"],
        "peers.process": ratios["process"],
        "peers.all": ratios["all"],
    }


def batches() -> Values:
    """How often stock vLLM's answers depend on their batch, per dtype."""
    values = {}
    for dtype, found in result("stock_batches")["dtypes"].items():
        rows = [row for name, row in found["by_batch"].items() if name != "alone once more"]
        other = sum(row["with_other_tokens"] for row in rows)
        values[f"batches.{dtype}"] = f"{other} of {sum(row['requests'] for row in rows)}"
    return values


def paired() -> Values:
    what = {
        "paired_resident_toy": "spac over stock vLLM",
        "paired_never_slower_toy": "EAGLE-3, 4 drafts, over no drafts (`guard=on`)",
        "paired_trace_toy": "`--spac-trace` over no trace",
        "paired_recipe_toy": "MoE-SpAc's recipe over `layer_lru`, experts in host memory",
    }
    lines, apart = [], "the same over an engine that no drafter was configured for"
    for name, shown in what.items():
        rows = result(name)["rows"]
        found = [(shown, row["slots"], row) for row in rows]
        found += [(apart, row["slots"], row["own_base"]) for row in rows if "own_base" in row]
        digits, before = {"paired_resident_toy": 2}.get(name, 3), ""
        for said, slots, row in found:
            low, high = row["interval"]
            numbers = row["ratio"], row["ratio_of_totals"]
            median, totals = (f"{number:.{digits}f}" for number in numbers)
            file = f"`{name}.json`" if (said, slots, row) == found[0] else ""
            first = said if said != before else ""
            interval = f"{low:.{digits}f} – {high:.{digits}f}"
            lines.append([first, _spaced(slots), median, interval, totals, file])
            before = said
    resident, slower = result("paired_resident_toy")["rows"][0], result("paired_never_slower_toy")["rows"]
    held = [
        (100 * engine["steps"]["0"] / sum(engine["steps"].values()), row["slots"], ratio)
        for row in slower
        for engine, ratio in zip(row["other"]["guard"], row["ratio_of_starts"], strict=True)
    ]
    without, slots, ratio = min(held)  # the start that drafted most often
    starts = sorted(slower[0]["own_base"]["ratio_of_starts"])
    least = slower[0]["other"]["guard"][0]["steps"]  # of the fewest slots
    low, high = resident["interval"]
    return {
        "paired": table(("", "slots", "ratio", "95 %", "of totals", ""), lines),
        "resident.ratio": f"{resident['ratio']:.2f}",
        "resident.interval": f"{low:.2f} – {high:.2f}",
        "guard.without": f"{statistics.median(share for share, _, _ in held):.0f} %",
        "guard.present": f"{1e3 * slower[-1]['other']['tpot']:.1f}",
        "guard.absent": f"{1e3 * slower[-1]['own_base']['base']['tpot']:.1f}",
        "guard.most": f"{100 - without:.0f} %",
        "guard.most.slots": _spaced(slots),
        "guard.most.ratio": f"{ratio:.2f}",
        "guard.slots": _spaced(slower[0]["slots"]),
        "guard.starts": f"{starts[0]:.2f} to {starts[-1]:.2f}",
        "guard.trials": f"{sum(least.values()) - least['0']} of {sum(least.values()):,}",
    }


def layer_ahead() -> Values:
    """Prompts with the next layer read while a layer runs, over none."""
    runs = {
        "paired_layer_ahead_toy": ("flat", "1.2 MB"),
        "paired_layer_ahead_short_toy": ("flat", "1.2 MB"),
        "paired_layer_ahead_large": ("local", "9.4 MB"),
        "paired_layer_ahead_local_toy": ("local", "1.2 MB"),
    }
    lines = []
    for name, labels in runs.items():
        content = result(name)
        for row in content["rows"]:
            assert row["tokens_equal"]
            base, other = row["base"], row["other"]
            ahead = other["prefetches"]
            lines.append(
                [
                    *labels,
                    str(content["prompts"]["tokens"]),
                    _spaced(row["slots"]),
                    _with_interval(row["ratio"], row["interval"]),
                    f"{(other['loads'] + ahead) / base['loads']:.2f}",
                    f"{100 * other['prefetch_hits'] / ahead:.0f} %" if ahead else "none",
                ]
            )
    head = ("routing", "experts of", "prompt tokens", "slots", "ratio (95 %)", "all reads", "reads ahead used")
    return {"layer_ahead": table(head, lines)}


def three_tiers() -> Values:
    """Slots, host memory and disk, between the two with two tiers each."""
    contents = [result("paired_three_tiers_disk_toy"), result("paired_three_tiers_host_toy")]
    below, above = (content["rows"][0] for content in contents)
    assert below["tokens_equal"] and above["tokens_equal"]
    tokens = len(below["ratios"]) * contents[0]["output_tokens"]
    assert tokens == len(above["ratios"]) * contents[1]["output_tokens"]
    ratios = ["", *(_with_interval(row["ratio"], row["interval"]) for row in (below, above))]
    sides = {
        "slots and disk": below["base"],
        "slots, host memory and disk": below["other"],
        "slots and host memory": above["other"],
    }
    lines, waits, loads = [], [], []
    for (label, side), ratio in zip(sides.items(), ratios, strict=True):
        host, wait = side["host_loads"] / tokens, 1e3 * side["stall_seconds"] / tokens
        disk = side["loads"] / tokens - host
        waits.append(wait)
        loads.append((disk, host))
        hits = _percent(side["hits"] / (side["hits"] + side["misses"]))
        lines.append([label, hits, f"{disk:.1f}", f"{host:.1f}", f"{wait:.1f}", ratio])
    (from_disk, _), (disk, host), (_, from_host) = loads
    calculated = disk * waits[0] / from_disk + host * waits[2] / from_host
    copied = calculated + (disk + host) * waits[2] / from_host  # each evicted expert goes to host memory
    head = ("", "hits in %", "read from disk", "from host memory", "ms waited", "× the row above (95 %)")
    return {
        "three_tiers": table(head, lines),
        "three_tiers.calculated": f"{calculated:.0f}",
        "three_tiers.copied": f"{copied:.0f}",
        "three_tiers.waited": f"{waits[1]:.0f}",
    }


def submitted() -> Values:
    """Reads by threads and by io_uring."""
    lines = []
    for row in result("reads_submitted")["rows"]:
        rates = [row["experts"] * row["expert_bytes"] / row["seconds"][way] / 1e9 for way in row["seconds"]]
        ratio = _with_interval(row["ratio"], row["interval"])
        size = f"{row['expert_bytes'] / 1e6:.1f}"
        lines.append([size, str(row["experts"]), *(f"{rate:.2f}" for rate in rates), ratio])
    head = ("MB", "experts", "threads, GB/s", "io_uring, GB/s", "bare, GB/s", "seconds, io_uring over threads (95 %)")
    ratios = [row["ratio"] for row in result("reads_submitted")["rows"]]
    return {"submitted": table(head, lines), "submitted.range": f"{min(ratios):.2f} to {max(ratios):.2f}"}


def tree_step() -> Values:
    """A step of a tree beside one of a chain, all experts resident."""
    [row] = result("paired_tree_step_toy")["rows"]
    low, high = row["step_interval"]
    faster = row["interval"]
    per_step = {
        side: 1 + row[side]["speculation"]["accepted_tokens"] / row[side]["speculation"]["drafts"]
        for side in ("base", "other")
    }
    return {
        "tree_step.ratio": f"{row['step_ratio']:.2f}",
        "tree_step.interval": f"{low:.2f} – {high:.2f}",
        "tree_step.chain": f"{1e3 * row['base']['step_seconds']:.1f}",
        "tree_step.tree": f"{1e3 * row['other']['step_seconds']:.1f}",
        "tree_step.tokens": f"{per_step['other']:.2f} instead of {per_step['base']:.2f}",
        "tree_step.speed": f"{row['ratio']:.2f}",
        "tree_step.speed.interval": f"{faster[0]:.2f} – {faster[1]:.2f}",
    }


def recipe() -> Values:
    """What MoE-SpAc's recipe does per emitted token, and its base."""
    content = result("paired_recipe_toy")
    lines = []
    for side, shown in (("base", "`layer_lru`"), ("other", "MoE-SpAc's recipe")):
        for row in content["rows"]:
            counted = row[side]
            tokens = content["output_tokens"] * len(counted["tokens_per_second"])
            drafted = counted["speculation"]
            step = 1 + drafted["accepted_tokens"] / drafted["drafts"] if drafted else 1
            numbers = (counted[name] / tokens for name in ("loads", "prefetches", "cpu_experts"))
            found = counted["hits"] / sum(counted[name] for name in ("hits", "misses", "cpu_experts"))
            slots = _spaced(row["slots"])
            lines.append(
                [shown, slots, f"{step:.2f}", *(f"{number:.1f}" for number in numbers), f"{100 * found:.0f} %"]
            )
    head = ("per token", "slots", "tokens per step", "loads on demand", "moved ahead", "on the CPU", "found in slots")
    return {"recipe": table(head, lines)}


def prefetched() -> Values:
    """Reading experts ahead by a predictor: time and reads over none."""
    lines = []
    runs = {
        "paired_prefetch_local_toy": ("`linear`", "1.2 MB"),
        "paired_prefetch_local_large": ("`linear`", "9.4 MB"),
        "paired_prefetch_auto_toy": ("`auto`", "1.2 MB"),
        "paired_prefetch_auto_large": ("`auto`", "9.4 MB"),
        "paired_shadow_local_large": ("`shadow`", "9.4 MB"),
    }
    for name, labels in runs.items():
        content = result(name)
        for row, ceiling in zip(content["rows"], _ceilings(content), strict=True):
            assert row["tokens_equal"]
            base, other = row["base"], row["other"]
            late, ahead = other["misses"] - other["loads"], other["prefetches"]
            lines.append(
                [
                    *labels,
                    _spaced(row["slots"]),
                    _with_interval(row["ratio"], row["interval"]),
                    f"{row['ratio_of_totals']:.2f}",
                    f"{ceiling:.2f}",
                    f"{other['loads'] / base['loads']:.2f}",
                    f"{(other['loads'] + ahead) / base['loads']:.2f}",
                    f"{100 * other['prefetch_hits'] / ahead:.0f} %" if ahead else "none",
                    f"{100 * late / other['prefetch_hits']:.0f} %" if ahead else "",
                ]
            )
    head = ("", "experts of", "slots", "ratio (95 %)", "of totals", "ceiling", "loads on demand", "all reads")
    first, step = result("paired_prefetch_local_toy")["rows"][0], result("paired_shadow_local_large")["rows"][-1]
    return {
        "prefetched": table((*head, "reads ahead used", "of them late"), lines),
        "prefetched.shadow_step": _with_interval(step["step_ratio"], step["step_interval"]),
        "prefetched.with": f"{1e3 * first['other']['tpot']:.1f}",
        "prefetched.without": f"{1e3 * first['base']['tpot']:.1f}",
    }


def _ceilings(content: dict[str, Any]) -> list[float]:
    """Returns what a perfect overlap of loads and all else would give over none, for each row of a paired run.

    Of two sizes, the more loads of a request and its more seconds give the seconds of one load; what is then left of a
    request is all else.
    """
    bases = [row["base"] for row in content["rows"]]
    seconds = [base["ttft"] + (content["output_tokens"] - 1) * base["tpot"] for base in bases]
    loads = [base["loads"] / len(row["ratios"]) for base, row in zip(bases, content["rows"], strict=True)]
    per_load = (seconds[0] - seconds[-1]) / (loads[0] - loads[-1])
    return [all_ / max(count * per_load, all_ - count * per_load) for all_, count in zip(seconds, loads, strict=True)]


def under_load() -> Values:
    """Streams at once, and a long prompt among them."""
    content = result("under_load_toy")
    lines = []
    for row in content["rows"]:
        name = "stock" if row["server"] == "stock" else f"spac, {_spaced(row['server'])}"
        times = [f"{1e3 * row[value]:.0f}" for value in ("ttft", "ttft_worst", "longest_gap")]
        late = [f"{1e3 * row['long_ttft']:.0f}", f"{100 * row['kept']:.0f} %"]
        late.append(f"{1e3 * row['longest_gap_disturbed']:.0f}")
        hits = "" if row["hit_rate"] is None else f"{100 * row['hit_rate']:.0f} %"
        lines.append([name, str(row["streams"]), f"{row['tokens_per_second']:.0f}", *times, hits, *late])
    head = ("", "streams", "tokens/s", "first token, ms", "the last one's", "longest gap, ms", "hits")
    return {
        "under_load": table((*head, "long prompt: first token, ms", "speed kept", "longest gap, ms"), lines),
        "under_load.long": f"{content['long_tokens']:,}",
        "under_load.chunk": str(content["chunk"]),
        "under_load.gap.stock": f"{_longest_gap(content, True):.1f}",
        "under_load.gap": f"{_longest_gap(content, False):.1f}",
    }


def _longest_gap(content: dict[str, Any], stock: bool) -> float:
    """Returns the most seconds that one of several streams of stock vLLM, or of the plugin, waited for a token."""
    rows = [row for row in content["rows"] if (row["server"] == "stock") == stock and row["streams"] > 1]
    return max(max(row["longest_gap"], row["longest_gap_disturbed"]) for row in rows)


def quantised() -> Values:
    """Quantised experts over bf16 with slots of as many bytes."""
    content, lines = result("quantised_toy"), []
    for row in content["rows"]:
        lines.append(
            [
                _spaced(row["slots"]),
                row["format"],
                f"{row['percent']} %",
                "1" if row["format"] == "bf16" else _with_interval(row["ratio"], row["interval"]),
                f"{statistics.median(row['tokens_per_second']):.1f}",
                f"{row['bytes_per_token'] / 1e6:.1f}",
                f"{row['perplexity']:.2f}",
            ]
        )
    head = ("slots of bf16", "format", "its slots", "over bf16 (95 %)", "tokens/s", "MB read per token", "perplexity")
    return {
        "quantised": table(head, lines),
        "quantised.tokens": f"{content['rows'][0]['scored_tokens']:,}",
    }


def one_after_the_other() -> Values:
    name = "spac 25% reuse"
    content = result("serving_toy_budget")
    rates = {row["name"]: row for row in content["rows"]}
    counted = {run["configuration"]: run["batches"]["1"]["counters"] for run in content["runs"]}
    loads = [counted[f"{name}{budget}, eagle3"]["loads"] for budget in ("", " budget 32")]
    simulated = result("simulated_toy")["rows"]
    return {
        "budget.dropped": f"{100 * rates[f'{name} budget 32']['dropped_share']:.1f} %",
        "budget.loads": f"{100 * (1 - loads[1] / loads[0]):.0f} %",
        "budget.speed": _rate(rates[f"{name} budget 32"]),
        "budget.exact": _rate(rates[name]),
        **{
            f"simulated.{drafts}{suffix}": ", ".join(
                f"{100 * row[key]:+.0f}" for row in simulated if row["speculation"] == drafts
            )
            for drafts in ("none", "eagle3")
            for key, suffix in (("error", ""), ("error_with_it", ".waiting"))
        },
    }


def locality() -> Values:
    flat, local = (result(f"toy_{name}locality")["traces"]["none1"] for name in ("", "local_"))
    names = {
        "overlap": "overlap of a token's experts with the previous token's",
        "lru_small": "hits of one LRU per layer, 19 % of its experts",
        "lru_large": "the same, 38 %",
        "distinct": "experts of 9 consecutive tokens, per layer",
        "least": "tokens that select the least used expert",
        "most": "tokens that select the most used expert",
    }
    lines = []
    for name, shown in names.items():
        there = [one for one in PUBLISHED if one.figure == name]
        here = [one["mean"][name] for one in (flat, local)]
        shown_here = [f"{value:.1f}" if name == "distinct" else f"{100 * value:.1f} %" for value in here]
        said = ", ".join(f"{100 * one.value:.1f} % ({one.model})" for one in there)
        source = ", ".join(f"{one.source}: {one.conditions}" for one in there)
        lines.append([shown, *shown_here, said, source])
    return {
        "locality": table(("", "flat", "local", "published", "source, and what differs there"), lines),
        "locality.tokens": f"{flat['tokens']:,}",
        "locality.local_tokens": f"{local['tokens']:,}",
    }


def seeds() -> Values:
    """Local models by seed, on held-out text."""
    lines = []
    for row in result("toy_local_seeds")["rows"]:
        trained = f", seed {row['seed']}, {row['minutes']:.0f} minutes" if row["seed"] is not None else ""
        name = row["model"] if row["model"] in ("flat", "local, committed") else "local"
        numbers = ("overlap_with_previous_token", "lru_small", "lru_large", "mass_of_top_half_of_63_rows")
        shares = [f"{100 * row[value]:.1f} %" for value in numbers]
        lines.append([name + trained, f"{row['validation_loss']:.3f}", *shares, str(row["experts_under_0.2_percent"])])
    head = ("", "loss", "overlap", "LRU, 19 %", "LRU, 38 %", "mass of the best half, 63 rows", "experts under 0.2 %")
    return {"seeds": table(head, lines)}


def scaled() -> Values:
    what = {"rtx4090": " (PCIe 4, two channels of DDR5)", "h200": " (PCIe 5, eight channels of DDR5)"}
    known = [proportions.Proportions.of(name) for base in what for name in (base, f"{base}-int4")]
    lines = [[f"`{one.name}`{what.get(one.name, '')}", f"{one.load:.2f} : 1 : {one.cpu:.2f}"] for one in known]
    ladder = result("scaled_rtx4090_toy_local")
    names = {
        "resident": "all experts resident",
        "layer_lru": "`layer_lru`, on demand",
        "reuse": "`reuse`",
        "prefetch": "beside it: + reads ahead by `linear`",
        "cpu": "+ CPU experts",
        "drafts": "+ EAGLE-3, 4 drafts, `guard=on`",
        "tree": "a tree of 16 and B = 16 instead (*lossy*)",
    }
    rungs = {(row["slots"], row["rung"]): row for row in ladder["rows"]}
    sizes = list(dict.fromkeys(row["slots"] for row in ladder["rows"]))
    rows, times = [], []
    for name, shown in names.items():
        cells, parts = [], []
        for size in sizes:
            row = rungs[size, name]
            cells += [
                f"{1e3 * row['tpot_median']:.1f}",
                _with_interval(row["speedup"], row["speedup_interval"]),
                _late(row, ladder),
            ]
            parts += _parts_of_a_token(row, ladder)
        rows.append([shown, *cells])
        times.append([shown, *parts])
    head = [text for size in sizes for text in (f"{_spaced(size)}: ms per token", "× `layer_lru`", "late")]
    parts_head = [
        text
        for size in sizes
        for text in (f"{_spaced(size)}: waits for loads", "for the CPU", "the rest", "loads", "on the CPU")
    ]
    lossy = [rungs[size, "tree"] for size in sizes]
    pacing = result("scaled_pacing_toy")["rows"][-1]
    return {
        "scaled.proportions": table(("`--machine`", "load : layer : CPU expert"), lines),
        "scaled.ladder": table(["", *head], rows),
        "scaled.parts": table(["", *parts_head], times),
        "scaled.turns": str(ladder["rows"][0]["turns"]),
        "scaled.tree.top1": " and ".join(f"{100 * row['quality']['top1_agreement']:.0f} %" for row in lossy),
        "scaled.tree.perplexity": " and ".join(f"{row['quality']['perplexity']:.2f}" for row in lossy),
        "scaled.exact.perplexity": f"{rungs[sizes[0], 'layer_lru']['quality']['perplexity']:.2f}",
        **{f"scaled.{name}": f"{rungs['25%', name]['speedup']:.2f}" for name in ("reuse", "cpu", "drafts")},
        "scaled.cpu.interval": " – ".join(f"{value:.2f}" for value in rungs["25%", "cpu"]["speedup_interval"]),
        "scaled.pacing": _with_interval(pacing["speedup"], pacing["speedup_interval"]),
        **_validated("rtx4090"),
        **_validated("h200"),
    }


def _parts_of_a_token(row: dict[str, Any], ladder: dict[str, Any]) -> list[str]:
    """Returns milliseconds per token of a rung, prompts included, and loads and CPU experts per token."""
    counters, tokens = row["counters"], row["turns"] * ladder["output_tokens"]
    all_of_it = row["ttft"] + (ladder["output_tokens"] - 1) * row["tpot_median"]
    whole = 1e3 * all_of_it / ladder["output_tokens"]
    loads, cpu = (1e3 * counters[name] / tokens for name in ("stall_seconds", "cpu_wait_seconds"))
    times = [f"{value:.1f}" for value in (loads, cpu, whole - loads - cpu)]
    return times + [f"{counters[name] / tokens:.1f}" for name in ("loads", "cpu_experts")]


def _validated(machine: str) -> Values:
    """Simulated and measured time per token on a scaled machine."""
    compared = result(f"scaled_{machine}_simulated")
    errors = [
        [_spaced(row["slots"]), "none" if row["balancer"] == "none" else "waterfill"]
        + [f"{1e3 * row[kind]['tpot']:.1f}" for kind in ("measured", "simulated")]
        + [f"{100 * row['errors']['tpot']:+.0f} %", f"{row['measured']['loads']:.1f}", f"{row['measured']['cpu']:.1f}"]
        for row in compared["rows"]
    ]
    head = ("slots", "balancer", "measured ms", "simulated ms", "", "loads per step", "CPU experts per step")
    return {
        f"scaled.{machine}.simulated": table(head, errors),
        f"scaled.{machine}.within": _WORDS[sum(row["agrees"] for row in compared["rows"])],
    }


def _late(row: dict[str, Any], ladder: dict[str, Any]) -> str:
    """Returns by what share of its duration a load exceeded it in the mean; empty without loads."""
    own = row["counters"]["own"]
    count = own["load_waits"] + own["load_missed"]
    seconds = own["load_overshoot_seconds"] + own["load_missed_seconds"]
    return f"{100 * seconds / count / ladder['scale']['machine']['load_seconds']:.0f} %" if count else ""


def resident_budgets() -> Values:
    """Budgets with all experts in memory, by batch size."""
    lines: list[list[str]] = []
    best: dict[str, float] = {}
    kept: dict[str, float] = {}
    for name, routing in (("resident_budgets_toy", "flat"), ("resident_budgets_toy_local", "local")):
        for row in result(name)["rows"]:
            budget = "exact" if not row["budget"] else f"B = {row['budget']['budget']}"
            speed = _with_interval(row["speed"], row["speed_interval"])
            quality = f"{row['perplexity']:.3f}", f"{100 * row['top1_agreement']:.1f} %"
            counted = f"{row['experts_per_step']:.1f}", f"{100 * row['dropped_share']:.1f} %"
            lines.append([routing, str(row["batch"]), budget, speed, *counted, *quality])
            best[routing] = max(best.get(routing, 0.0), row["speed"])
            if row["budget"] and row["top1_agreement"] >= 0.95:
                kept[routing] = max(kept.get(routing, 0.0), row["speed"])
    head = ("routing", "batch", "", "× exact (95 %)", "experts per layer and step", "weight dropped", "perplexity")
    return {
        "resident_budgets": table((*head, "top-1 agreement"), lines),
        "resident_budgets.best": " and ".join(f"{best[routing]:.2f}" for routing in ("flat", "local")),
        "resident_budgets.kept": " and ".join(f"{kept[routing]:.2f}" for routing in ("flat", "local")),
    }


def scaled_trees() -> Values:
    """Budgets over chains and trees, on a scaled machine."""
    content = result("scaled_trees_toy")
    lines, ratios = [], over_exact(content["rows"])
    for row, ratio in zip(content["rows"], ratios, strict=True):
        drafts = f"{row['kind']} of {row['drafts']}" if row["drafts"] else "none"
        settings = row["budget"]
        budget = f"B = {settings['budget']}, {settings['votes']}" if settings else "exact"
        kl = "" if row["kl"] is None else f"{row['kl']:.3f}"
        numbers = (f"{row[name]:.2f}" for name in ("acceptance_length", "experts_per_step", "loads_per_token"))
        speed = _with_interval(row["speed"], row["speed_interval"])
        quality = f"{100 * row['top1_agreement']:.1f} %", kl, f"{row['perplexity']:.3f}"
        lines.append([drafts, budget, speed, "" if ratio is None else f"{ratio:.2f}", *numbers, *quality])
    budgeted = [row for row in content["rows"] if row["kind"] == "tree" and row["budget"]]
    kept = [row for row in budgeted if row["top1_agreement"] >= 0.97]
    [plain] = [row for row in content["rows"] if not row["drafts"]]
    least = min(row["loads_per_token"] for row in budgeted)
    head = "drafts", "budget, votes", "× no drafts (95 %)", "× same drafts, exact", "tokens per step"
    counted = "experts per layer and step", "loads per token"
    return {
        "scaled_trees.floor": f"{100 * _KEPT:.1f} %",
        "scaled_trees.over": " and ".join(_best_over(content["rows"], ratios, nodes) for nodes in (16, 63)),
        "scaled_trees": table((*head, *counted, "top-1 agreement", "KL", "perplexity"), lines),
        "scaled_trees.prompts": str(content["prompts"]["count"] - 1),
        "scaled_trees.tokens": str(content["output_tokens"]),
        "scaled_trees.slots": _spaced(content["slots"]),
        "scaled_trees.best": f"{max(row['speed'] for row in budgeted):.2f}",
        "scaled_trees.kept": f"{max(row['speed'] for row in kept):.2f}" if kept else "none",
        "scaled_trees.loads": f"{least / plain['loads_per_token']:.2f}",
        "scaled_trees.bound": f"{plain['loads_per_token'] / least:.2f}",
        "scaled_trees.longest": f"{max(row['acceptance_length'] for row in content['rows']):.2f}",
    }


def _best_over(rows: list[dict[str, Any]], ratios: list[float | None], nodes: int) -> str:
    """Returns the most that a budget gains over the exact tree of so many nodes while it keeps the first choices."""
    of_tree = [(ratio, row) for ratio, row in zip(ratios, rows, strict=True) if row["drafts"] == nodes and ratio]
    ratio, row = max((one for one in of_tree if one[1]["top1_agreement"] >= _KEPT), key=itemgetter(0))
    return f"{ratio:.2f} ({nodes} nodes, B = {row['budget']['budget']}, {100 * row['top1_agreement']:.1f} %)"


def scaled_trees_sampled() -> Values:
    """Budgets over draft trees at temperature 1, on a scaled machine."""
    content = result("scaled_trees_sampled_toy")
    lines = []
    for row, ratio in zip(content["rows"], over_exact(content["rows"]), strict=True):
        drafts = f"{row['kind']} of {row['drafts']}" if row["drafts"] else "none"
        budget = f"B = {row['budget']['budget']}, {row['budget']['votes']}" if row["budget"] else "exact"
        speed = f"{row['speed']:.2f} ± {row['speed_deviation']:.2f}"
        quality = f"{row['perplexity']:.2f} ± {row['perplexity_deviation']:.2f}"
        numbers = [f"{row[name]:.2f}" for name in ("acceptance_length", "experts_per_step", "loads_per_token")]
        over = "" if ratio is None else f"{ratio:.2f}"
        lines.append([drafts, budget, speed, over, *numbers, f"{100 * row['top1_agreement']:.1f} %", quality])
    head = (
        "drafts",
        "budget, votes",
        "× no drafts",
        "× same drafts, exact",
        "tokens per step",
        "experts per layer and step",
        "loads per token",
    )
    return {"scaled_trees_sampled": table((*head, "top-1 agreement", "perplexity"), lines)}


def policies() -> Values:
    flat, local = result("toy_policies"), result("toy_local_policies")
    rates = flat["mean_hit_rates"]
    others = zip(rates["reuse"], rates["reuse@half_lives=(1,4,16)"], strict=True)
    return {
        "policies": _hit_rates(flat),
        "policies.local": _hit_rates(local),
        "policies.traces": _WORDS[len(flat["traces"])],
        "policies.local_traces": _WORDS[len(local["traces"])],
        "policies.half_lives": f"{100 * max(abs(a - b) for a, b in others):.1f}",
    }


def _hit_rates(content: dict[str, Any]) -> str:
    rates, shares = content["mean_hit_rates"], content["shares_percent"]
    names = {
        "lru": "`lru`",
        "layer_lru": "`layer_lru`",
        "lfu": "`lfu`",
        "pinned": "`pinned`",
        "utility": "`utility` (MoE-SpAc)",
        "reuse": "`reuse`",
        "belady": "Belady (knows the future)",
    }
    lines = []
    for share in (10, 17, 25, 50):
        found = {name: 100 * rates[name][shares.index(share)] for name in names}
        best = max(value for name, value in found.items() if name != "belady")
        cells = [f"**{value:.1f}**" if value == best else f"{value:.1f}" for value in found.values()]
        lines.append([f"{share} %", *cells])
    return table(("experts in slots", *names.values()), lines)


def waves() -> Values:
    """Loads of prompts whose layers need more experts than there are slots."""
    rows = result("toy_waves")["rows"]

    def span(name: str, trace: str) -> str:
        ratios = [row[name] / row["shared"] for row in rows if row["trace"] == trace]
        return f"{min(ratios):.1f} to {max(ratios):.1f}"

    lines = [
        [
            row["routing"],
            f"{row['prompt_rows']:.0f}",
            f"{row['slots']} of {row['experts']}",
            *(f"{row[name]:.0f}" for name in ("in_order", "shared", "least")),
        ]
        for row in rows
    ]
    heads = ["routing", "rows", "slots", "loads, rows in order", "loads, shared", "least"]
    return {
        "waves": table(heads, lines),
        "waves.one": span("in_order", "none1"),
        "waves.eight": span("in_order", "none8"),
    }


def tried() -> Values:
    """What was tried of policies and not adopted."""
    content = result("toy_tried")
    points = [gained for row in content["minima"] for gained in row["points"]]
    saved = [row["saved"] for row in content["placement"]]
    return {
        "tried.minima": f"{min(points):+.1f} to {max(points):+.1f}",
        "tried.saved": f"{min(saved)} to {max(saved)}",
        "tried.loads": f"{min(row['loads'] for row in content['placement']):,}",
    }


def budgets() -> Values:
    """Quality under a budget: what each saves and costs, and the facts of the routing behind it, on both models."""
    points_shown = {
        ("selected", None, 0.98): "`selected`, 0.98 of the mass of the selected",
        ("router", None, 0.98): "`router`, 0.98",
        ("coactivation", None, 0.98): "`coactivation`, 0.98",
        ("coactivation", None, 0.95): "`coactivation`, 0.95",
        ("selected", 32, None): "`selected`, B = 32",
        ("router", 32, None): "`router`, B = 32",
        ("coactivation", 32, None): "`coactivation`, B = 32",
    }
    lines, values = {key: [name] for key, name in points_shown.items()}, defaultdict(list)
    for content in map(result, ("toy_quality", "toy_local_quality")):
        points = {
            (p["ranking"], p["budget"], p["mass"]): p for p in content["points"] if p["coverage"] == "substitution"
        }
        natural = content["natural"]["distinct"]
        for key, line in lines.items():
            point = points[key]
            saved, change = 1 - point["distinct"] / natural, point["perplexity_change"]
            line += [f"{100 * saved:.1f} %", f"{100 * change:+.2f} %", f"{100 * point['agreement']:.1f} %"]
        values["spared"].append(f"{100 * points['selected', 48, None]['agreement']:.1f} %")
        half = content["facts"]["experts"] // 2
        curves = {size["size"]: 100 * size["curve"][half - 1] for size in content["routing"]["sizes"]}
        values["natural"].append(f"{natural:.1f}")
        for rows in (9, 63):
            values[f"half_{rows}"].append(f"{curves[rows]:.1f} %")
        for point in content["reconstruction"]["points"]:
            if (point["coverage"], point["budget"]) == ("truncation", 24):
                values[f"error.{point['ranking']}"].append(f"{100 * point['error']:.1f} %")
        tokens = f"{content['reference']['tokens']:,}"
    head = ("ranking, substitution", "flat: bytes saved", "perplexity", "top-1 agreement", "local: bytes saved")
    shown = {f"quality.{name}": " / ".join(both) for name, both in values.items()}
    quality = table((*head, "perplexity", "top-1 agreement"), list(lines.values()))
    return shown | {"quality.tokens": tokens, "quality": quality}


def budget_cost() -> Values:
    lines = [
        [
            experts,
            row["setting"],
            f"{row['microseconds_a_layer']:.0f}",
            f"{row['milliseconds_a_step']:.1f}",
            f"{100 * row['share']:.1f} %",
        ]
        for experts, name in (
            ("resident", "toy_budget_cost"),
            ("25 % resident, 1.2 MB each", "toy_budget_cost_offloaded"),
        )
        for row in result(name)["rows"]
        if row["setting"] != "no budget"
    ]
    head = ("experts", "budget", "microseconds per layer", "milliseconds per verify step", "share of the step")
    return {"budget_cost": table(head, lines)}


def votes() -> Values:
    """Powers of a draft's probability: chosen on one half of the prompts, shown on the other."""
    results = {"flat": result("toy_votes"), "local": result("toy_local_votes")}
    shown: dict[str, list[str]] = {}
    heads: list[str] = []
    chosen: list[str] = []
    sums: dict[str, float] = defaultdict(float)
    for model, content in results.items():
        for nodes in dict.fromkeys(row["nodes"] for row in content["rows"]):
            halves: dict[str, dict[str, Any]] = {"chosen on": {}, "reported": {}}
            for row in content["rows"]:
                if row["nodes"] == nodes and row["arm"] != "exact":
                    halves[row["half"]][row["arm"]] = row
            first = {alpha: row["kl"] for alpha, row in halves["chosen on"].items()}
            chosen.append(min(first, key=first.__getitem__))
            heads.append(f"{model}, {nodes} nodes")
            for alpha, row in halves["reported"].items():
                sums[alpha] += first[alpha]
                cell = f"{row['kl']:.3f} / {100 * row['top1_agreement']:.1f} %"
                shown.setdefault(alpha, []).append(f"**{cell}**" if alpha == chosen[-1] else cell)
    both = list(results.values())
    return {
        "votes": table(("alpha", *heads), [[alpha, *cells] for alpha, cells in shown.items()]),
        "votes.chosen": ", ".join(chosen),
        "votes.all": min(sums, key=sums.__getitem__),
        "votes.half": _one({str(content["prompts"]["count"] // 2) for content in both}),
        "votes.tokens": _one({str(content["output_tokens"]) for content in both}),
        "votes.budget": _one({str(content["budget"]) for content in both}),
    }


def predictors() -> Values:
    content = result("toy_policies")
    drafted = [name for name, facts in content["traces"].items() if facts["drafts"]]
    found = [
        {name: value["mean"] for name, value in content["prediction_accuracy"][trace].items()} for trace in drafted
    ]
    best = [max(one["last step"], one["none"]) for one in found]
    equal = [one["reuse"] for one, base in zip(found, best, strict=True) if one["reuse"] <= base]
    return {
        "predictors.traces": _WORDS[len(found)],
        "predictors.paper": _range(100 * one["paper"] for one in found),
        "predictors.reuse": _range(100 * one["reuse"] for one in found),
        "predictors.last": _range(100 * one["last step"] for one in found),
        "predictors.none": _range(100 * one["none"] for one in found),
        "predictors.below_last": _WORDS[sum(one["paper"] < one["last step"] for one in found)],
        "predictors.below_none": _WORDS[sum(one["paper"] < one["none"] for one in found)],
        "predictors.above": _WORDS[len(found) - len(equal)],
        "predictors.equal": f"{100 * max(equal, default=0):.1f} %",
    }


def recall() -> Values:
    content = result("toy_predictors")
    models = content["models"]
    names = sorted(models["flat"], key=lambda name: models["flat"][name]["recall_at_k"])
    shown = ("recall_at_k", "recall_at_2k", "recall_on_misses")
    lines = [
        [
            f"`{name}`",
            *(_percent(models[model][name][kind]) for model in models for kind in shown),
            f"{models['local'][name]['us_per_layer']:.0f}",
        ]
        for name in names
    ]
    horizons = [str(ahead) for ahead in range(1, 1 + max(one["reach"] for one in models["flat"].values()))]
    far = [name for name in names if set(horizons) <= set(models["flat"][name]["by_horizon"])]
    ahead = [
        [f"`{name}`", *(_percent(models[m][name]["by_horizon"][h]["recall_at_k"]) for m in models for h in horizons)]
        for name in far
    ]
    heads = [f"{model}: {kind}" for model in models for kind in ("first k", "first 2k", "first k, of misses")]
    heads_ahead = [f"{model}: {h} ahead" for model in models for h in horizons]
    return {
        "recall": table(("", *heads, "µs per layer"), lines),
        "recall.ahead": table(("first k", *heads_ahead), ahead),
        "recall.tokens": f"{content['texts']['held-out']['tokens']:,}",
        "recall.files": str(content["texts"]["held-out"]["files"]),
        "recall.training": f"{content['texts']['training']['tokens']:,}",
        "recall.slots": str(content["slots_percent"]),
    }


def ceilings() -> Values:
    """What a better overlap of loads could gain, calculated."""
    content = result("toy_ceilings")
    lines, names = [], {"none1": "1 request", "none8": "8 requests", "eagle4_8": "8 requests, 4 drafts"}
    for row in content["rows"]:
        folder, _, name = row["trace"].rpartition("/")
        gains = [f"{row['gain'][way]:.2f}" for way in ("rows", "hits", "layer", "step")]
        hits = f"{100 * row['hit_rate']:.0f} %"
        lines.append([folder or "flat", names[name], row["profile"], f"{row['share_percent']:g} %", hits, *gains])
    head = (
        "routing",
        "",
        "profile",
        "slots",
        "hits",
        "rows first",
        "hits first",
        "next layer known",
        "all layers known",
    )
    most = {way: max(row["gain"][way] for row in content["rows"]) for way in ("rows", "layer")}
    return {
        "ceilings": table(head, lines),
        "ceilings.rows": f"{100 * (most['rows'] - 1):.1f} %",
        "ceilings.layer": f"{100 * (most['layer'] - 1):.1f} %",
        "ceilings.layer.least": f"{min(row['gain']['layer'] for row in content['rows']):.2f}",
        "ceilings.recall": f"{100 * content['recall']:.0f} %",
    }


def speculated() -> Values:
    """Quality and bytes of speculated execution."""
    content, lines = result("toy_speculated"), []
    for model, by_slots in content["models"].items():
        for slots, found in by_slots.items():
            runs = {one.get("coverage"): one for one in found["generation"]}
            exact = runs[None]
            for point in found["points"]:
                run = runs[point["coverage"]]
                lines.append(
                    [
                        model,
                        _spaced(slots),
                        f"`{point['coverage']}`",
                        f"{100 * point['perplexity_change']:+.2f} %",
                        f"{100 * point['agreement']:.1f} %",
                        f"{point['kl']:.3f}",
                        f"{run['bytes_per_token'] / exact['bytes_per_token']:.2f}",
                        f"{100 * exact['hit_rate']:.0f} / {100 * run['hit_rate']:.0f} %",
                    ]
                )
    head = ("routing", "slots", "", "perplexity", "top-1", "KL", "bytes over exact", "hits, exact / not")
    texts = content["texts"]["held-out"]
    return {
        "speculated": table(head, lines),
        "speculated.tokens": f"{texts['tokens']:,}",
        "speculated.files": str(texts["files"]),
    }


def shadow() -> Values:
    content = result("toy_shadow")
    models = content["models"]
    pairs = [tuple(name.split(", ")) for name in models["flat"]]
    copies, periods = (list(dict.fromkeys(part)) for part in zip(*pairs, strict=True))
    found = [(model, copy) for model in models for copy in copies]
    lines = [
        [period, *(_percent(models[model][f"{copy}, {period}"]["recall_at_k"]) for model, copy in found)]
        for period in periods
    ]
    last = [models[model][f"int8, {periods[-1]}"]["by_token"][-1] for model in models]
    texts = content["texts"]
    return {
        "shadow": table(("aligned every", *(f"{model}: {copy}" for model, copy in found)), lines),
        "shadow.files": str(texts["files"]),
        "shadow.written": str(texts["written"]),
        "shadow.block": str(content["block"]),
        "shadow.decayed": _range(100 * each for each in last),
    }


def executions() -> Values:
    content = result("toy_executions")
    times: dict[tuple, dict[tuple, float]] = {}
    for row in content["rows"]:
        place = row["trace"], row["profile"], row["share_percent"]
        way = row["execution"], row["policy"], row.get("admission"), row.get("moves")
        times.setdefault(place, {})[way] = row["tpot_ms"]
    layer = ("pointers", "reuse", "layer", None)

    def ratios(way: tuple, trace: str | None = None) -> list[float]:
        return [found[way] / found[layer] for place, found in times.items() if trace in (None, place[0])]

    step = ("pointers", "reuse", "step", content["default_moves"])
    slots, flashlib = ratios(("slots", "reuse", None, None)), ratios(("flashlib", "lru", None, None))
    return {
        **{f"step.{trace}": _range(100 * (ratio - 1) for ratio in ratios(step, trace)) for trace in content["traces"]},
        "executions.slots": f"{min(slots):.2f}-{max(slots):.2f}",
        "executions.flashlib": f"{min(flashlib):.2f}-{max(flashlib):.1f}",
    }


def papers() -> Values:
    rendered: Values = {}
    for model, prefix in {"": "toy", ".local": "toy_local"}.items():
        scored, routed = result(f"{prefix}_moe_spac"), result(f"{prefix}_moe_spec")
        by_score, pairs = scored["spread"]["frequency"]["mean"], routed["spread"]["pairs"]["mean"]
        distinct = dict(zip(routed["sizes"], routed["spread"]["distinct"]["mean"], strict=True))
        half = routed["experts"] // 2 - 1
        rendered |= {
            f"moe_spac.idle{model}": f"{by_score[0]:.1f}",
            f"moe_spac.hot{model}": f"{by_score[-1]:.1f}",
            f"moe_spac.traces{model}": _WORDS[len(scored["traces"])],
            f"moe_spec.pairs{model}": f"{min(pairs):.0f} to {max(pairs):.0f}",
            f"moe_spec.distinct{model}": f"{distinct[127]:.0f}",
            f"moe_spec.half{model}": f"{100 * routed['spread']['mass_63']['mean'][half]:.0f} %",
        }
    return rendered


def reuse_of_experts() -> Values:
    lines, rendered = [], {}
    for model, file in {"flat": "toy_reuse", "local": "toy_local_reuse"}.items():
        content = result(file)
        mean = {name: values["mean"] for name, values in content["spread"].items()}
        costs = {"experts": "no cache"} | {
            f"loads_{share}": f"{share} % in slots" for share in content["shares_percent"]
        }
        for name, shown in costs.items():
            pays = [
                f"{ratio:.2f} ({alpha:.2f})"
                for ratio, alpha in zip(mean[name][1:], mean[f"needed_{name}"][1:], strict=True)
            ]
            lines.append([f"{model}, {shown}", *pays])
        rendered[f"reuse.correlation.{model}"] = f"{mean['correlation'][0]:.2f} to {mean['correlation'][-1]:.2f}"
    head = ("", *(f"γ = {gamma}" for gamma in content["drafts"][1:]))
    return rendered | {"reuse": table(head, lines)}


def moe_spac_tables() -> Values:
    rendered = {}
    for model, file in {"flat": "toy_tables", "local": "toy_local_tables"}.items():
        content = result(file)
        head = ("", *(f"{share:g} %" for share in content["shares_percent"]))
        for name in ("table2", "table4"):
            rows = [[row, *(f"{cell['tpot_ms']:.2f}" for cell in cells)] for row, cells in content[name].items()]
            rendered[f"moe_spac.{name}.{model}"] = table(head, rows)
    return rendered


def od_moe() -> Values:
    """OD-MoE's speed of Mixtral and that of workers on several networks, both calculated."""
    content = result("toy_local_od_moe")
    mixtral, given = content["mixtral"]["assumed"], content["assumed"]
    counts = list(next(iter(content["workers"].values())))
    lines = [
        [name, f"{1e6 * content['networks'][name]['latency']:.0f}", *(f"{speed:.1f}" for speed in speeds.values())]
        for name, speeds in content["workers"].items()
    ]
    head = ("network", "µs one way", *(f"{count} worker{'s' * (count != '1')}" for count in counts))
    return {
        "od_moe": table(head, lines),
        "od_moe.paper": f"{content['mixtral']['paper']:.2f}",
        "od_moe.calculated": f"{content['mixtral']['tokens_per_second']:.2f}",
        "od_moe.resident": f"{mixtral['resident_tokens_per_second']:.2f}",
        "od_moe.experts": f"{mixtral['compute_ms']:.1f}",
        "od_moe.layer": f"{mixtral['main_ms'] + mixtral['compute_ms']:.1f}",
        "od_moe.load": f"{mixtral['load_ms']:.0f}",
        "od_moe.recall": f"{100 * mixtral['recall']:.1f} %",
        "od_moe.share": f"{100 * given['share']:.2f} %",
        "od_moe.each": f"{given['main_ms']:.2f}",
        "od_moe.read": f"{given['load_ms']:.0f}",
    }


def workers() -> Values:
    """Expert workers over loads from disk, and a round trip to one."""
    names = {
        "paired_workers_toy": "workers, all experts in memory",
        "paired_workers_cacheless_toy": "workers, no more slots than the engine",
    }
    lines, missed = [], []
    for name, shown in names.items():
        for row in result(name)["rows"]:
            rates = (statistics.median(row[side]["tokens_per_second"]) for side in ("base", "other"))
            ratio = _with_interval(row["ratio"], row["interval"])
            lines.append([shown, *(f"{rate:.1f}" for rate in rates), ratio, f"{row['ratio_of_totals']:.2f}"])
            missed.append(100 * row["base"]["misses"] / (row["base"]["hits"] + row["base"]["misses"]))
    [group] = result("paired_workers_divided_toy")["rows"]
    trip = result("worker_round_trip")
    by_size = {row["bytes"]: row for row in trip["rows"]}
    least = by_size[4 << 10]
    head = ("", "engine, all from disk", "with workers", "ratio (95 %)", "of totals")
    return {
        "workers": table(head, lines),
        "workers.missed": f"{statistics.mean(missed):.0f} %",
        "workers.group": _with_interval(group["ratio"], group["interval"]),
        "workers.ratio": f"{result('paired_workers_toy')['rows'][0]['ratio']:.1f}",
        "round_trip": table(
            ("bytes of rows", *(_size(size) for size in by_size)),
            [["µs, there and back", *(f"{1e6 * row['median']:,.0f}" for row in by_size.values())]],
        ),
        "round_trip.least": f"{1e6 * least['median']:.0f}",
        "round_trip.range": f"{1e6 * least['low']:.0f} to {1e6 * least['high']:.0f}",
        "round_trip.aim": f"{1e6 * trip['aim']:.0f}",
        "round_trip.alone": f"{1e6 * trip['zmq_alone']['median']:.0f}",
    }


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >> 20 else f"{count >> 10} KiB"


def worker_faults() -> Values:
    """Seconds lost when a worker fails, without and with a replica of its layers."""
    contents = {"engine": result("worker_faults_toy"), "replica": result("worker_faults_replica_toy")}
    assert all(row["tokens_equal"] for content in contents.values() for row in content["rows"])
    stopped = contents["engine"]["stopped_seconds"]
    what = {
        "kill": "killed",
        "stop": f"stopped for {stopped['stop']:.0f} s",
        "late": f"stopped for {stopped['late']:.0f} s, answers come late",
    }
    lines = []
    for fault, shown in what.items():
        cells = []
        for content in contents.values():
            rows = [row for row in content["rows"] if row["fault"] == fault]
            back = [row["back_within_seconds"] for row in rows if row["back_within_seconds"] is not None]
            cells += [
                _low_high([row["lost_seconds"] for row in rows]),
                _low_high([row["longest_step_seconds"] for row in rows]),
                _low_high(back) if back else "not noticed",
            ]
        lines.append([shown, *cells])
    head = [f"{where}: {text}" for where in contents for text in ("s lost", "longest step, s", "back within, s")]
    steps = [row["undisturbed_step_seconds"] for content in contents.values() for row in content["rows"]]
    return {
        "worker_faults": table(("a worker is", *head), lines),
        "worker_faults.step": f"{1e3 * statistics.median(steps):.0f}",
        "worker_faults.turns": str(len([row for row in contents["engine"]["rows"] if row["fault"] == "kill"])),
    }


def _with_interval(value: float, interval: Iterable[float]) -> str:
    low, high = interval
    return f"{value:.2f} ({low:.2f} – {high:.2f})"


def _low_high(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} – {max(values):.1f})"


def planned() -> Values:
    """What ``vllm-spac plan`` calculates, beside what was measured."""
    content = result("planned_toy")
    lines = []
    for row in content["rows"]:
        low, high = sorted(row["planned"][name] for name in ("low", "high"))
        lines.append(
            [
                f"{row['expert_bytes'] / 1e6:.1f} MB",
                _spaced(row["slots"]),
                f"{row['measured']:.1f}",
                f"{row['planned']['trace']:.1f}",
                f"{100 * row['error']:+.0f} %",
                f"{low:.1f} – {high:.1f}",
                " / ".join(_percent(row[f"{kind}_hit_rate"]) for kind in ("measured", "planned")),
                row["limit"],
            ]
        )
    head = (
        "experts of",
        "slots",
        "measured",
        "from its own routing",
        "",
        "range without it",
        "hits in %",
        "limited by",
    )
    return {
        "planned": table(head, lines),
        "planned.within": f"{sum(row['within'] for row in content['rows'])} of {len(content['rows'])}",
        "planned.in_range": str(sum(row["in_range"] for row in content["rows"])),
        "planned.tolerance": f"{100 * content['within']:.0f} %",
    }


def tuned() -> Values:
    """What ``vllm-spac tune`` chose, beside the best of the configurations chosen by hand."""
    content = result("tuned_toy")
    lines = []
    for found in content["limits"].values():
        assert found["tune_over_default"]["tokens_equal"] and found["best_over_default"]["tokens_equal"]
        assert found["tune"]["choice"] == "default", "the text says so"
        cores = f"{found['cores']} core{'s' * (found['cores'] != 1)}"
        ratios = (found[kind] for kind in ("tune_over_default", "best_over_default", "tune_over_best"))
        shown = [_with_interval(ratio["median"], (ratio["low"], ratio["high"])) for ratio in ratios]
        lines.append(
            [f"{_spaced(found['slots'])}, {cores}", found["tune"]["choice"], shown[0], found["best"], *shown[1:]]
        )
    head = ("slots, cores", "`tune` chose", "over the default (95 %)", "best of the others", "over the default")
    return {
        "tuned": table((*head, "`tune`'s over it"), lines),
        "tuned.tried": _one({str(len(found["by_hand"])) for found in content["limits"].values()}),
        "tuned.minutes": f"{content['minutes']:.0f}",
        "tuned.turns": str(content["turns"]),
        "tuned.last": str(content["last_turns"]),
    }


def soak() -> Values:
    content = result("soak_toy")
    assert not content["problems"], "a soak that found a problem is none to publish"
    memory = content["trends"]["rss"]
    return {
        "soak.minutes": f"{content['seconds'] / 60:.0f}",
        "soak.steps": f"{content['steps']:,}",
        "soak.answers": f"{content['requests']['compared']:,}",
        "soak.aborted": f"{content['requests']['aborted']:,}",
        "soak.growth": f"{memory['growth'] / 2**20:.1f}",
        "soak.allowed": f"{memory['limit'] / 2**20:.1f}",
    }


# -- text --------------------------------------------------------------------------------------------------

_WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown."""
    head = list(head)
    lines = ["|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _spaced(slots: str) -> str:
    """Returns ``25 %`` for ``25%``."""
    return slots.replace("%", " %")


def _rate(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']['median']:.1f}"


def _spread(row: dict[str, Any]) -> str:
    rate = row["tokens_per_second"]
    return f"{rate['median']:.1f} ({rate['low']:.1f} – {rate['high']:.1f})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _range(percent: Iterable[float]) -> str:
    values = list(percent)
    return f"{min(values):.0f}-{max(values):.0f} %"


def _one(values: Iterable[str]) -> str:
    """Returns the value that all have; ``ValueError`` if they differ, which the sentence would have to say."""
    [value] = set(values)
    return value
