"""MoE-Spec's figures 2b and 4a with real trees: distinct experts, and accepted tokens, by the nodes of a tree.

Real engines answer held-out text greedily, one request at a time, in float32, with every expert resident: without
drafts, with chains of an EAGLE-3 head, and with trees of it that vLLM verifies. Counted are emitted tokens per step
(acceptance length), distinct experts per layer and step (2b and 4a), and both together: experts per layer and emitted
token, which is what a step pays for where no expert is resident. All answers must be equal. Nothing is timed, so other
work on the machine does no harm; the paper's speed-ups (4b and 4c) are moe_spec_table.py's.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
import plan
import prompts
from common import RESULTS, exit_on_sigterm, provenance, show, write_result
from paired import Side
from processes import EngineError, LiveEngine
from run import Settings

from vllm_spac.errors import SpacError

EXAMPLES = """[bold]Examples[/]

moe_spec_trees.py benchmarks/toy/models/target --eagle3 benchmarks/toy/models/eagle3

moe_spec_trees.py MODEL --eagle3 HEAD --chains 4 --trees 16,63 --shapes static --prompts 4
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    eagle3: Annotated[Path, typer.Option(help="Its EAGLE-3 head.", exists=True, file_okay=False)],
    chains: Annotated[str, typer.Option(help="Draft tokens of chains.")] = "3,5,8",
    trees: Annotated[str, typer.Option(help="Nodes of trees.")] = "4,8,16,32,63,127",
    shapes: Annotated[str, typer.Option(help="dynamic, static or both.")] = "dynamic,static",
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 96,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_trees.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(110, Console().width))
    kinds: list[tuple[str, int, dict[str, Any]]] = [("none", 0, {})]
    try:
        kinds += [("chain", tokens, {}) for tokens in plan.sizes(chains, "--chains")]
        for shape in plan.split(shapes):
            kinds += [(shape, n, {"tree": n, "tree_shape": shape}) for n in plan.sizes(trees, "--trees")]
        asked = prompts.load(model, count, prompt_tokens, 0)
        result = {"model": model.name, "prompts": asked.describe(), "output_tokens": output_tokens, "dtype": "float32"}
        result["provenance"] = provenance()
        rows: list[dict[str, Any]] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=len(kinds) * count)
            for kind, drafts, knobs in kinds:
                progress.update(task, description=f"{kind} {drafts or ''}")
                drafted = plan.Drafts(max(drafts, 1), eagle3, model)
                settings = Settings(
                    model, (1,), prompt_tokens, output_tokens, 0, True, "host", Path(), drafted, timeout,
                    dtype="float32",
                )  # fmt: skip
                side = Side(kind, {"slots": "100%", "guard": "off"} | knobs, "eagle3" if drafts else "none")
                rows.append(counted(side, settings, asked.ids, lambda: progress.advance(task)))
                rows[-1] |= {"kind": kind, "drafts": drafts}
                rows[-1]["equal"] = sum(a == b for a, b in zip(rows[-1]["said"], rows[0]["said"], strict=True))
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    for row in rows:
        del row["said"]
    write_result(output, result | {"rows": rows})
    counts = "acceptance_length", "experts_per_step", "experts_per_token", "equal"
    show("acceptance length and distinct experts", rows, "kind", "drafts", *counts)
    console.print(f"wrote {output}", soft_wrap=True)
    if any(row["equal"] != count for row in rows):
        console.print("[bold red]answers differ from those without drafts[/]")
        raise typer.Exit(1)


def counted(side: Side, settings: Settings, asked: list[list[int]], advance: Any) -> dict[str, Any]:
    """Returns what one engine emits and uses per step, prompts left out, and what it said."""
    said, tokens, steps, experts = [], 0, 0, 0
    with closing(LiveEngine(side.job(settings), False, settings.timeout)) as engine:
        for prompt in asked:
            first = engine.turn(prompt, 1)["counters"]
            answer = engine.turn(prompt, settings.output_tokens)
            found, layers = answer["counters"], answer["choices"]["layers"]
            said.append(answer["tokens"][0])
            tokens += len(said[-1]) - 1
            steps += sum(found["steps"].values()) - sum(first["steps"].values())
            experts += (found["hits"] - first["hits"]) / layers
            advance()
    return {
        "said": said,
        "acceptance_length": tokens / steps,
        "experts_per_step": experts / steps,
        "experts_per_token": experts / tokens,
        "steps": steps,
    }


if __name__ == "__main__":
    app()
