"""Compares the plugin with stock vLLM under ``vllm serve``: many concurrent OpenAI requests, in one run.

Each server first answers some prompts one after the other; that text must be stock's before any speed is
reported. Then all prompts are sent with limited concurrency. Which of them share a forward then depends on
when they arrive, which changes near-ties in stock too: the share of equal texts is reported, not required.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import client
import plan
import prompts
import server
from common import RESULTS, ROOT, TOY, Spread, exit_on_sigterm, is_toy, provenance, write_result

TOY_MODEL = TOY / "models" / "target"
PACKED = ROOT / ".cache" / "serving"
_MODEL = str(TOY_MODEL.relative_to(ROOT))
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/online.py

python benchmarks/serving/online.py MODEL --slots 10%,25% --concurrency 32 --repeats 3

python benchmarks/serving/online.py --quick
"""

ModelFolder = Annotated[Path, typer.Argument(help="Folder.", exists=True, file_okay=False, show_default=_MODEL)]
PackedFolder = Annotated[Path, typer.Option(help="Folder of the packed experts.", show_default=".cache/serving")]

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Served:
    """Results of one server: its answers one by one, its answers at once, and the seconds of the latter."""

    name: str
    repeat: int
    alone: list[client.Answer]
    together: list[client.Answer]
    seconds: float
    counters: dict


def server_flags(load: client.Load, eager: bool, policy: str, disk_dir: Path) -> dict[str, list[str]]:
    """Returns the flags of all servers, and the additional ones of the plugin's servers."""
    length = len(load.prompts[0]) + load.output_tokens + 8
    common = ["--served-model-name", client.SERVED_NAME, "--max-model-len", str(length)]
    common += [
        "--max-num-seqs",
        str(load.concurrency),
        "--no-enable-prefix-caching",
        *(["--enforce-eager"] if eager else []),
    ]
    return {
        "all": common,
        "spac": ["--plugin", "spac", "--spac-policy", policy, "--spac-disk-dir", str(disk_dir), "--spac-tuned", "off"],
    }


def execute(
    model: Path, slots: list[str], load: client.Load, repeats: int, flags: dict[str, list[str]]
) -> list[Served]:
    """Runs every server once per repeat, in rotated order."""
    names, served = ["stock", *slots], []
    with (
        Progress(console=Console(stderr=True)) as progress,
        tempfile.TemporaryDirectory(prefix="spac-online-") as scratch,
    ):
        task = progress.add_task("", total=repeats * len(names))
        for repeat in range(repeats):
            for name in plan.rotated(names, repeat, repeats):
                progress.update(task, description=f"repeat {repeat + 1}: {name}")
                arguments = flags["all"] + ([] if name == "stock" else [*flags["spac"], "--spac-slots", name])
                with server.serve(model, arguments, Path(scratch, "log"), load.timeout) as url:
                    served.append(Served(name, repeat, *asyncio.run(client.question(url, load, name != "stock"))))
                progress.console.print(f"repeat {repeat + 1}: {name}: done")
                progress.advance(task)
    return served


def agreement(first: list[client.Answer], second: list[client.Answer]) -> str:
    """Returns how many answers to the same prompts have the same text."""
    pairs = list(zip(first, second, strict=False))
    return f"{sum(a.text == b.text for a, b in pairs)}/{len(pairs)}"


def summarise(served: list[Served], name: str) -> dict:
    """Returns one row; without speeds if the text of prompts that were sent alone differs from stock's."""
    mine, stock = ([run for run in served if run.name == wanted] for wanted in (name, "stock"))
    same = all(a.text == b.text for run in mine for a, b in zip(run.alone, stock[0].alone, strict=True))
    row = {
        "name": name if name == "stock" else f"spac {name}",
        "same_text_as_stock": same,
        "at_once_as_stock": [agreement(run.together, stock[0].together) for run in mine],
        "at_once_as_alone": [agreement(run.alone, run.together) for run in mine],
    }
    if not same:
        return row
    asked = [run.counters.get("hits", 0) + run.counters.get("misses", 0) for run in mine]
    return row | {
        "tokens_per_second": asdict(Spread.of([sum(a.tokens for a in run.together) / run.seconds for run in mine])),
        "ttft": asdict(Spread.of([answer.ttft for run in mine for answer in run.together])),
        "tpot": asdict(Spread.of([answer.tpot for run in mine for answer in run.together])),
        "hit_rate": [run.counters["hits"] / total for run, total in zip(mine, asked, strict=True) if total],
        "counters": [run.counters for run in mine],
    }


def table(rows: list[dict], title: str) -> Table:
    view = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("server", "text alone", "text at once", "tokens/s", "x stock", "TTFT ms", "TPOT ms", "hits"):
        view.add_column(name, justify="left" if name in ("server", "text alone") else "right")
    for row in rows:
        at_once = " ".join(row["at_once_as_stock"])
        if not row["same_text_as_stock"]:
            view.add_row(row["name"], "differs", at_once, style="red")
            continue
        rate, stock = row["tokens_per_second"], rows[0].get("tokens_per_second")
        ratio = f"{rate['median'] / stock['median']:.2f}" if stock else "-"
        speed = f"{rate['median']:.1f} [{rate['low']:.1f}-{rate['high']:.1f}]"
        latencies = [f"{1e3 * row[name]['median']:.1f}" for name in ("ttft", "tpot")]
        hits = " ".join(f"{100 * rate:.1f}%" for rate in row["hit_rate"])
        view.add_row(row["name"], "[green]same[/]", at_once, speed, ratio, *latencies, hits)
    return view


@app.command(epilog=_EPILOG)
def main(
    model: ModelFolder = TOY_MODEL,
    slots: Annotated[str, typer.Option(help="Values of --spac-slots.")] = "25%",
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "lru",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 16,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests in all. Default: twice as many.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Servers of each kind.")] = 1,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    disk_dir: PackedFolder = PACKED,
    eager: Annotated[bool, typer.Option("--eager/--compile", help="--enforce-eager of all servers.")] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and requests.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or one answer may take.")] = 900.0,
    output: Annotated[Path | None, typer.Option(help="Result. Default: benchmarks/results/online_MODEL.json.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few short requests: does it work?")] = False,
) -> None:
    """Compare the plugin with stock vLLM under concurrent requests: text first, then TTFT, TPOT and tokens/s."""
    exit_on_sigterm()
    if quick:
        concurrency, requests, repeats, prompt_tokens, output_tokens = 4, 4, 1, 32, 8
    console, origin = Console(width=max(120, Console().width)), provenance()
    if not (model / "tokenizer.json").is_file():
        console.print(f"[bold red]error:[/] {escape(str(model))} has no tokenizer.json, and a server answers with text")
        raise typer.Exit(2)
    asked = prompts.load(model, requests or 2 * concurrency, prompt_tokens, seed)
    load = client.Load(asked.ids, output_tokens, concurrency, seed, timeout)
    flags = server_flags(load, eager, policy, disk_dir)
    try:
        served = execute(model, plan.split(slots), load, repeats, flags)
    except server.ServerError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from error
    rows = [summarise(served, name) for name in ("stock", *plan.split(slots))]
    title = f"{'toy model ' if is_toy(model) else ''}{model.resolve().name}"
    path = output or RESULTS / f"online_{model.resolve().name}.json"
    facts: dict[str, Any] = {"label": "toy model" if is_toy(model) else None, "model": model.resolve().name}
    facts |= {"prompts": asked.describe(), "output_tokens": output_tokens, "concurrency": concurrency}
    write_result(path, facts | {"enforce_eager": eager, "rows": rows, "provenance": origin})
    console.print(table(rows, f"{title}, {concurrency} requests at once"))
    console.print(escape(f"wrote {path}"), soft_wrap=True)
    if not all(row["same_text_as_stock"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
