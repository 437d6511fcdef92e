"""Drafts over no drafts on scaled machines, exact: each drafter with drafts chosen in each step, and always as many.

Three engines take turns with each prompt: one without drafts, one whose guard and chooser are on, and one that
verifies --draft-tokens (of a tree, all its nodes) in every step. Experts that are not in slots are loaded or computed
by the CPU, as [bold]waterfill[/] divides them; with --no-cpu all are loaded. A point is a machine and a share of the
slots. Times are [bold]scaled[/], see run.py beside this file: only ratios mean anything.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.common import RESULTS, Script, progress, show, wide, write_result
from benchmarks.scaled.ladder import PACED, WATERFILL, total
from benchmarks.scaled.proportions import Proportions, names
from benchmarks.scaled.scale import Cores, Scale, head, on
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, Case, Drafts, PackedFolder, Settings, slot_counts, split
from benchmarks.serving.turns import Arm, beside_first, take_turns

_EPILOG = """[bold]Example[/]

python benchmarks/scaled/speculation.py .cache/real/target --machines rtx4090-int4 --slots 25%,50%
"""
NONE, CHOSEN, ALWAYS = "none", "chosen", "always"
OWN, TREE = "own", "tree"
METHODS = {OWN: "draft", TREE: "eagle3"}  # of drafters that are not named by theirs
NODES = 16  # of a tree
DRAFTERS = f"Of ngram, eagle3, tree (of {NODES} nodes, by EAGLE-3), draft, own (the model itself)."
app = Script(__doc__, _EPILOG)


def cases(slots: str, drafter: str, cpu: bool = True) -> list[Case]:
    """Returns the engine without drafts, and the two with them; the model's own ones say what is to be read."""
    knobs = {"slots": slots, **PACED, **(WATERFILL if cpu else {})}
    drafting = knobs | {OWN: {"prefetch": "shadow"}, TREE: {"tree": str(NODES)}}.get(drafter, {})
    drafts = METHODS.get(drafter, drafter), NODES if drafter == TREE else None
    return [
        Case(NONE, knobs),
        Case(CHOSEN, {**drafting, "guard": "on"}, *drafts),
        Case(ALWAYS, {**drafting, "guard": "off"}, *drafts),
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


@app.main
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
    folders = eagle3 or model.with_name("eagle3"), draft or model.with_name("dense")
    drafts = Drafts(draft_tokens, *folders)
    cores, reals = Cores.here(), [Proportions.of(machine) for machine in split(machines)]
    by_drafter = {drafter: drafts for drafter in split(drafters)}
    if OWN in by_drafter:
        by_drafter[OWN] = replace(drafts, draft=model)
    for drafter, known in by_drafter.items():
        known.settings(METHODS.get(drafter, drafter))
    settings = Settings(
        model, drafts, prompt_tokens, output_tokens, seed=seed, dtype="float32", disk_dir=disk_dir, timeout=timeout,
        environment=cores.environment(),
    )  # fmt: skip
    asked = prompts.load(model, warm + turns, prompt_tokens, seed)
    result = head(", ".join(real.name for real in reals), asked, settings)
    result |= {"warm_turns": warm, "draft_tokens": draft_tokens, "cpu_experts": cpu, "scales": {}}
    kinds = prompts.kinds(model, warm + turns)[warm:]
    points = [(size, drafter) for size in slot_counts(slots) for drafter in by_drafter]
    with progress() as bar:
        task = bar.add_task("", total=len(reals) * len(points) * (warm + turns))
        for real in reals:
            bar.update(task, description=f"{real.name}: all experts resident")
            scale = Scale.derive(real, settings, asked.ids[:3], 1, cores)
            result["scales"][real.name] = scale.plain()
            with on(scale.machine, settings) as paced:
                for size, drafter in points:
                    compared, point = cases(size, drafter, cpu), f"{real.name}, {size}, {drafter}"
                    answered = []
                    serving = replace(paced, drafts=by_drafter[drafter])
                    for answers in take_turns(list(map(Arm, compared)), [[each] for each in asked.ids], serving):
                        answered.append(answers)
                        bar.update(task, advance=1, description=point)
                    for which, case in enumerate(compared):
                        found = row(which, answered[warm:], kinds, seed)
                        result["rows"].append({"point": point, "drafts": case.name, **found})
                    write_result(output, result)
    kinds = [f"by_kind.{kind}" for kind in result["rows"][0]["by_kind"]]
    columns = "point", "drafts", "ratio", "low", "high", *kinds, "tokens_equal"
    show(f"{result['label']}: times the tokens/s of no drafts", result["rows"], *columns)
    wide().print(f"wrote {output}", highlight=False)
    if not all(each["tokens_equal"] for each in result["rows"]):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
