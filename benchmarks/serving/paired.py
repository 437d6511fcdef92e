"""Two engines, turn by turn: both stay alive and each prompt goes to one and at once to the other.

A machine whose disk and clock drift by a fifth within minutes says nothing of a few percent when one engine runs after
the other. Here the two of a turn are seconds apart, each as often first, and what is reported is the ratio of their
tokens a second: its median over the turns, with a bootstrapped interval of 95 %. It counts only where the tokens are
equal.

What is particular to a process, e.g. where its memory lies, lasts as long as the engine and is in no interval: hence
--starts, and the median of each start beside. spac against spac shows how much that is. What can pause, speculation
and the trace, is better measured with --one-engine: the same process runs with it and without, turn by turn.

Each side is [bold]stock[/] or [bold]spac[/], followed by knob=value of the plugin, and by speculation=ngram, eagle3 or
draft if it speculates.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, exit_on_sigterm, is_toy, provenance, write_result
from processes import EngineError, LiveEngine
from run import PACKED, PackedFolder, Settings

from vllm_spac.config import SpacConfig
from vllm_spac.errors import ConfigError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_PAUSE = 0.3  # seconds; OpenMP threads of the engine that has just run still spin for 0.2
_RESAMPLES = 10_000
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/paired.py .cache/toy/mid stock spac --slots 100%

python benchmarks/serving/paired.py MODEL spac "spac speculation=eagle3" --slots 5%,10%,25%,50%,100%

python benchmarks/serving/paired.py MODEL spac "spac speculation=eagle3" --slots 10%,50% --one-engine --turns 60

python benchmarks/serving/paired.py MODEL spac "spac trace=.cache/serving/paired.trace" --slots 25%,100% --one-engine

python benchmarks/serving/paired.py MODEL "spac policy=lru" "spac policy=utility prefetch=utility" --slots 25%
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Side:
    """One of the two engines. ``knobs`` is None for stock vLLM."""

    text: str
    knobs: dict[str, str] | None
    speculation: str = "none"

    @classmethod
    def parse(cls, text: str, slots: str) -> Side:
        """Read ``spac policy=lru speculation=ngram``; ``slots`` where it names none.

        Raises:
            PlanError: it is not understood.
            ConfigError: a knob or its value is not the plugin's.
        """
        kind, *words = text.split()
        if kind not in ("stock", "spac") or not all("=" in word for word in words):
            raise plan.PlanError(f"{text!r}: use stock or spac, then knob=value, e.g. spac policy=lru")
        said = dict(word.split("=", 1) for word in words)
        speculation = said.pop("speculation", "none")
        if speculation not in plan.SPECULATIONS:
            raise plan.PlanError(f"no speculation is called {speculation}; use {', '.join(plan.SPECULATIONS)}")
        if kind == "stock":
            if said:
                raise plan.PlanError(f"{text!r}: stock vLLM has no knob {next(iter(said))}")
            return cls(text, None, speculation)
        knobs = {"slots": slots} | said
        SpacConfig.parse(knobs)
        return cls(text, knobs, speculation)

    def beyond(self, base: Side) -> list[str]:
        """What an engine of this side must pause to be one of ``base``.

        Raises:
            PlanError: no engine of this side becomes one of ``base`` by it.
        """
        parts = ["speculation"] if base.speculation == "none" != self.speculation else []
        if self.knobs is not None and "trace" in self.knobs and "trace" not in (base.knobs or {}):
            parts.append("trace")
        knobs = {name: value for name, value in (self.knobs or {}).items() if name not in parts}
        speculation = "none" if "speculation" in parts else self.speculation
        if not parts or None in (base.knobs, self.knobs) or (base.knobs, base.speculation) != (knobs, speculation):
            raise plan.PlanError(
                f"--one-engine: {self.text!r} must be {base.text!r} and speculation=… or trace=…, which can pause"
            )
        if "speculation" in parts and self.knobs.get("guard") == "off":
            raise plan.PlanError("--one-engine: speculation pauses by the guard, which is off")
        return parts

    def job(self, settings: Settings) -> dict:
        """What ``engine.py`` is told."""
        job = settings.job(plan.Configuration(None, None, self.speculation), [])
        if self.knobs is not None:
            where = {} if self.knobs.get("store") == "host" else {"disk_dir": str(settings.disk_dir)}
            job["spac"] = where | self.knobs
        return job


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    base: Annotated[str, typer.Argument(help="What the other is compared with.")],
    other: Annotated[str, typer.Argument(help="The other one.")],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, one pair of engines each.")] = "25%",
    turns: Annotated[int, typer.Option(min=2, help="Turns that count, each with a prompt of its own.")] = 20,
    starts: Annotated[
        int, typer.Option(min=1, help="Times that both are started, each for its share of the turns.")
    ] = 3,
    warm: Annotated[int, typer.Option(min=0, help="Turns after a start that do not count.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated in a turn.")] = 128,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of a speculative step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 beside the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: draft beside the model.")] = None,
    disk_dir: PackedFolder = PACKED,
    eager: Annotated[bool, typer.Option("--eager/--compile", help="enforce_eager of both engines.")] = True,
    one_engine: Annotated[bool, typer.Option("--one-engine", help="OTHER's runs both, without what it adds.")] = False,
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a turn.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON; a picture of several sizes.")] = RESULTS / "paired_toy.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(120, Console().width))
    drafts = plan.Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    settings = Settings(model, (1,), prompt_tokens, output_tokens, seed, eager, None, disk_dir, drafts, timeout)
    try:
        pairs = {size: (Side.parse(base, size), Side.parse(other, size)) for size in plan.split(slots)}
        pauses = {size: other.beyond(base) if one_engine else [] for size, (base, other) in pairs.items()}
    except (ValueError, ConfigError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    if turns < starts:
        console.print(f"[bold red]error:[/] --turns {turns}: each of {starts} starts needs at least one")
        raise typer.Exit(2)
    ids = prompts.load(model, warm + turns, prompt_tokens, seed)
    result = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "base": base,
        "other": other,
        "draft_tokens": draft_tokens,
        "prompts": ids.describe(),
        "one_engine": one_engine,
        "starts": starts,
        "warm_turns": warm,
        "output_tokens": output_tokens,
        "enforce_eager": eager,
        "seed": seed,
        "rows": [],
        "provenance": provenance(),
    }
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(pairs) * (turns + starts * warm))
        for size, pair in pairs.items():
            said: list[list[list[dict]]] = []
            try:
                for start in range(starts):
                    progress.update(task, description=f"{size}: start {start + 1}")
                    asked, mine = ids.ids[:warm] + ids.ids[warm + start :: starts], []
                    for answers in _turns(pair, pauses[size], asked, settings):
                        mine.append(answers)
                        progress.advance(task)
                    said.append(mine)
            except EngineError as error:
                console.print(f"[bold red]error:[/] {size}: {escape(str(error))}", highlight=False)
                raise typer.Exit(1) from error
            result["rows"].append(_row(size, said, warm, seed))
            write_result(output, result)
    _show(console, result)
    console.print(f"wrote {output}", soft_wrap=True)
    if len(result["rows"]) > 1:
        _picture(result, output.with_suffix(".png"))
        console.print(f"wrote {output.with_suffix('.png')}", soft_wrap=True)
    if not all(row["tokens_equal"] for row in result["rows"]):
        raise typer.Exit(1)


def _turns(
    pair: tuple[Side, Side], pauses: list[str], ids: list[list[int]], settings: Settings
) -> Iterator[list[dict]]:
    """What the two said in each turn; with ``pauses`` the second engine runs for both."""
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(LiveEngine(side.job(settings), side.knobs is None, settings.timeout)))
            for side in (pair[1:] if pauses else pair)
        ]
        for prompt, order in zip(ids, orders(settings.seed), strict=False):
            answers = [{}, {}]
            for which in order:
                time.sleep(_PAUSE)
                without = [] if which else pauses
                answers[which] = engines[which % len(engines)].turn(prompt, settings.output_tokens, without)
            yield answers


def orders(seed: int) -> Iterator[tuple[int, int]]:
    """Who is first, turn by turn: the second may find experts that the first has loaded, so each is as often first."""
    draw = random.Random(seed)
    while True:
        first = draw.randrange(2)
        yield first, 1 - first
        yield 1 - first, first


def _row(slots: str, said: list[list[list[dict]]], warm: int, seed: int) -> dict:
    """Of what the two said: [starts][turns][2]."""
    counted = [turn for start in said for turn in start[warm:]]
    rates = [[_rate(answer) for answer in turn] for turn in counted]
    ratios = [other / base for base, other in rates]
    low, high = interval(ratios, seed)
    of_starts = [statistics.median(_rate(other) / _rate(base) for base, other in start[warm:]) for start in said]
    sides = []
    for which in (0, 1):
        mine = [turn[which] for turn in counted]
        sides.append(
            {
                "tokens_per_second": [rate[which] for rate in rates],
                "tpot": statistics.median(answer["tpot"][0] for answer in mine),
                "ttft": statistics.median(answer["ttft"][0] for answer in mine),
                "hits": sum(answer["counters"].get("hits", 0) for answer in mine),
                "misses": sum(answer["counters"].get("misses", 0) for answer in mine),
                "guard": [start[-1][which]["choices"].get("guard") for start in said],
            }
        )
    return {
        "slots": slots,
        "tokens_equal": all(base["tokens"] == other["tokens"] for start in said for base, other in start),
        "ratio": statistics.median(ratios),
        "interval": [low, high],
        "ratio_of_starts": of_starts,
        "ratio_of_totals": sum(t[0]["seconds"] for t in counted) / sum(t[1]["seconds"] for t in counted),
        "ratios": ratios,
        "base": sides[0],
        "other": sides[1],
    }


def _rate(answer: dict) -> float:
    """Tokens a second of a turn."""
    return len(answer["tokens"][0]) / answer["seconds"]


def interval(values: list[float], seed: int) -> tuple[float, float]:
    """Between which the median lies with 95 %, by the bootstrap's percentiles."""
    draws = np.random.default_rng(seed).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _picture(result: dict, path: Path) -> None:
    rows = result["rows"]
    figure, axes = plt.subplots(figsize=(2 + 1.2 * len(rows), 4), layout="constrained")
    axes.boxplot([row["ratios"] for row in rows], tick_labels=[row["slots"] for row in rows])
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(
        xlabel="slots", ylabel="tokens a second, ratio of a turn", title=f"{result['other']}\nover {result['base']}"
    )
    if result["label"]:
        figure.supxlabel(result["label"], fontsize="small")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _show(console: Console, result: dict) -> None:
    table = Table(title=f"{result['other']} over {result['base']}, tokens a second", title_justify="left")
    for name in ("slots", "base", "other", "ratio", "95 %", "of starts", "hits", "hits", "tokens equal"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        sides = row["base"], row["other"]
        table.add_row(
            row["slots"],
            *(f"{statistics.median(side['tokens_per_second']):.1f}" for side in sides),
            f"{row['ratio']:.3f}",
            "{:.3f} - {:.3f}".format(*row["interval"]),
            " ".join(f"{ratio:.2f}" for ratio in row["ratio_of_starts"]),
            *(_hit_rate(side) for side in sides),
            "yes" if row["tokens_equal"] else "[red]NO[/]",
        )
    console.print(table)


def _hit_rate(side: dict) -> str:
    total = side["hits"] + side["misses"]
    return f"{100 * side['hits'] / total:.1f}%" if total else ""


if __name__ == "__main__":
    app()
