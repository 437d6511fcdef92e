"""Budgets with all experts in memory, by batch size: what reading fewer experts gains when nothing is loaded.

One engine per batch size, without drafts, answers each batch once per arm, in random order: exact, and under each
budget with ``when=decode``, which shares one shortlist among all requests of a step. Speed is the ratio of tokens per
second to the exact ones of the same batch; quality is the perplexity of the answers for stock vLLM, and the share of an
answer's tokens before the first that differs from the exact answer's. Budgets are lossy. On this machine's CPU.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaled"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
import plan
import prompts
from arms import SHOWN, Arm, budget_arms, rows, score, serve
from common import RESULTS, exit_on_sigterm, is_toy, provenance, show, write_result
from paired import Side
from processes import EngineError
from run import PACKED, PackedFolder, Settings

from vllm_spac.errors import SpacError

EXAMPLES = """[bold]Examples[/]

resident_budgets.py .cache/toy/local-mid

resident_budgets.py .cache/toy/mid --batch 32 --budgets 16,32 --turns 4
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    batch: Annotated[str, typer.Option(help="Requests at once.")] = "8,16,32",
    budgets: Annotated[str, typer.Option(help="Experts per layer.")] = "16,24,32,48",
    ranking: Annotated[str, typer.Option(help="That needs no calibration.")] = "selected",
    coverage: Annotated[str, typer.Option(help="truncation, substitution or both.")] = "substitution",
    turns: Annotated[int, typer.Option(min=2, help="Batches of each size.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 32,
    disk_dir: PackedFolder = PACKED,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "resident_budgets_toy.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(120, Console().width))
    try:
        sizes, drafts = plan.sizes(batch), plan.Drafts(1, model, model)
        arms = [
            Arm("exact", (), {}),
            *budget_arms(plan.split(budgets), plan.split(coverage), ranking=ranking, when="decode"),
        ]
        settings = Settings(model, (1,), prompt_tokens, output_tokens, 0, True, None, disk_dir, drafts, timeout)
        result: dict[str, Any] = {
            "label": "toy model" if is_toy(model) else None,
            "model": model.name,
            "output_tokens": output_tokens,
            "prompts": {},
            "rows": [],
            "provenance": provenance(),
        }
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=2 * len(sizes) * turns * len(arms))
            for size in sizes:
                asked = prompts.load(model, size * (1 + turns), prompt_tokens, 0)
                result["prompts"][str(size)] = asked.describe()
                batches = [asked.ids[first : first + size] for first in range(0, len(asked.ids), size)]
                these = dataclasses.replace(settings, batches=(size,))

                def advance(what: str, steps: int, size: int = size) -> None:
                    progress.update(task, advance=steps, description=f"batch {size}: {what}")

                answered = serve([Side("spac", {"slots": "100%"})], arms, [(0.0, 0)], batches, these, advance)
                found = rows(arms, answered, score(answered, batches, these, advance))
                result["rows"] += [{"batch": size, **row} for row in found]
                write_result(output, result)
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    title = f"{result['label'] or result['model']}: all experts in memory, speed over that without a budget"
    show(title, result["rows"], "batch", *SHOWN)
    console.print(f"wrote {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
