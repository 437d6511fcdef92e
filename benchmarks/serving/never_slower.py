"""Never slower for speculating: pairs of engines, one with drafts and one without, at each size of fast memory.

The two of a pair run one after the other, in turns who is first. Before they are measured both say ``--warm-tokens``
for each prompt: what the guard's first looks cost is paid once in the life of an engine, and shown with 4. Reported
are the median of the pairs' ratios of tokens a second and their spread; a ratio counts only where both said the same
tokens.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, ROOT, exit_on_sigterm, is_toy, provenance, write_result
from run import Settings, run_engine

_EPILOG = """[bold]Examples[/]

python benchmarks/serving/never_slower.py .cache/toy/mid --eagle3 .cache/toy/mid-eagle3

python benchmarks/serving/never_slower.py MODEL --slots 25% --speculation ngram --guard on,off --pairs 5
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots.")] = "5%,10%,25%,50%,100%",
    speculation: Annotated[str, typer.Option(help=f"One of {', '.join(plan.SPECULATIONS[1:])}.")] = "eagle3",
    guard: Annotated[str, typer.Option(help="Values of --spac-guard.")] = "on",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens of a speculative step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 beside the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: draft beside the model.")] = None,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts, one after the other.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated for a prompt.")] = 128,
    warm_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for a prompt before.")] = 32,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of engines.")] = 3,
    disk_dir: Annotated[Path, typer.Option(help="Folder of the packed experts.")] = ROOT / ".cache" / "serving",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "never_slower_toy.json",
) -> None:
    exit_on_sigterm()
    drafts = plan.Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    drafts.settings(speculation)  # refuses a missing folder now
    settings = Settings(model, (1,), prompt_tokens, output_tokens, 0, True, "disk", disk_dir, drafts, 1800.0)
    ids = prompts.load(model, count, prompt_tokens, 0).ids
    cases = [(size, value) for size in plan.split(slots) for value in plan.split(guard)]
    result = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "speculation": speculation,
        "draft_tokens": draft_tokens,
        "prompts": [len(ids), prompt_tokens],
        "output_tokens": output_tokens,
        "warm_tokens": warm_tokens,
        "rows": [],
        "provenance": provenance(),
    }
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=2 * pairs * len(cases))
        for size, value in cases:
            found = []
            for pair in range(pairs):
                both = {}
                for name in ("none", speculation) if pair % 2 else (speculation, "none"):
                    progress.update(task, description=f"{size}, guard {value}: pair {pair + 1}, {name}")
                    both[name] = _engine(settings, size, name, value, ids, warm_tokens)
                    progress.advance(task)
                found.append((both["none"], both[speculation]))
            result["rows"].append(_row(size, value, found))
            write_result(output, result)
    _show(result["rows"], output)


def _engine(settings: Settings, size: str, speculation: str, guard: str, ids, warm_tokens: int) -> dict:
    """Tokens, tokens a second, and what the guard says of itself."""
    job = replace(settings, guard=guard).job(plan.Configuration(size, "reuse", speculation), ids)
    job["warm_tokens"] = warm_tokens
    result, error = run_engine(job, False, settings.timeout)
    if error:
        raise typer.BadParameter(f"{size} {speculation}: {error}")
    batch = result["batches"]["1"]
    tokens = batch["tokens"]
    return {
        "tokens": tokens,
        "rate": sum(map(len, tokens)) / batch["seconds"],
        "guard": result["choices"].get("guard"),
    }


def _row(size: str, guard: str, found: list[tuple[dict, dict]]) -> dict:
    ratios = [drafting["rate"] / plain["rate"] for plain, drafting in found]
    return {
        "slots": size,
        "guard": guard,
        "tokens_equal": all(plain["tokens"] == drafting["tokens"] for plain, drafting in found),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "without": [plain["rate"] for plain, _ in found],
        "with": [drafting["rate"] for _, drafting in found],
        "guard_facts": [drafting["guard"] for _, drafting in found],
    }


def _show(rows: list[dict], output: Path) -> None:
    table = Table(title="tokens a second with drafts over without", title_justify="left")
    for name in ("slots", "guard", "without", "with", "ratio", "from", "to", "tokens equal"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["slots"],
            row["guard"],
            f"{statistics.median(row['without']):.1f}",
            f"{statistics.median(row['with']):.1f}",
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f}",
            f"{max(row['ratios']):.2f}",
            "yes" if row["tokens_equal"] else "NO",
        )
    console = Console()
    console.print(table)
    console.print(f"wrote {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
