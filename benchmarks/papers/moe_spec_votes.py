"""Votes under a budget: what the rows of a draft tree should count when a layer's experts are ranked.

MoE-Spec's Eq. 5 lets every row vote alike. ``--spac-budget-votes path`` lets a row count P^alpha, where P is the
product of the drafter's probabilities along its path; alpha = 0 is Eq. 5. For each size of the tree one engine answers
each prompt once per arm, greedily in float32: exact, and under the budget with each alpha. Quality is the perplexity of
the answers for stock vLLM, the share of their tokens that are its first choice given the text so far (top-1 agreement),
the divergence of the distributions that they are from, and the share of an answer's tokens before the first that
differs from the exact answer's.

The power with the least divergence on the first half of the prompts is reported on the second. Budgets are lossy.
Nothing is timed, so other work on the machine does no harm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
from arms import SHOWN, Arm, Quality, Turn, rows, score, serve
from common import RESULTS, exit_on_sigterm, is_toy, provenance, show, write_result
from paired import Side
from processes import EngineError
from run import Settings

from vllm_spac.errors import SpacError
from vllm_spac.methods.moe_spec.settings import BudgetSettings

EXACT = "exact"
HALVES = {"chosen on": False, "reported": True}  # whether it is the second
EXAMPLES = """[bold]Examples[/]

moe_spec_votes.py benchmarks/toy/models/local/target --eagle3 benchmarks/toy/models/local/eagle3

moe_spec_votes.py MODEL --eagle3 HEAD --trees 63 --budget 32 --alphas 0,0.5 --prompts 4
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    eagle3: Annotated[Path, typer.Option(help="Its EAGLE-3 head.", exists=True, file_okay=False)],
    trees: Annotated[str, typer.Option(help="Nodes of trees.")] = "16,63",
    budget: Annotated[int, typer.Option(min=1, help="Experts per layer.")] = 24,
    alphas: Annotated[str, typer.Option(help="Powers.")] = "0,0.25,0.5,0.75,1",
    count: Annotated[int, typer.Option("--prompts", min=2, help="Prompts, half of them for the choice.")] = 24,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    slots: Annotated[str, typer.Option(help="Value of --spac-slots, for the loads per token.")] = "25%",
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_votes.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(110, Console().width))
    try:
        arms, sizes = arms_of(budget, plan.split(alphas)), plan.sizes(trees, "--trees")
        asked = prompts.load(model, 1 + count, prompt_tokens, 0)
        batches = [[prompt] for prompt in asked.ids]
        result: dict[str, Any] = {
            "label": "toy model" if is_toy(model) else None,
            "model": model.name,
            "budget": budget,
            "slots": slots,
            "prompts": asked.describe(),
            "output_tokens": output_tokens,
            "dtype": "float32",
            "rows": [],
            "provenance": provenance(),
        }
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("", total=2 * len(sizes) * count * len(arms))
            for nodes in sizes:
                settings = Settings(
                    model, (1,), prompt_tokens, output_tokens, 0, True, "host", Path(),
                    plan.Drafts(nodes, eagle3, model), timeout, dtype="float32",
                )  # fmt: skip

                def advance(what: str, steps: int, nodes: int = nodes) -> None:
                    progress.update(task, advance=steps, description=f"{nodes} nodes: {what}")

                side = Side("tree", {"slots": slots, "store": "host", "guard": "off", "tree": str(nodes)}, "eagle3")
                turns = serve([side], arms, [(0.0, 0)], batches, settings, advance, count, timed=False)
                quality = score(turns, batches, settings, advance)
                for half, second in HALVES.items():
                    found = rows(arms, *half_of(turns, quality, count, second))
                    result["rows"] += [{"nodes": nodes, "half": half, **without_times(row)} for row in found]
                write_result(output, result)
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    show("votes P^alpha under a budget", result["rows"], "nodes", "half", *SHOWN)
    console.print(f"wrote {output}", soft_wrap=True)


def arms_of(budget: int, alphas: list[str]) -> list[Arm]:
    """Returns the exact arm, and one for each power.

    Raises:
        ConfigError: a power is none.
    """
    found = [Arm(EXACT, (), {})]
    for alpha in alphas:
        settings = BudgetSettings.parse({"budget": budget, "votes": "path", "votes_alpha": alpha})
        found.append(Arm(alpha, (), settings.model_dump()))
    return found


def half_of(
    turns: Sequence[Turn], quality: Sequence[Quality], count: int, second: bool
) -> tuple[list[Turn], list[Quality]]:
    """Returns the turns of the first or the second half of the prompts 1 to ``count``, and their quality."""
    mine = [number for number, turn in enumerate(turns) if (2 * turn.batch > count) is second]
    return [turns[number] for number in mine], [quality[number] for number in mine]


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row of ``arms.rows`` without what is measured in seconds."""
    return {name: value for name, value in row.items() if not name.startswith(("speed", "tokens_per_second"))}


if __name__ == "__main__":
    app()
