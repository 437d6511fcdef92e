"""MoE-Spec's table 1 and figures 5b, 9 and 10: speed, acceptance length and quality by budget, on a scaled machine.

One engine with EAGLE-3 answers each prompt once per arm, in random order: without drafts, with all drafts in every
step, and under each budget. Speed is the ratio of tokens per second to those without drafts, of the same prompt;
acceptance length is 1 + accepted / drafts. Quality is the perplexity of the answers for stock vLLM. At temperature 0
also the share of an answer's tokens before the first that differs from the exact answer's. At temperature 1 every seed
is a run of all prompts, and deviations are over seeds.

Drafts are a chain, or with --tree a tree as in the paper (63 tokens; arXiv:2602.16052), and experts are loaded over a
link, where the paper's are in the GPU's memory. Budgets are lossy. Times are [bold]scaled[/], see benchmarks/README.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaled"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
import arms_report
import plan
import prompts
from arms import Arm, budget_arms, rows, score, serve
from common import RESULTS, exit_on_sigterm, write_result
from ladder import PACED, WATERFILL
from paired import Side
from processes import EngineError
from proportions import Proportions, names
from run import PACKED, PackedFolder, Settings
from scale import Cores, Scale, head, on

from vllm_spac.errors import SpacError

EXAMPLES = """[bold]Examples[/]

moe_spec_table.py .cache/toy/local-mid --slots 25%

moe_spec_table.py .cache/toy/local-mid --budgets 16,24,32 --coverage truncation,substitution --seeds 2 --prompts 4

moe_spec_table.py .cache/toy/local-mid --tree 63 --votes uniform,path --output benchmarks/results/scaled_trees_toy.json
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090",
    slots: Annotated[str, typer.Option(help="Value of --spac-slots.")] = "25%",
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU computes a share of the missed experts.")] = False,
    budgets: Annotated[str, typer.Option(help="Experts per layer.")] = "12,16,24,32",
    ranking: Annotated[str, typer.Option(help="That needs no calibration.")] = "router",
    coverage: Annotated[str, typer.Option(help="truncation, substitution or both.")] = "substitution",
    votes: Annotated[str, typer.Option(help="uniform, path or both.")] = "uniform",
    tree: Annotated[int, typer.Option(min=0, help="Nodes of a draft tree; 0: a chain.")] = 0,
    seeds: Annotated[int, typer.Option(min=2, help="Runs at temperature 1.")] = 5,
    count: Annotated[int, typer.Option("--prompts", min=2, help="Prompts of a run.")] = 6,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of a chain.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 48,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: MODEL-eagle3.")] = None,
    disk_dir: PackedFolder = PACKED,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON; the picture is written next to it.")] = RESULTS
    / "scaled_moe_spec_toy.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(120, Console().width))
    drafts = plan.Drafts(tree or draft_tokens, eagle3 or model.with_name(f"{model.name}-eagle3"), model)
    try:
        without, exact = Arm("no drafts", ("speculation",), {}), Arm("EAGLE-3", ("guard",), {})
        budgeted = [
            arm
            for vote in plan.split(votes)
            for arm in budget_arms(plan.split(budgets), plan.split(coverage), ("guard",), ranking=ranking, votes=vote)
        ]
        cores, real, arms = Cores.here(), Proportions.of(machine), [without, exact, *budgeted]
        settings = Settings(
            model, (1,), prompt_tokens, output_tokens, 0, True, None, disk_dir, drafts, timeout,
            environment=cores.environment(),
        )  # fmt: skip
        knobs = {"slots": slots, "policy": "reuse", **PACED, **(WATERFILL if cpu else {}), "guard": "on"}
        knobs |= {"tree": str(tree)} if tree else {}
        side = Side("EAGLE-3", knobs, "eagle3")
        side.job(settings)  # refuses a missing head before anything is measured
        asked = prompts.load(model, 1 + count, prompt_tokens, 0)
        result = head(machine, asked, settings) | {"slots": slots, "draft_tokens": drafts.tokens, "knobs": knobs}
        runs = [(0.0, 0), *((1.0, seed) for seed in range(seeds))]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress,
            tempfile.TemporaryDirectory(prefix="spac-scaled-") as folder,
        ):
            task = progress.add_task("all experts resident", total=2 * len(runs) * count * len(arms))

            def advance(what: str, steps: int) -> None:
                progress.update(task, advance=steps, description=what)

            scale = Scale.derive(real, settings, asked.ids, 1, cores)
            result["scale"] = scale.plain()
            batches = [[prompt] for prompt in asked.ids]
            turns = serve(side, arms, runs, batches, on(scale.machine, settings, Path(folder)), advance)
            result["rows"] = rows(arms, turns, score(turns, batches, settings, advance), exact=1)
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    write_result(output, result)
    title = f"{result['label']}, {slots} of the experts in slots, speed over that without drafts"
    arms_report.show(console, result["rows"], title, "temperature")
    arms_report.draw(result["rows"], title, "temperature", output.with_suffix(".png"))
    console.print(f"wrote {output} and {output.with_suffix('.png').name}", soft_wrap=True)


if __name__ == "__main__":
    app()
