"""Measures servers under load: many streams at once, and what a long prompt does to them while it is read.

Each server first answers some prompts one after the other, whose text must be stock's. Then, for each number of
streams, all of them start together: once undisturbed, and once with a long prompt that arrives when they have a quarter
of their tokens. Reported are the tokens per second of all streams, how long the first token takes, the longest time
that any stream waits for its next token, and, between the arrival of the long prompt and its first token, the speed
that the streams keep. Servers read prompts in parts of --chunk tokens (vLLM's --max-num-batched-tokens).
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import AsyncOpenAI
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
import server
from common import RESULTS, exit_on_sigterm, is_toy, provenance, show, write_result
from run import PACKED, PackedFolder

from vllm_spac.tools.machine.server_stats import fetch

_EPILOG = """[bold]Examples[/]

python benchmarks/serving/under_load.py .cache/toy/local-mid

python benchmarks/serving/under_load.py .cache/toy/local-mid --slots 10%,50% --streams 1,32 --long-tokens 500
"""
_ALONE = 4  # prompts that are sent one after the other
_ARRIVES = 0.25  # of the streams' tokens
SERVED_NAME = "benchmark"
_COUNTERS = ("hits", "misses", "stall_seconds")
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Load:
    """What is asked of each server; ``long``: the prompt that arrives later."""

    short: list[list[int]]
    long: list[int]
    output_tokens: int
    seed: int
    timeout: float


@dataclass
class Stream:
    """One answer as it arrived; times in seconds."""

    start: float = 0.0
    moments: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.moments[0] - self.start

    @property
    def longest_gap(self) -> float:
        """The longest time between two tokens."""
        return max((later - earlier for earlier, later in itertools.pairwise(self.moments)), default=0.0)


async def follow(api: AsyncOpenAI, prompt: list[int], tokens: int, seed: int, stream: Stream) -> None:
    """Asks for exactly ``tokens`` tokens, and notes in ``stream`` when each arrived."""
    stream.start = time.perf_counter()
    answer = await api.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        seed=seed,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in answer:
        if chunk.choices:
            stream.moments.append(time.perf_counter())
            stream.text += chunk.choices[0].text


async def streams_of(url: str, load: Load, count: int, disturbed: bool) -> tuple[list[Stream], Stream]:
    """Returns ``count`` streams and that of the long prompt, which is empty unless they are ``disturbed``."""
    late = Stream()
    found = [Stream() for _ in range(count)]
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=load.timeout) as api:

        async def disturb() -> None:
            wanted = _ARRIVES * load.output_tokens
            while statistics.fmean(len(stream.moments) for stream in found) < wanted:
                await asyncio.sleep(0.001)
            await follow(api, load.long, 2, load.seed, late)

        jobs = [
            follow(api, prompt, load.output_tokens, load.seed, stream)
            for prompt, stream in zip(load.short[:count], found, strict=True)
        ]
        await asyncio.gather(*jobs, *([disturb()] if disturbed else []))
    return found, late


def rate(streams: list[Stream], begin: float, end: float) -> float:
    """Returns the tokens per second of all streams between two moments."""
    return sum(begin < moment <= end for stream in streams for moment in stream.moments) / (end - begin)


def row_of(quiet: list[Stream], disturbed: list[Stream], late: Stream, counters: dict[str, float]) -> dict[str, Any]:
    """Returns what is reported of a number of streams."""
    first, last = max(stream.moments[0] for stream in quiet), min(stream.moments[-1] for stream in quiet)
    steady = rate(quiet, first, last)
    asked = counters.get("hits", 0.0) + counters.get("misses", 0.0)
    return {
        "streams": len(quiet),
        "tokens_per_second": steady,
        "ttft": statistics.median(stream.ttft for stream in quiet),
        "ttft_worst": max(stream.ttft for stream in quiet),
        "longest_gap": max(stream.longest_gap for stream in quiet),
        "long_ttft": late.ttft,
        "kept": rate(disturbed, late.start, late.moments[0]) / steady,
        "longest_gap_disturbed": max(stream.longest_gap for stream in disturbed),
        "same_text": sum(one.text == other.text for one, other in zip(quiet, disturbed, strict=True)),
        "hit_rate": counters["hits"] / asked if asked else None,
    }


def measure(url: str, load: Load, sizes: tuple[int, ...], with_plugin: bool, advance: Any) -> dict[str, Any]:
    """Returns the answers to prompts that were sent alone, and a row for each number of streams."""
    alone = [
        asyncio.run(streams_of(url, replace(load, short=[prompt]), 1, False))[0][0] for prompt in load.short[:_ALONE]
    ]
    rows = []
    for size in sizes:
        asyncio.run(streams_of(url, load, size, True))  # warms up
        before = counters(url) if with_plugin else {}
        quiet, _ = asyncio.run(streams_of(url, load, size, False))
        after = counters(url) if with_plugin else {}
        disturbed, late = asyncio.run(streams_of(url, load, size, True))
        rows.append(row_of(quiet, disturbed, late, {name: after[name] - before[name] for name in after}))
        advance()
    return {"alone": [stream.text for stream in alone], "rows": rows}


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots.")] = "25%,50%",
    streams: Annotated[str, typer.Option(help="Requests at once.")] = "1,4,8,16,32",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each stream's prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens of each stream.")] = 96,
    long_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt.")] = 900,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that a step reads at most.")] = 256,
    disk_dir: PackedFolder = PACKED,
    seed: Annotated[int, typer.Option(help="Of prompts and requests.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or an answer may take.")] = 900.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "under_load_toy.json",
) -> None:
    exit_on_sigterm()
    console, origin = Console(width=max(140, Console().width)), provenance()
    try:
        sizes, names = plan.sizes(streams, "--streams"), ["stock", *plan.split(slots)]
        asked = prompts.load(model, max(sizes), prompt_tokens, seed)
        long = prompts.load(model, 1, long_tokens, seed + 1).ids[0]
        load = Load(asked.ids, long, output_tokens, seed, timeout)
        common = ["--served-model-name", SERVED_NAME, "--no-enable-prefix-caching", "--enforce-eager"]
        common += ["--max-num-seqs", str(max(sizes) + 1), "--max-num-batched-tokens", str(chunk)]
        common += ["--max-model-len", str(max(long_tokens + 8, prompt_tokens + output_tokens + 8))]
        ours = ["--plugin", "spac", "--spac-disk-dir", str(disk_dir), "--spac-tuned", "off", "--spac-slots"]
        found: dict[str, dict[str, Any]] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with (
            Progress(*columns, console=Console(stderr=True)) as progress,
            tempfile.TemporaryDirectory(prefix="spac-load-") as scratch,
        ):
            task = progress.add_task("", total=len(names) * len(sizes))
            for name in names:
                progress.update(task, description=name)
                arguments = common + ([] if name == "stock" else [*ours, name])
                with server.serve(model, arguments, Path(scratch, "log"), timeout) as url:
                    found[name] = measure(url, load, sizes, name != "stock", lambda: progress.advance(task))
    except (ValueError, server.ServerError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, server.ServerError) else 2) from error
    rows = [{"server": name, **row} for name in names for row in found[name]["rows"]]
    equal = {name: found[name]["alone"] == found["stock"]["alone"] for name in names}
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "prompts": asked.describe(),
    }
    result |= {"output_tokens": output_tokens, "long_tokens": long_tokens, "chunk": chunk, "alone_as_stock": equal}
    write_result(output, result | {"rows": rows, "provenance": origin})
    before = "tokens_per_second", "ttft", "ttft_worst", "longest_gap", "hit_rate"
    after = "long_ttft", "kept", "longest_gap_disturbed"
    show(f"{model.name}: a prompt of {long_tokens} tokens arrives", rows, "server", "streams", *before, *after)
    console.print(f"wrote {output}", soft_wrap=True)
    if not all(equal.values()):
        console.print("[red]alone, prompts have other answers than stock's[/]")
        raise typer.Exit(1)


def counters(url: str) -> dict[str, float]:
    """Returns the counters of a server with the plugin, summed over workers."""
    workers = fetch(url)["workers"]
    moved = sum(count for worker in workers for count in worker["bytes"].values())
    return {name: sum(worker[name] for worker in workers) for name in _COUNTERS} | {"bytes": moved}


if __name__ == "__main__":
    app()
