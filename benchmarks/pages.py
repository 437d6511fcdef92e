"""Renders the page of each result, ``results/NAME.md``, and their index from the JSON beside them.

The source of a page is ``pages/NAME.md.jinja``: between two lines ``+++`` how the result is made (TOML, the fields of
``Made``), below it text with numbers as Jinja expressions. It sets ``verdict``, its one sentence, and
unless it is answered ``figure``, the one number of the index. The index is ``pages/README.md.jinja``.
"""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.common import RESULTS, ROOT, over_exact
from benchmarks.replay.routing_locality import PUBLISHED
from benchmarks.scaled.proportions import Proportions
from vllm_spac.integration.hooks.device import TESTED as SUPPORTED_VLLM

SOURCES = ROOT / "benchmarks" / "pages"
INDEX = "README"
CARVED = '{% include "carved.jinja" %}'  # first on each page with figures of the carved model
CLUSTERED = '{% include "clustered.jinja" %}'  # instead, where they are of the one before it
PRESUMED = '{% include "presumed.jinja" %}'  # on each page with 4-bit experts on the CPU, measured with a pace
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Made:
    """How a result is made."""

    title: str  # of its page
    files: tuple[str, ...] = ()  # JSON and pictures, in ``benchmarks/results``
    commands: tuple[str, ...] = ()  # that make them, in this order, from the checkout's root
    minutes: int = 10  # approximate duration on two otherwise idle cores
    timed: bool = False  # whether its numbers are times
    answered: str = ""  # the commit that still has what the commands of an answered question run; they run there
    stale: str = ""  # why its results are not from the code, command or traces in the tree, until it is made again
    clustered: bool = False  # its results are of the carved model before the present one, until it is made again
    presumed: bool = False  # the seconds of its CPU experts are not a kernel's
    note: str = ""  # further remarks


def names() -> list[str]:
    """Returns the pages' names."""
    return sorted({path.name.removesuffix(".md.jinja") for path in SOURCES.glob("*.md.jinja")} - {INDEX})


def source(name: str) -> tuple[Made, str]:
    """Returns how a result is made, and the text of its page with expressions."""
    _, front, text = (SOURCES / f"{name}.md.jinja").read_text(encoding="utf-8").split("+++\n", 2)
    fields: dict[str, Any] = tomllib.loads(front)
    return Made(files=tuple(fields.pop("files", ())), commands=tuple(fields.pop("commands", ())), **fields), text


def rendered() -> Iterator[tuple[Path, str]]:
    """Yields each page, and the index last."""
    yield from ((RESULTS / f"{name}.md", _page(name)[0]) for name in names())
    yield ROOT / "benchmarks" / "README.md", _tidy(_template((SOURCES / f"{INDEX}.md.jinja").read_text("utf-8"))[0])


def update() -> list[str]:
    """Writes the pages and the index; returns the names of those that changed."""
    changed = [(path, text) for path, text in rendered() if not path.exists() or path.read_text("utf-8") != text]
    for path, text in changed:
        path.write_text(text, encoding="utf-8")
    return [str(path.relative_to(ROOT)) for path, _ in changed]


def problems() -> Iterator[str]:
    """Yields pages that differ from what is rendered, pages without a source, and those that the index lacks."""
    texts = dict(rendered())
    for path, text in texts.items():
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before != text:
            lines = zip([*before.split("\n"), ""], [*text.split("\n"), ""], strict=False)
            was, now = next(pair for pair in lines if pair[0] != pair[1])
            yield f"{path.relative_to(ROOT)}: {was.strip()!r} should be {now.strip()!r}"
    yield from (f"{path.name}: has no source" for path in sorted(set(RESULTS.glob("*.md")) - set(texts)))
    index = list(texts.values())[-1]
    yield from (f"{name}: not in the index" for name in names() if index.count(f"](results/{name}.md) |") != 1)


def forget() -> None:
    """Reads results and sources again."""
    for known in (_page, result):
        known.cache_clear()


def expression(text: str) -> str:
    """Returns ``text`` with its Jinja expressions evaluated, as on a page."""
    return _template(text)[0]


def _template(text: str) -> tuple[str, Any]:
    module = _environment().from_string(text).make_module()
    return str(module), module


@cache
def _page(name: str) -> tuple[str, str]:
    """Returns a page, and its row of the index."""
    made, text = source(name)
    body, module = _template(text)
    pictures = "".join(f"![{made.title}]({file})\n\n" for file in made.files if file.endswith(".png"))
    said = f"{made.title} {module.verdict} {body}"
    about = f"{expression(CLUSTERED if made.clustered else CARVED)}\n\n" if "carved" in said else ""
    about += f"{expression(PRESUMED)}\n\n" if made.presumed else ""
    page = f"# {made.title}\n\n> {module.verdict}\n\n{about}{body.strip()}\n\n{pictures}## Made by\n\n{_footer(made)}"
    figure = "" if made.answered else module.figure
    return _tidy(page), f"| [{made.title}](results/{name}.md) | {figure} | {module.verdict} |"


def _index(*chosen: str) -> str:
    return "\n".join(["| result | figure | verdict |", "|---|---|---|", *(_page(name)[1] for name in chosen)])


def _footer(made: Made) -> str:
    block = "\n".join(["```bash", *made.commands, "```\n\n"]) * bool(made.commands and not made.answered)
    how = f"About {made.minutes} minutes" + ", on an otherwise idle machine" * made.timed
    if made.answered:
        how = f"Answered; its scripts are at `{made.answered}`, where `reproduce.py run` runs them"
    said = [text[0].upper() + text[1:] for text in (how * bool(made.commands), made.note, made.stale) if text]
    numbers = ", ".join(f"[{file}]({file})" for file in made.files if file.endswith(".json"))
    remarks = f"{'. '.join(said)}.\n" * bool(said)
    return f"{block}{remarks}" + f"\nNumbers and provenance: {numbers}.\n" * bool(numbers)


def _tidy(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"\| +(?=\|)", "| ", text)).strip() + "\n"


@cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(SOURCES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    made.filters |= {
        "f": _number,
        "pct": _percent,
        "less_one": lambda ratio: 100 * (ratio - 1),
        "spaced": lambda slots: slots.replace("%", " %"),
        "span": _span,
        "spread": lambda rate: f"{rate['median']:.1f} ({rate['low']:.1f} – {rate['high']:.1f})",
        "ratio": _ratio,
        "low_high": lambda rate: f"{rate['median']:.2f} ({rate['low']:.2f} – {rate['high']:.2f})",
        "middle": _middle,
        "median": lambda values: statistics.median(list(values)),
    }
    functions = (
        zip,
        ran,
        architectures,
        over_exact,
        tokens_per_step,
        ceilings,
        point_of,
        best_over,
        predictions,
        votes,
        power_for_all,
    )
    made.globals |= {function.__name__: function for function in functions}
    made.globals |= {"result": result, "index": _index, "proportions": Proportions.of, "made": lambda: _all_made()}
    made.globals |= {"WORDS": WORDS, "PUBLISHED": PUBLISHED}
    return made


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _all_made() -> list[Made]:
    return [source(name)[0] for name in names()]


def _number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value + 0:.{digits}f}"  # what a result lacks says so when it is added to


def _percent(value: float | None, digits: int = 1, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.{digits}f}"


def _span(values: Iterable[float], digits: int = 0, between: str = " to ", sign: str = "") -> str:
    """Returns the least and the most of ``values``; one number if they are equal."""
    found = sorted(values)
    ends = [f"{value:{sign}.{digits}f}" for value in (found[0], found[-1])]
    return between.join(dict.fromkeys(ends))


def _ratio(row: Row, name: str = "ratio") -> str:
    """Returns a row's ratio with its 95 % interval."""
    interval = row["interval" if name == "ratio" else f"{name.removesuffix('_ratio')}_interval"]
    return f"{row[name]:.2f} ({interval[0]:.2f} – {interval[1]:.2f})"


def _middle(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} ({min(known):.1f} – {max(known):.1f})" if known else ""


# -- calculated from results ---------------------------------------------------------------------------------


def ran() -> dict[tuple[str, str, str], dict[str, str]]:
    """Returns (vLLM's version, model runner, platform) -> page -> its title, of all results in the tree.

    Each version that the plugin supports is there, with V1 and V2, on every platform that a result is from. vLLM's CPU
    build takes V1's runner; what ran elsewhere ran with V2's.
    """
    found: defaultdict[tuple[str, str, str], dict[str, str]] = defaultdict(dict)
    for name in names():
        made, _ = source(name)
        for file in made.files:
            if file.endswith(".json"):
                content = result(file.removesuffix(".json"))
                origin = content.get("provenance") or content
                release, _, build = origin["versions"]["vllm"].partition("+")
                gpu = origin.get("machine", {}).get("gpu")
                platform = "CPU" if build == "cpu" else gpu.partition(",")[0] if gpu else "CUDA path, emulated"
                found[release.rpartition(".")[0], "V1" if build == "cpu" else "V2", platform][name] = made.title
    versions = [version for version in SUPPORTED_VLLM if version not in {key[0] for key in found}]
    kinds = {key[1:] for key in found} | {("V1", key[2]) for key in found}
    for version in (*versions, *{key[0] for key in found}):
        for kind in kinds:
            found.setdefault((version, *kind), {})
    return dict(sorted(found.items()))


def architectures() -> dict[tuple[str, str, str], int]:
    """Returns how many MoE architectures were served exactly, by keys as of ``ran``: of ``make families``, and of those
    that ran under emulation."""
    found = {}
    for name, *where in (("families", "V1", "CPU"), ("families_emulated", "V2", "CUDA path, emulated")):
        content = json.loads((ROOT / "tests" / "upstream" / f"{name}.json").read_text(encoding="utf-8"))
        verdicts = (row if isinstance(row, str) else row["verdict"] for row in content["rows"].values())
        version = content["vllm"].rpartition(".")[0]
        found[version, where[0], where[1]] = sum(verdict.startswith("served") for verdict in verdicts)
    return found


def tokens_per_step(side: Row) -> float:
    """Returns the tokens that a step of one side of a paired run emits."""
    drafted = side["speculation"]
    return 1 + drafted["accepted_tokens"] / drafted["drafts"] if drafted else 1


def ceilings(content: Row) -> list[float]:
    """Returns what a perfect overlap of loads and all else would give over none, for each row of a paired run.

    Of two sizes, the more loads of a request and its more seconds give the seconds of one load; what is then left of a
    request is all else.
    """
    bases = [row["base"] for row in content["rows"]]
    seconds = [base["ttft"] + (content["output_tokens"] - 1) * base["tpot"] for base in bases]
    loads = [base["loads"] / len(row["ratios"]) for base, row in zip(bases, content["rows"], strict=True)]
    per_load = (seconds[0] - seconds[-1]) / (loads[0] - loads[-1])
    return [all_ / max(count * per_load, all_ - count * per_load) for all_, count in zip(seconds, loads, strict=True)]


def point_of(content: Row, ranking: str, budget: int | None, mass: float | None) -> Row:
    """Returns the point of a ranking with substitution."""
    wanted = ("substitution", ranking, budget, mass)
    key = itemgetter("coverage", "ranking", "budget", "mass")
    return next(point for point in content["points"] if key(point) == wanted)


def best_over(rows: Sequence[Row], nodes: int, floor: float) -> str:
    """Returns the most that a budget gains over the exact tree of so many nodes while it keeps first choices."""
    of_tree = [(ratio, row) for ratio, row in zip(over_exact(rows), rows, strict=True) if row["drafts"] == nodes]
    kept = [one for one in of_tree if one[0] and one[1]["top1_agreement"] >= floor]
    if not kept:
        return f"none ({nodes} nodes)"
    ratio, row = max(kept, key=itemgetter(0))
    return f"{ratio:.2f} ({nodes} nodes, B = {row['budget']['budget']}, {100 * row['top1_agreement']:.1f} %)"


def predictions(content: Row) -> dict[str, Any]:
    """Returns how often hot and cold experts were predicted, by trace with drafts, beside both base rates."""
    return {
        "traces": [
            {name: value["mean"] for name, value in content["prediction_accuracy"][trace].items()}
            for trace, facts in content["traces"].items()
            if facts["drafts"]
        ]
    }


def votes(contents: Iterable[Row]) -> list[dict[str, Any]]:
    """Returns, for each model and number of nodes, the power that one half of the prompts chooses, and both halves."""
    columns = []
    for content in contents:
        for nodes in dict.fromkeys(row["nodes"] for row in content["rows"]):
            halves: dict[str, dict[str, Row]] = defaultdict(dict)
            for row in content["rows"]:
                if row["nodes"] == nodes and row["arm"] != "exact":
                    halves[row["half"]][row["arm"]] = row
            first: dict[str, float] = {alpha: row["kl"] for alpha, row in halves["chosen on"].items()}
            chosen = min(first, key=first.__getitem__)
            columns.append({"chosen": chosen, "first": first, **halves})
    return columns


def power_for_all(columns: Sequence[Row]) -> str:
    """Returns the power with the least sum over all columns."""
    sums: dict[str, float] = {alpha: sum(column["first"][alpha] for column in columns) for alpha in columns[0]["first"]}
    return min(sums, key=sums.__getitem__)
