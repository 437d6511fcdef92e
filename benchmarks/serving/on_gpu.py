"""Compares the plugin with stock vLLM, and makes the figures of results/gpu.md; each engine has its own process.

[bold]tokens[/]: what the plugin answers to eight prompts, and how many tokens equal stock vLLM's until the first
difference of each answer. [bold]serving[/]: ms per token of each request at each batch size, ms for long prompts, what
requests wait for beside one, and the bytes that experts took over the link, beside stock vLLM with everything resident
and its own offloaders; on a GPU also where the time of a step goes: link, the GPU's memory, idle. [bold]agents[/], if
asked for: several agents with long shared prefixes, their tokens per second, and what each waits for.

[bold]shape:NAME@argument=value,…[/] in place of a folder is a published model's shape with random weights, whose
routers follow a stream: nothing is downloaded or written. Arguments: layers, experts, top_k, hidden, intermediate,
vocabulary; stream=even, low or high (as local as of vllm-spac plan), recorded, or FILE.trace.

The result is written after each measurement, and --resume goes on with one. An engine that fails, or is over its time,
is a row with its error and what it had measured by then; what does not fit into --minutes, or needs a file that is not
there, is left out by name. Without a GPU everything runs on the CPU, and the result says so: its times then say nothing
about a GPU.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.agents.recorded import Recording
from benchmarks.common import ROOT, TOY, PlanError, Script, is_toy, progress, provenance, show, wide, write_result
from benchmarks.serving.cases import (
    CASES,
    OF_SHAPES,
    PACKED,
    STOCK,
    Case,
    PackedFolder,
    sizes,
    slot_counts,
    split,
)
from benchmarks.serving.one_engine import ANSWER, SLACK, Asked, Clock, Run, run_one
from benchmarks.shapes import routing
from benchmarks.shapes.shape import PREFIX, Shape
from benchmarks.toy.stored import unpack

LARGE = f"{PREFIX}qwen3-30b-a3b"  # whose times a GPU shows, if no model is given
OUTPUT = ROOT / ".cache" / "serving" / "on_gpu.json"
PARTS = tuple(CASES)
ASKED = PARTS[:2]  # if none are
_AGENT_CONTEXT = 8192  # tokens that an agent has at most
_ON_CPU = "no GPU: everything ran on the CPU, and its times say nothing about a GPU"
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/on_gpu.py

python benchmarks/serving/on_gpu.py --part tokens --at-once 4 --minutes 6

python benchmarks/serving/on_gpu.py --part serving --only stock --only "stock uva" --only ptr --slots 20% --minutes 6

python benchmarks/serving/on_gpu.py shape:qwen3-30b-a3b --minutes 9 --resume --output mine.json

python benchmarks/serving/on_gpu.py shape:tiny@layers=4,stream=low --only ptr

python benchmarks/serving/on_gpu.py shape:qwen3-30b-a3b --part agents --batch 1,4,8,16 --minutes 9

python benchmarks/serving/on_gpu.py MODEL --eagle3 HEAD --output mine.json

python benchmarks/serving/on_gpu.py MODEL --side "spac policy=lru" --side "spac slots=10% speculation=ngram"

python benchmarks/serving/on_gpu.py --option attention_backend=TRITON_ATTN --plugin my_attention --list
"""
app = Script(__doc__, _EPILOG)


@dataclass(frozen=True)
class Defaults:
    """What is asked for if nothing is."""

    slots: str
    batch: str
    prompt_tokens: str


DEFAULTS, DEFAULTS_OF_SHAPES = (
    Defaults("25%,20%", "1,4,16", "900"),
    Defaults("25%", "1,4,16,64", "2048,8192,32768"),
)


def runs(part: Sequence[str], only: Sequence[str], shares: Sequence[str], sides: Sequence[str] = ()) -> list[Run]:
    """Returns the engines of these parts, in the order of the table; stock, which others are compared with, always.

    Args:
        sides: in place of the table's, as of ``Case.parse``.

    Raises:
        PlanError: a part, a name, a share or a side is not understood.
    """
    if unknown := set(part) - set(PARTS):
        raise PlanError(f"--part {', '.join(sorted(unknown))}: use {' or '.join(PARTS)}")
    given = [Case(STOCK, None), *(Case.parse(side, shares[0]) for side in sides)]
    of_parts = [(name, case) for name in PARTS if name in part for case in (given if sides else CASES[name])]
    if unknown := set(only) - {case.name for _, case in of_parts}:
        raise PlanError(f"--only {', '.join(sorted(unknown))}: --list names those that there are")
    if odd := [share for share in shares if not share.endswith("%")]:
        raise PlanError(f"--slots {odd[0]}: use a share, e.g. 25%")
    wanted = [each for each in of_parts if not only or each[1].name in {*only, STOCK}]
    return [Run(name, case, share) for name, case in wanted for share in (shares if case.each_share else shares[:1])]


def agreed(mine: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens until the first difference of each answer."""
    total = 0
    for said, its in zip(mine, other, strict=True):
        pairs = zip(said, its, strict=False)
        total += next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(said), len(its)))
    return total


def judge(rows: Sequence[dict], said: Mapping[tuple[str, str], list[list[int]]]) -> None:
    """Adds to each row how many tokens are stock's, once both have answered, and what that means."""
    for row in rows:
        mine, stock = (said.get((row["part"], name)) for name in (row["name"], STOCK))
        if row["name"] != STOCK and mine and stock and len(mine) == len(stock):
            row |= {"tokens": sum(map(len, mine)), "as_stock": agreed(mine, stock)}
            row["verdict"] = "same" if mine == stock else "differs" if row["exact"] else "lossy"


def side_by_side(
    todo: Sequence[Run], one: Callable[[Run], tuple[dict, list[list[int]]]], most: int
) -> Iterator[tuple[dict, list[list[int]]]]:
    """Yields what ``one`` returns for each, as they end; at most ``most`` run at once."""
    if most == 1:
        yield from map(one, todo)
        return
    waiting: SimpleQueue[Run] = SimpleQueue()
    done: SimpleQueue[tuple[dict, list[list[int]]]] = SimpleQueue()

    def work() -> None:
        while True:
            try:
                run = waiting.get_nowait()
            except Empty:
                return
            try:
                done.put(one(run))
            except Exception as error:  # else the thread would end, and its row never come
                failed = {"part": run.part, "name": run.name, "exact": run.case.exact, "error": repr(error)}
                done.put((failed, []))

    for run in todo:
        waiting.put(run)
    for _ in range(min(most, len(todo))):  # an engine whose process is gone reads the end of its input, and ends
        threading.Thread(target=work, daemon=True).start()
    for _ in todo:
        yield done.get()


def execute(
    todo: Sequence[Run], asked: Asked, clock: Clock, about: dict, output: Path, done: Sequence[dict] = ()
) -> list[dict]:
    """Runs all engines but those of the rows that are ``done``; writes the result so far after each measurement."""
    rows = [*done]
    said = {(row["part"], row["name"]): _parsed(row["answers"]) for row in done if "answers" in row}
    there = {(row["part"], row["name"]) for row in done}
    todo = [run for run in todo if (run.part, run.name) not in there]
    with progress() as bar:
        task = bar.add_task("", total=len(todo))
        for part in PARTS:
            mine = [run for run in todo if run.part == part]
            bar.update(task, description=part)
            workers = asked.at_once if part == "tokens" else 1

            def note(row: dict) -> None:
                _write(output, about, [*rows, row | {"error": "stopped here"}])

            for row, answers in side_by_side(mine, lambda run: run_one(run, asked, clock, note), workers):
                rows.append(row)
                if "error" not in row and "left_out" not in row:
                    said[part, row["name"]] = answers
                    if row["name"] == STOCK:  # so that a later call can compare with them
                        row["answers"] = [" ".join(map(str, ids)) for ids in answers]
                judge(rows, said)
                _write(output, about, rows)
                state = "left out" if "left_out" in row else "failed" if "error" in row else "done"
                bar.console.print(f"{part}: {row['name']}: {state}")
                bar.advance(task)
    return rows


def _parsed(answers: Sequence[str]) -> list[list[int]]:
    return [list(map(int, answer.split())) for answer in answers]


def finished(output: Path, about: dict) -> tuple[list[dict], list[dict]]:
    """Returns the rows of an earlier call that need not run again, and where they come from: their provenances.

    Raises:
        PlanError: it was another run.
    """
    if not output.is_file():
        return [], []
    found = json.loads(output.read_text())
    other = [name for name, value in about.items() if name != "provenance" and found.get(name) != value]
    if other:
        raise PlanError(f"--resume: {output} has another {', '.join(other)}; drop --resume, or name another --output")
    rows = [{"part": part, **row} for part in PARTS for row in found[part] if "error" not in row]
    return rows, [*found.get("resumed", []), found["provenance"]]


def _write(output: Path, about: dict, rows: Sequence[dict]) -> None:
    ran = [row for row in rows if "left_out" not in row]
    parts = {
        part: [{k: v for k, v in row.items() if k != "part"} for row in ran if row["part"] == part] for part in PARTS
    }
    gone = [{"part": row["part"], "name": row["name"], "why": row["left_out"]} for row in rows if "left_out" in row]
    write_result(output, about | parts | {"left_out": gone})


def parsed_options(given: Sequence[str]) -> dict[str, Any]:
    """``["seed=1"]`` -> ``{"seed": 1}``; a value that is no JSON is text.

    Raises:
        PlanError: one is no NAME=VALUE.
    """
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise PlanError(f"--option {text}: use NAME=VALUE, e.g. attention_backend=TRITON_ATTN")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def _text(run: Run) -> str:
    """Returns the plugin's knobs in words, or of stock vLLM how it offloads."""
    if run.case.knobs is None:
        return f"stock, {run.case.offload or 'all experts resident'}"
    return " ".join(f"{name}={value}" for name, value in run.case.knobs.items())


def print_rows(console: Console, rows: Sequence[dict], asked: Asked) -> None:
    """Prints both tables, and what failed or was left out."""
    compared = [row for row in rows if "tokens" in row]
    if compared:
        columns = ["part", "name", "mode", "execution", "graphs", "tokens", "as_stock", "verdict"]
        show(f"tokens, {asked.dtype} where only they are compared", compared, *columns)
    timed = [
        row
        | {f"ms_at_{each['batch']}": each["ms_per_token"] for each in row["decode"]}
        | {f"prompt_of_{each['tokens']}": each["ms"] for each in row.get("prompts", [])}
        for row in rows
        if "decode" in row
    ]
    if timed:
        columns = [f"ms_at_{size}" for size in asked.batches]
        columns += [f"prompt_of_{length}" for length in asked.prompt_tokens]
        columns += ["beside.longest_gap", "beside.kept", "profile.idle_ms"]
        show(
            "ms per token" if asked.gpu else f"ms per token ({_ON_CPU})",
            timed,
            "name",
            "slots",
            "graphs",
            *columns,
        )
    together = [
        {"name": row["name"], "slots": row.get("slots"), **each} for row in rows for each in row.get("agents", [])
    ]
    if together:
        columns = ["agents", "tokens_per_s", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "longest_gap"]
        show("several agents", together, "name", "slots", *columns, "bytes_per_token")
    for row in rows:
        for what, style in (("error", "red"), ("left_out", "yellow")):
            if what in row:
                line = [text for text in row[what].splitlines() if text.strip()][-1:]
                console.print(f"[{style}]{escape(row['part'])}: {escape(row['name'])}: {escape(' '.join(line))}[/]")


def _default(name: str) -> str:
    return f" Default: {getattr(DEFAULTS, name)}; of a shape {getattr(DEFAULTS_OF_SHAPES, name)}."


@app.main
def main(
    model: Annotated[
        str | None,
        typer.Argument(help=f"Folder, or {PREFIX}NAME@…. Default: the toy, and for times on a GPU {LARGE}."),
    ] = None,
    part: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(PARTS)}. Default: {' and '.join(ASKED)}; of a shape, {ASKED[1]}.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="These engines and stock's. Can be repeated.")] = None,
    side: Annotated[list[str] | None, typer.Option(help="An engine in place of the table's, as of paired.py.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the engines, run none.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="For everything: what does not fit is left out.")] = 60.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take.")] = 180.0,
    slots: Annotated[
        str | None,
        typer.Option(help=f"Shares of the experts in slots; all engines run at the first.{_default('slots')}"),
    ] = None,
    batch: Annotated[str | None, typer.Option(help=f"Requests at once, for times.{_default('batch')}")] = None,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Tokens per timed answer.")] = 64,
    prompt_tokens: Annotated[
        str | None, typer.Option(help=f"Tokens of long prompts.{_default('prompt_tokens')}")
    ] = None,
    dtype: Annotated[str, typer.Option(help="For tokens; in float32 exact rows must equal stock's.")] = "float32",
    eager: Annotated[bool | None, typer.Option("--eager/--compile", help="Default: --compile with a GPU.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Engines side by side, where only tokens are compared.")] = 1,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 next to the model.")] = None,
    disk_dir: PackedFolder = PACKED,
    plugin: Annotated[list[str] | None, typer.Option(help="Another plugin of vLLM for all engines.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: an argument of all engines.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and engines.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Keep what --output has, and run what it lacks.")] = False,
    output: Annotated[Path, typer.Option(help="JSON.", show_default=str(OUTPUT.relative_to(ROOT)))] = OUTPUT,
) -> None:
    begin = time.monotonic()
    console, gpu = wide(), torch.cuda.is_available()
    shape = Shape.parse(model) if model is not None and model.startswith(PREFIX) else None
    if shape is None and model is not None and not Path(model).exists():
        raise PlanError(f"{model} is neither a folder nor a shape; a shape is {PREFIX}NAME, e.g. {LARGE}")
    given = DEFAULTS_OF_SHAPES if shape or (model is None and gpu) else DEFAULTS
    chosen = split(part) if part else list(ASKED if shape is None else ASKED[1:])
    shares = slot_counts(slots or given.slots)
    todo = runs(chosen, only or (OF_SHAPES if shape and not side else []), shares, side or [])
    batches, options = sizes(batch or given.batch), parsed_options(option or [])
    lengths = sizes(prompt_tokens or given.prompt_tokens, "--prompt-tokens")
    if listed:
        rows = [
            {**vars(run.case), "part": run.part, "name": run.name, "knobs": _text(run), "share": run.share}
            for run in todo
        ]
        show("engines", rows, "part", "name", "share", "knobs", "speculation", "exact")
        return
    origin = provenance()
    if not gpu:
        console.print(f"[yellow]{_ON_CPU}[/]")
    shapes = {name: shape for name in PARTS} if shape else {}
    if model is None and gpu:
        shapes = {name: Shape.parse(LARGE) for name in PARTS[1:] if name in chosen}
    for each in shapes.values():
        if max(lengths) + decode_tokens + SLACK > each.context:
            raise PlanError(f"--prompt-tokens {max(lengths)}: {each.text} takes {each.context} tokens in all")
    models = (_toys() if model is None else dict.fromkeys(PARTS, Path(model))) | {
        name: each.write() for name, each in shapes.items()
    }
    heads = {name: eagle3 or folder.parent / "eagle3" for name, folder in models.items()}
    asked = Asked(
        models, heads, batches, decode_tokens, lengths, dtype, not gpu if eager is None else eager, gpu,
        at_once, seed, disk_dir, tuple(plugin or ()), options, shapes,
        agents=Recording.fitting(min(_AGENT_CONTEXT, _context(models["agents"]) - SLACK)),
    ).with_prompts()  # fmt: skip
    about: dict[str, Any] = {
        "label": "random weights" if shapes else "toy model" if is_toy(models["serving"]) else None,
        "device": torch.cuda.get_device_name(0) if gpu else "cpu",
        "times": None if gpu else _ON_CPU,
        "models": {name: folder.name for name, folder in models.items() if name in chosen},
        "shapes": {
            name: {"shape": each.text, "stream": each.stream, **routing.load(models[name]).describe()}
            for name, each in shapes.items()
            if name in chosen
        },
        "batches": list(batches),
        "dtype_of_tokens": dtype,
        "enforce_eager": asked.eager,
        "answer_tokens": ANSWER,
        "decode_tokens": decode_tokens,
        "prompt_tokens": list(lengths),
        "seed": seed,
        "options": options,
        "provenance": origin,
    }
    if PARTS[2] in chosen and asked.agents is not None:
        about["agents_of"] = asked.agents.describe(models["agents"])
    done, origins = finished(output, about) if resume else ([], [])
    about |= {"resumed": origins} if origins else {}
    rows = execute(todo, asked, Clock(begin + 60 * minutes, timeout), about, output, done)
    print_rows(console, rows, asked)
    console.print(f"wrote {output}", soft_wrap=True)
    wrong = [row for row in rows if row.get("verdict") == "differs"]
    decided = [row for row in wrong if row["part"] == "tokens" and dtype == "float32"]
    if len(wrong) > len(decided):
        console.print(f"{len(wrong) - len(decided)} exact engines differ in 16 bits, where a near-tie may")
    if any("error" in row for row in rows) or decided:
        raise typer.Exit(1)


def _context(model: Path) -> int:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return int((config.get("text_config") or config)["max_position_embeddings"])


def _toys() -> dict[str, Path]:
    """Returns the toy for each part."""
    unpack()
    return dict.fromkeys(PARTS, TOY / "models" / "target")


if __name__ == "__main__":
    app()
