"""Compares the plugin with stock vLLM: the same model, prompts and seeds, in one run.

Every engine has its own process. A speed is reported only where the tokens are stock's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.common import RESULTS, ROOT, TOY, exit_on_sigterm, is_toy, progress, provenance, show, write_result
from benchmarks.serving import plan, prompts, summary
from benchmarks.serving.processes import run_engine
from vllm_spac.storage.checkpoint.headers import read_checkpoint

TOY_MODEL = TOY / "models" / "target"
PACKED = ROOT / ".cache" / "serving"
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
PackedFolder = Annotated[Path, typer.Option(help="Folder of the packed experts.", show_default=".cache/serving")]
Quick = Annotated[bool, typer.Option("--quick", help="One repeat of a few short prompts at 25%: does it work?")]

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Settings:
    """The settings that all engines of a run share.

    Attributes:
        environment: of their processes, in addition to this one's.
        counters: function of further counters, see ``engine.counters``; none if empty.
    """

    model: Path
    batches: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    seed: int
    eager: bool
    store: str | None
    disk_dir: Path
    drafts: plan.Drafts
    timeout: float
    guard: str = "on"
    dtype: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    counters: str = ""

    def job(self, configuration: plan.Configuration, ids: list[list[int]]) -> dict:
        """Returns the job for ``engine.py``."""
        spac = None
        if not configuration.is_stock:
            spac = configuration.knobs()
            spac |= {"guard": self.guard} if configuration.speculation != "none" else {}
            spac |= {"store": self.store} if self.store else {}
            spac |= {"disk_dir": str(self.disk_dir)} if self.store != "host" else {}
        options = {
            "skip_tokenizer_init": True,
            "enforce_eager": self.eager,
            "max_model_len": self.prompt_tokens + self.output_tokens + 8,
            "max_num_seqs": max(self.batches),
            "enable_prefix_caching": False,  # else the second batch size finds the first one's prompts
            "disable_log_stats": False,
            "seed": self.seed,
            "dtype": self.dtype,
        }
        if configuration.offload:
            options |= configuration.stock_options(read_checkpoint(self.model))
        return {
            "model": str(self.model),
            "spac": spac,
            "speculative": self.drafts.settings(configuration.speculation),
            "prompts": ids,
            "batches": list(self.batches),
            "output_tokens": self.output_tokens,
            "seed": self.seed,
            "options": options,
            "environment": dict(self.environment),
            "counters": self.counters,
        }


def execute(
    settings: Settings, configurations: list[plan.Configuration], asked: prompts.Prompts, repeats: int, output: Path
) -> list[summary.Row]:
    """Runs everything; writes the result so far after each engine."""
    origin = provenance()  # before the first engine: a run without provenance should not start
    runs: list[summary.Run] = []
    rows: list[summary.Row] = []
    with progress() as bar:
        task = bar.add_task("", total=repeats * len(configurations))
        for repeat in range(repeats):
            for configuration in plan.rotated(configurations, repeat, repeats):
                bar.update(task, description=f"repeat {repeat + 1}: {configuration.label}")
                result, error = run_engine(
                    settings.job(configuration, asked.ids), configuration.is_stock, settings.timeout
                )
                runs.append(summary.Run(configuration, repeat, result, error))
                bar.console.print(f"repeat {repeat + 1}: {configuration.label}: {'failed' if error else 'done'}")
                rows = summary.rows(configurations, runs, list(settings.batches))
                _write(output, settings, asked, rows, runs, origin)
                bar.advance(task)
    return rows


def _write(output, settings, asked, rows, runs, origin) -> None:
    payload = {
        "label": "toy model" if is_toy(settings.model) else None,
        "model": settings.model.name,
        "prompts": asked.describe(),
        "output_tokens": settings.output_tokens,
        "batches": settings.batches,
        "seed": settings.seed,
        "enforce_eager": settings.eager,
        "draft_tokens": settings.drafts.tokens,
        "guard": settings.guard,
        "dtype": settings.dtype,
        "store": settings.store,
        "environment": {name: text for name, text in os.environ.items() if name.startswith(_ENVIRONMENT)},
        "rows": [row.plain() for row in rows],
        "runs": [summary.reported(run, rows) for run in runs],
        "provenance": origin,
    }
    write_result(output, payload)


@app.command(epilog=_EPILOG)
def main(
    model: ModelFolder = TOY_MODEL,
    slots: Annotated[str, typer.Option(help="Values of --spac-slots in addition to 100%.")] = "10%,25%,50%",
    policy: Annotated[str, typer.Option(help="Eviction policies; with +pointers: decisions=device.")] = "reuse,lru",
    speculation: Annotated[str, typer.Option(help=f"Of {', '.join(plan.SPECULATIONS)}.")] = "none",
    offload: Annotated[
        str, typer.Option(help=f"On a GPU: stock vLLM's own offloading at equal memory, {' and '.join(plan.OFFLOADS)}.")
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
    """Compare the plugin with stock vLLM: tokens first, then speed and hit rate."""
    exit_on_sigterm()
    if quick:
        slots, policy, repeats, count, prompt_tokens, output_tokens = "25%", "lru", 1, 2, 32, 8
    console = Console(width=max(140, Console().width))  # narrower, the tables cannot be read
    drafts = plan.Drafts(draft_tokens, eagle3 or model.parent / "eagle3", draft or model.parent / "draft")
    try:
        offloads = tuple(plan.split(offload))
        if offloads and not torch.cuda.is_available():
            raise plan.PlanError("--offload: stock vLLM offloads from a GPU, and there is none here")
        sizes, policies, drafting = (plan.split(text) for text in (slots, policy, speculation))
        configurations = plan.configurations(sizes, policies, drafting, offloads)
        for configuration in configurations:
            drafts.settings(configuration.speculation)
        batches = plan.sizes(batch)
    except ValueError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}")
        raise typer.Exit(2) from error
    settings = Settings(
        model, batches, prompt_tokens, output_tokens, seed, eager, store, disk_dir, drafts, timeout, guard, dtype
    )
    output = output or RESULTS / f"serving_{model.resolve().name}.json"
    rows = execute(settings, configurations, prompts.load(model, count, prompt_tokens, seed), repeats, output)
    print_rows(console, rows, settings, output)
    if any(not row.is_measured for row in rows):
        raise typer.Exit(1)


def print_rows(console: Console, rows: list[summary.Row], settings: Settings, output: Path) -> None:
    """Prints the rows, and why some of them have no speeds."""
    title = f"{'toy model ' if is_toy(settings.model) else ''}{settings.model.resolve().name}"
    speeds = "tokens_per_second.median", "tokens_per_second.low", "tokens_per_second.high", "ratio_to_stock"
    counts = [f"counters.{name}" for name in ("misses", "prefetches", "bytes", "stall_seconds")]
    columns = "verdict", "equal_requests", "requests", *speeds, "ttft.median", "tpot.median", "hit_rate", *counts
    shown = [row.plain() | {"label": row.configuration.label} for row in rows]
    show(title, shown, "batch", "label", *columns)
    for row in rows:
        if not row.is_measured:
            console.print(f"[red]{escape(row.configuration.label)}, batch {row.batch}: {escape(row.why)}[/]")
    guarded = [row for row in rows if row.verdict == "differs" and row.configuration.speculation != "none"]
    if guarded and settings.guard == "on" and settings.dtype != "float32":
        console.print(_SHAPES)
    console.print(escape(f"wrote {output}"), soft_wrap=True)


if __name__ == "__main__":
    app()
