"""Drafts over no drafts on scaled machines, exact: each drafter with drafts chosen in each step, and always as many.

Three engines take turns with each prompt: one without drafts, one whose guard and chooser are on, and one that
verifies --draft-tokens (of a tree, all its nodes) in every step. Experts that are not in slots are loaded or computed
by the CPU, as [bold]waterfill[/] divides them; with --no-cpu all are loaded. A point is a machine and a share of the
slots. Times are [bold]scaled[/], see run.py beside this file: only ratios mean anything.
"""

from __future__ import annotations

import statistics
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.common import RESULTS, exit_on_sigterm, progress, show, write_result
from benchmarks.scaled.ladder import PACED, WATERFILL, total
from benchmarks.scaled.proportions import Proportions, names
from benchmarks.scaled.scale import Cores, Scale, head, on
from benchmarks.serving import plan, prompts
from benchmarks.serving.paired import Arm, Side, beside_first, take_turns
from benchmarks.serving.processes import EngineError
from benchmarks.serving.run import PACKED, PackedFolder, Settings
from vllm_spac.errors import SpacError

_EPILOG = """[bold]Example[/]

python benchmarks/scaled/speculation.py .cache/real/target --machines rtx4090-int4 --slots 25%,50%
"""
NONE, CHOSEN, ALWAYS = "none", "chosen", "always"
OWN, TREE = "own", "tree"
METHODS = {OWN: "draft", TREE: "eagle3"}  # of drafters that are not named by theirs
NODES = 16  # of a tree
DRAFTERS = f"Of ngram, eagle3, tree (of {NODES} nodes, by EAGLE-3), draft, own (the model itself)."
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


def sides(slots: str, drafter: str, cpu: bool = True) -> list[Side]:
    """Returns the engine without drafts, and the two with them; the model's own ones say what is to be read."""
    knobs = {"slots": slots, **PACED, **(WATERFILL if cpu else {})}
    drafting = knobs | {OWN: {"prefetch": "shadow"}, TREE: {"tree": str(NODES)}}.get(drafter, {})
    drafts = METHODS.get(drafter, drafter), NODES if drafter == TREE else None
    return [
        Side(NONE, knobs),
        Side(CHOSEN, {**drafting, "guard": "on"}, *drafts),
        Side(ALWAYS, {**drafting, "guard": "off"}, *drafts),
    ]


def row(which: int, turns: list[list[dict]], kinds: list[str], seed: int) -> dict:
    """Returns what engine ``which`` did, compared with the first one, for the ``turns`` [turns][engines]."""
    compared, by_kind = beside_first(turns, which, lambda answer: answer["tpot"][0], seed), defaultdict(list)
    for kind, each in zip(kinds, compared["ratios"], strict=True):
        by_kind[kind].append(each)
    counters = total([turn[which]["counters"] for turn in turns])
    return {
        "exact": True,
        **compared,
        "by_kind": {kind: statistics.median(each) for kind, each in sorted(by_kind.items())},
        "tpot": statistics.median(turn[which]["tpot"][0] for turn in turns),
        "counters": counters,
        "guard": turns[-1][which]["choices"].get("guard"),
    }


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machines: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090-int4,rtx4090",
    slots: Annotated[str, typer.Option(help="Values of --spac-slots.")] = "25%,50%",
    drafters: Annotated[str, typer.Option(help=DRAFTERS)] = "ngram,eagle3",
    cpu: Annotated[bool, typer.Option(help="The CPU computes a share of the missed experts.")] = True,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Most draft tokens of a step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 beside the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: dense beside the model.")] = None,
    turns: Annotated[int, typer.Option(min=2, help="Prompts that count.")] = 10,
    warm: Annotated[int, typer.Option(min=0, help="Prompts before them that do not.")] = 5,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 48,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    disk_dir: PackedFolder = PACKED,
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a turn.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="The result.")] = RESULTS / "speculation_real.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(140, Console().width))
    folders = eagle3 or model.with_name("eagle3"), draft or model.with_name("dense")
    drafts = plan.Drafts(draft_tokens, *folders)
    try:
        cores, reals = Cores.here(), [Proportions.of(machine) for machine in plan.split(machines)]
        by_drafter = {drafter: drafts for drafter in plan.split(drafters)}
        if OWN in by_drafter:
            by_drafter[OWN] = replace(drafts, draft=model)
        for drafter, known in by_drafter.items():
            known.settings(METHODS.get(drafter, drafter))
        settings = Settings(
            model, (1,), prompt_tokens, output_tokens, seed, True, None, disk_dir, drafts, timeout,
            dtype="float32", environment=cores.environment(),
        )  # fmt: skip
        asked = prompts.load(model, warm + turns, prompt_tokens, seed)
        result = head(", ".join(real.name for real in reals), asked, settings)
        result |= {"warm_turns": warm, "draft_tokens": draft_tokens, "cpu_experts": cpu, "scales": {}}
        kinds = prompts.kinds(model, warm + turns)[warm:]
        with (
            progress() as bar,
            tempfile.TemporaryDirectory(prefix="spac-scaled-") as folder,
        ):
            points = [(size, drafter) for size in plan.split(slots) for drafter in plan.split(drafters)]
            task = bar.add_task("", total=len(reals) * len(points) * (warm + turns))
            for real in reals:
                bar.update(task, description=f"{real.name}: all experts resident")
                scale = Scale.derive(real, settings, asked.ids[:3], 1, cores)
                result["scales"][real.name] = scale.plain()
                paced = on(scale.machine, settings, Path(folder))
                for size, drafter in points:
                    arms, point = sides(size, drafter, cpu), f"{real.name}, {size}, {drafter}"
                    answered = []
                    serving = replace(paced, drafts=by_drafter[drafter])
                    for answers in take_turns([Arm(side) for side in arms], [[each] for each in asked.ids], serving):
                        answered.append(answers)
                        bar.update(task, advance=1, description=point)
                    for which, side in enumerate(arms):
                        found = row(which, answered[warm:], kinds, seed)
                        result["rows"].append({"point": point, "drafts": side.text, **found})
                    write_result(output, result)
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    kinds = [f"by_kind.{kind}" for kind in result["rows"][0]["by_kind"]]
    columns = "point", "drafts", "ratio", "low", "high", *kinds, "tokens_equal"
    show(f"{result['label']}: times the tokens/s of no drafts", result["rows"], *columns)
    console.print(f"wrote {output}", highlight=False)
    if not all(each["tokens_equal"] for each in result["rows"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
