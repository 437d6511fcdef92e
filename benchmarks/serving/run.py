"""Compares the plugin with stock vLLM: the same model, prompts and seeds, in one run.

Every engine has its own process. A speed is reported only where the tokens are stock's.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.common import (
    RESULTS,
    ROOT,
    TOY,
    PlanError,
    Script,
    is_toy,
    progress,
    provenance,
    show,
    wide,
    write_result,
)  # fmt: skip
from benchmarks.serving import prompts, summary
from benchmarks.serving.cases import (
    OFFLOADS,
    PACKED,
    SPECULATIONS,
    Case,
    Drafts,
    PackedFolder,
    Settings,
    beside_stock,
    rotated,
    sizes,
    slot_counts,
    split,
)  # fmt: skip
from benchmarks.serving.processes import run_engine

TOY_MODEL = TOY / "models" / "target"
_MODEL = str(TOY_MODEL.relative_to(ROOT))
_SHAPES = (
    "The guard's steps have other numbers of rows than stock's. Where rounding depends on that (results/batches.md), a "
    "near-tie may resolve differently without a fault: with --guard off or --dtype float32 tokens must be equal."
)
_ENVIRONMENT = ("VLLM_", "OMP_", "KMP_")  # what decides which cores compute
_EPILOG = f"""[bold]Tokens[/]

{_SHAPES}

[bold]Examples[/]

python benchmarks/serving/run.py

python benchmarks/serving/run.py --quick

python benchmarks/serving/run.py MODEL --slots 10%,25% --policy reuse --speculation none,ngram,eagle3

python benchmarks/serving/run.py MODEL --slots 25% --policy reuse,reuse+pointers --offload uva,prefetch --compile
"""

ModelFolder = Annotated[Path, typer.Argument(help="Folder.", exists=True, file_okay=False, show_default=_MODEL)]
Quick = Annotated[bool, typer.Option("--quick", help="One repeat of a few short prompts at 25%: does it work?")]

app = Script("Compare the plugin with stock vLLM: tokens first, then speed and hit rate.", _EPILOG)


def execute(
    settings: Settings, cases: list[Case], asked: prompts.Prompts, about: dict, repeats: int, output: Path
) -> list[summary.Row]:
    """Runs everything; writes the result so far after each engine."""
    origin = provenance()  # before the first engine: a run without provenance should not start
    runs: list[summary.Run] = []
    rows: list[summary.Row] = []
    with progress() as bar:
        task = bar.add_task("", total=repeats * len(cases))
        for repeat in range(repeats):
            for case in rotated(cases, repeat, repeats):
                bar.update(task, description=f"repeat {repeat + 1}: {case.label}")
                result, error = run_engine(case.job(settings, asked.ids), case.is_stock, settings.timeout)
                runs.append(summary.Run(case, repeat, result, error))
                bar.console.print(f"repeat {repeat + 1}: {case.label}: {'failed' if error else 'done'}")
                rows = summary.rows(cases, runs, list(settings.batches))
                _write(output, settings, asked, rows, runs, about | {"provenance": origin})
                bar.advance(task)
    return rows


def _write(output, settings, asked, rows, runs, about) -> None:
    payload = {
        "label": "toy model" if is_toy(settings.model) else None,
        "model": settings.model.name,
        "prompts": asked.describe(),
        "output_tokens": settings.output_tokens,
        "batches": settings.batches,
        "seed": settings.seed,
        "enforce_eager": settings.eager,
        "draft_tokens": settings.drafts.tokens,
        "dtype": settings.dtype,
        "environment": {name: text for name, text in os.environ.items() if name.startswith(_ENVIRONMENT)},
        "rows": [row.plain() for row in rows],
        "runs": [summary.reported(run, rows) for run in runs],
    }
    write_result(output, payload | about)


@app.main
def main(
    model: ModelFolder = TOY_MODEL,
    slots: Annotated[str, typer.Option(help="Values of --spac-slots in addition to 100%.")] = "10%,25%,50%",
    policy: Annotated[str, typer.Option(help="Eviction policies; with +pointers: decisions=device.")] = "reuse,lru",
    speculation: Annotated[str, typer.Option(help=f"Of {', '.join(SPECULATIONS)}.")] = "none",
    offload: Annotated[
        str, typer.Option(help=f"On a GPU: stock vLLM's own offloading at equal memory, {' and '.join(OFFLOADS)}.")
    ] = "",
    batch: Annotated[str, typer.Option(help="Requests at once.")] = "1,8",
    repeats: Annotated[int, typer.Option(min=1, help="Engines per configuration.")] = 3,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts; each batch size runs all of them.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens per speculative step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 next to the model.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model. Default: draft next to the model.")] = None,
    guard: Annotated[str, typer.Option(help="--spac-guard; off: as many drafts in every run.")] = "on",
    dtype: Annotated[str, typer.Option(help="Of all engines; see the note on tokens below.")] = "auto",
    store: Annotated[str | None, typer.Option(help="Where the other experts are stored: host or disk.")] = None,
    disk_dir: PackedFolder = PACKED,
    eager: Annotated[bool, typer.Option("--eager/--compile", help="enforce_eager of all engines.")] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and engines.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that one engine may take.")] = 1800.0,
    output: Annotated[Path | None, typer.Option(help="Result. Default: benchmarks/results/serving_MODEL.json.")] = None,
    quick: Quick = False,
) -> None:
    if quick:
        slots, policy, repeats, count, prompt_tokens, output_tokens = "25%", "lru", 1, 2, 32, 8
    drafts = Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    if offload and not torch.cuda.is_available():
        raise PlanError("--offload: stock vLLM offloads from a GPU, and there is none here")
    knobs = {"store": store} if store else {}
    cases = beside_stock(slot_counts(slots), split(policy), split(speculation), split(offload), knobs, guard)
    settings = Settings(
        model, drafts, prompt_tokens, output_tokens, sizes(batch), seed, eager, dtype, disk_dir, timeout
    )
    for case in cases:
        case.job(settings)  # refuses a missing drafter before anything is measured
    output = output or RESULTS / f"serving_{model.resolve().name}.json"
    about = {"guard": guard, "store": store}
    rows = execute(settings, cases, prompts.load(model, count, prompt_tokens, seed), about, repeats, output)
    print_rows(wide(), rows, settings, guard, output)
    if any(not row.is_measured for row in rows):
        raise typer.Exit(1)


def print_rows(console: Console, rows: list[summary.Row], settings: Settings, guard: str, output: Path) -> None:
    """Prints the rows, and why some of them have no speeds."""
    title = f"{'toy model ' if is_toy(settings.model) else ''}{settings.model.resolve().name}"
    speeds = "tokens_per_second.median", "tokens_per_second.low", "tokens_per_second.high", "ratio_to_stock"
    counts = [f"counters.{name}" for name in ("misses", "prefetches", "bytes", "stall_seconds")]
    columns = "verdict", "equal_requests", "requests", *speeds, "ttft.median", "tpot.median", "hit_rate", *counts
    shown = [row.plain() | {"label": row.case.label} for row in rows]
    show(title, shown, "batch", "label", *columns)
    for row in rows:
        if not row.is_measured:
            console.print(f"[red]{escape(row.case.label)}, batch {row.batch}: {escape(row.why)}[/]")
    guarded = [row for row in rows if row.verdict == "differs" and row.case.speculation != "none"]
    if guarded and guard == "on" and settings.dtype != "float32":
        console.print(_SHAPES)
    console.print(escape(f"wrote {output}"), soft_wrap=True)


if __name__ == "__main__":
    app()
