"""Compares two engines in turns: both stay alive, and each prompt goes to one and right after it to the other.

If a machine's disk and clock drift by a fifth within minutes, running one engine after the other cannot resolve a few
percent. Here the two runs of a turn are seconds apart, each equally often first. Reported is the ratio of their tokens
per second: its median over the turns, with a bootstrapped 95 % interval, and next to it the ratio of the totals, all
tokens over all seconds, in which slow turns weigh more. It is valid only if the tokens are equal; where rounding
depends on the number of rows (see results/batches.md), sides that draft differently, also because of the guard, are
equal in float32 only (--dtype).

Effects of a particular process, e.g. of its memory placement, last as long as the engine and are in no interval: hence
--starts, and the median of each start in the table. spac against spac shows their size.

Each side is [bold]stock[/] or [bold]spac[/], followed by knob=value of the plugin, by speculation=ngram, eagle3 or
draft if it speculates, and by draft_tokens=N where --draft-tokens is not its draft length; tree=N is one. The table and
the JSON also have the seconds of a step after the first token, those of the drafter in it, and their ratio: a step of
drafts emits several tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, PlanError, Script, is_toy, progress, provenance, show, wide, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, Case, Drafts, PackedFolder, Settings, split
from benchmarks.serving.turns import ratio_of, take_turns

_DRAFTED = ("drafts", "draft_tokens", "accepted_tokens")
_SUMMED = ("hits", "misses", "loads", "host_loads", "cpu_experts", "prefetches", "prefetch_hits", "stall_seconds")
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/paired.py .cache/toy/mid stock spac --slots 100%

python benchmarks/serving/paired.py MODEL spac "spac speculation=eagle3" --slots 5%,10%,25%,50%,100%

python benchmarks/serving/paired.py MODEL "spac guard=off speculation=eagle3 draft_tokens=4" \
    "spac guard=off speculation=eagle3 tree=16" --slots 100% --dtype float32

python benchmarks/serving/paired.py MODEL "spac policy=lru" "spac policy=utility prefetch=utility" --slots 25%
"""
app = Script(__doc__, _EPILOG)


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    base: Annotated[str, typer.Argument(help="Side that OTHER is compared with.")],
    other: Annotated[str, typer.Argument(help="Side to compare with BASE.")],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, one pair of engines each.")] = "25%",
    turns: Annotated[int, typer.Option(min=2, help="Turns that count, each with a prompt of its own.")] = 20,
    starts: Annotated[int, typer.Option(min=1, help="Number of starts of both, each for its share of the turns.")] = 3,
    warm: Annotated[int, typer.Option(min=0, help="Turns after a start that do not count.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per turn.")] = 128,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of sides that do not name their own.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 next to the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: draft next to the model.")] = None,
    disk_dir: PackedFolder = PACKED,
    eager: Annotated[bool, typer.Option("--eager/--compile", help="enforce_eager of both engines.")] = True,
    dtype: Annotated[str, typer.Option(help="Of both engines.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a turn.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "paired_toy.json",
) -> None:
    drafts = Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    settings = Settings(
        model, drafts, prompt_tokens, output_tokens, seed=seed, eager=eager, dtype=dtype, disk_dir=disk_dir,
        timeout=timeout, counters="benchmarks.serving.drafting:counters",
    )  # fmt: skip
    pairs = {size: (Case.parse(base, size), Case.parse(other, size)) for size in split(slots)}
    if turns < starts:
        raise PlanError(f"--turns {turns}: each of {starts} starts needs at least one")
    ids = prompts.load(model, warm + turns, prompt_tokens, seed)
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "base": base,
        "other": other,
        "draft_tokens": draft_tokens,
        "prompts": ids.describe(),
        "starts": starts,
        "warm_turns": warm,
        "output_tokens": output_tokens,
        "enforce_eager": eager,
        "dtype": dtype,
        "seed": seed,
        "rows": [],
        "provenance": provenance(),
    }
    with progress() as bar:
        task = bar.add_task("", total=len(pairs) * (turns + starts * warm))
        for size, pair in pairs.items():
            answered: list[list[list[dict]]] = []
            for start in range(starts):
                bar.update(task, description=f"{size}: start {start + 1}")
                asked, mine = ids.ids[:warm] + ids.ids[warm + start :: starts], []
                for answers in take_turns(pair, [[each] for each in asked], settings):
                    mine.append(answers)
                    bar.advance(task)
                answered.append(mine)
            result["rows"].append(_row(size, answered, warm, seed))
            write_result(output, result)
    ratios = "ratio", "interval", "ratio_of_totals", "ratio_of_starts", "step_ratio", "step_interval"
    sides = "base.tokens_per_second", "other.tokens_per_second", "base.hits", "other.hits", "tokens_equal"
    show(f"{other} over {base}, tokens per second", result["rows"], "slots", *ratios, *sides)
    wide().print(f"wrote {output}", soft_wrap=True)
    if not all(row["tokens_equal"] for row in result["rows"]):
        raise typer.Exit(1)


def _row(slots: str, answered: list[list[list[dict]]], warm: int, seed: int) -> dict:
    """Returns the row for the sides' answers: [starts][turns][sides]."""
    counted = [start[warm:] for start in answered]
    turns = [turn for start in counted for turn in start]
    sides = []
    for which in range(len(turns[0])):
        mine = [turn[which] for turn in turns]
        sides.append(
            {
                "tokens_per_second": list(map(_rate, mine)),
                "tokens_per_second_of_totals": _total_rate(mine),
                "tpot": statistics.median(answer["tpot"][0] for answer in mine),
                "ttft": statistics.median(answer["ttft"][0] for answer in mine),
                "step_seconds": _of_steps([_step_seconds(answer) for answer in mine]),
                "draft_seconds": _of_steps(list(map(_draft_seconds, mine))),
                **{name: sum(answer["counters"].get(name, 0) for answer in mine) for name in _SUMMED},
                "speculation": _drafted(mine),
                "guard": [start[-1][which]["choices"].get("guard") for start in answered],
            }
        )
    return {
        "slots": slots,
        "tokens_equal": all(
            answer["tokens"] == turn[0]["tokens"] for start in answered for turn in start for answer in turn
        ),
        **_compared(counted, seed),
        "base": sides[0],
        "other": sides[1],
    }


def _step_seconds(answer: dict) -> float | None:
    """Returns the seconds of a step after that of the prompt, which emits the first token; None where none count."""
    return _per_step(answer, answer["tpot"][0] * (len(answer["tokens"][0]) - 1))


def _draft_seconds(answer: dict) -> float | None:
    """Returns the seconds of a step that the drafter took; None where that is not counted, as of n-grams."""
    own = answer["counters"].get("own", {})
    return _per_step(answer, own["draft_seconds"]) if own.get("draft_tokens") else None


def _per_step(answer: dict, seconds: float) -> float | None:
    """Returns ``seconds`` of each step after that of the prompt; None where none count."""
    steps = sum(answer["counters"].get("steps", {}).values()) - 1
    return seconds / steps if steps > 0 else None


def _of_steps(values: Sequence[float | None]) -> float | None:
    """Returns the median, None if a side does not count its steps."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _drafted(answers: list[dict]) -> dict:
    """Returns the sums of what vLLM counts of drafts; empty without speculation."""
    counted = [answer["counters"].get("speculation") for answer in answers]
    return {name: sum(one[name] for one in counted if one) for name in _DRAFTED} if counted[0] else {}


def _compared(counted: list[list[list[dict]]], seed: int) -> dict:
    """Compares the second side with the first, from [starts][turns][sides]."""
    of_starts = [[_rate(turn[1]) / _rate(turn[0]) for turn in start] for start in counted]
    ratios = [ratio for start in of_starts for ratio in start]
    turns = [turn for start in counted for turn in start]
    steps = [(_step_seconds(turn[1]), _step_seconds(turn[0])) for turn in turns]
    of_steps = [other / mine for other, mine in steps if other is not None and mine is not None]
    return {
        "step_ratio": None,
        "step_interval": None,
        **(ratio_of(of_steps, seed, "step_ratio") if len(of_steps) == len(turns) else {}),
        **ratio_of(ratios, seed),
        "ratio_of_starts": list(map(statistics.median, of_starts)),
        "ratio_of_totals": _total_rate([turn[1] for turn in turns]) / _total_rate([turn[0] for turn in turns]),
        "ratios": ratios,
    }


def _total_rate(answers: list[dict]) -> float:
    """Returns all tokens over all seconds."""
    return sum(len(answer["tokens"][0]) for answer in answers) / sum(answer["seconds"] for answer in answers)


def _rate(answer: dict) -> float:
    """Returns the tokens per second of a turn."""
    return len(answer["tokens"][0]) / answer["seconds"]


if __name__ == "__main__":
    app()
