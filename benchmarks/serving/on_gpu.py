"""Compares the plugin with stock vLLM, and makes the figures of results/gpu.md; each engine has its own process.

[bold]tokens[/]: what the plugin answers to eight prompts, and how many tokens equal stock vLLM's until the first
difference of each answer. [bold]serving[/]: ms per token of each request at each batch size, ms for a long prompt, and
the bytes that experts took over the link, beside stock vLLM with everything resident and its own offloaders.

The result is written after each engine. One that fails, or is over its time, is a row with its error and what it had
measured by then; what does not fit into --minutes, or needs a file that is not there, is left out by name. Without a
GPU everything runs on the CPU, and the result says so: its times then say nothing about a GPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.common import ROOT, TOY, PlanError, Script, is_toy, progress, provenance, show, wide, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, STOCK, Case, Drafts, PackedFolder, Settings, sizes, slot_counts, split
from benchmarks.serving.gpu_cases import CASES, DRAFTS
from benchmarks.serving.processes import EngineError, LiveEngine
from benchmarks.toy.inflate import PRESETS, inflate, inflate_head
from benchmarks.toy.stored import unpack
from vllm_spac.errors import SpacError

LIKE = "qwen3-30b-a3b"
LARGE = ROOT / ".cache" / "toy" / LIKE
OUTPUT = ROOT / ".cache" / "serving" / "on_gpu.json"
PARTS = tuple(CASES)
LENGTHS = (1, 5, 23, 64, 90, 150, 31, 8)  # of the prompts whose answers are compared
ANSWER, SHORT, LONG_PROMPTS, REPEATS, WARM = 32, 40, 4, 2, 8
_SLACK = 32  # tokens beyond prompt and answer, for drafts
_START = 30.0  # seconds that an engine is expected to take before one has been seen
_COUNTED = ("hits", "misses", "loads", "prefetches", "prefetch_hits", "cpu_experts", "bytes", "steps", "speculation")
_ON_CPU = "no GPU: everything ran on the CPU, and its times say nothing about a GPU"
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/on_gpu.py

python benchmarks/serving/on_gpu.py --part tokens --at-once 4 --minutes 6

python benchmarks/serving/on_gpu.py --part serving --only stock --only "stock uva" --only ptr --slots 20% --minutes 6

python benchmarks/serving/on_gpu.py MODEL --eagle3 HEAD --output mine.json

python benchmarks/serving/on_gpu.py MODEL --side "spac policy=lru" --side "spac slots=10% speculation=ngram"

python benchmarks/serving/on_gpu.py --option attention_backend=TRITON_ATTN --plugin my_attention --list
"""
app = Script(__doc__, _EPILOG)


class LeftOut(Exception):
    """An engine is not run; the message says why."""


@dataclass(frozen=True)
class Run:
    """One engine to run: ``share`` of the experts in slots."""

    part: str
    case: Case
    share: str

    @property
    def name(self) -> str:
        return self.case.at(self.share).name


@dataclass
class Clock:
    """The time that is left.

    Attributes:
        end: when everything must have ended; ``most``: seconds that one engine may take.
        fastest: seconds that the fastest engine took; None before the first: one that would have less is not started.
    """

    end: float
    most: float
    fastest: float | None = None

    def limit(self) -> float:
        """Returns when the next engine must have ended.

        Raises:
            LeftOut: there is too little time for it.
        """
        now, needed = time.monotonic(), self.fastest or min(_START, self.most)
        if self.end - now < needed:
            raise LeftOut(
                f"--minutes: {max(0.0, self.end - now):.0f} s are left, an engine takes {needed:.0f} s or more"
            )
        return min(self.end, now + self.most)


@dataclass(frozen=True)
class Asked:
    """What all engines share.

    Attributes:
        models: folder of the model by part; ``heads``: of its EAGLE-3 head.
        compare: prompts whose answers are compared; ``short`` and ``long``: those that are timed.
        options: of every engine, beyond what the parts need.
    """

    models: Mapping[str, Path]
    heads: Mapping[str, Path]
    batches: tuple[int, ...]
    decode_tokens: int
    prompt_tokens: int
    dtype: str
    eager: bool
    gpu: bool
    at_once: int
    seed: int
    disk_dir: Path
    plugins: tuple[str, ...]
    options: Mapping[str, Any]
    compare: list[list[int]] = field(default_factory=list)
    short: list[list[int]] = field(default_factory=list)
    long: list[list[int]] = field(default_factory=list)

    def with_prompts(self) -> Asked:
        """Returns the same with prompts."""
        model, seed = self.models, self.seed
        whole = prompts.load(model["tokens"], len(LENGTHS), max(LENGTHS), seed).ids
        return dataclasses.replace(
            self,
            compare=[ids[:length] for ids, length in zip(whole, LENGTHS, strict=True)],
            short=prompts.load(model["serving"], max(self.batches), SHORT, seed).ids,
            long=prompts.load(model["serving"], LONG_PROMPTS, self.prompt_tokens, seed + 1).ids,
        )

    def job(self, run: Run) -> dict:
        """Returns the job for ``engine.py``.

        Raises:
            LeftOut: it needs a GPU, or a file that was not given.
            PlanError: its drafts come from a model that is not there.
        """
        case, compared = run.case.at(run.share), run.part == "tokens"
        if case.offload and not self.gpu:
            raise LeftOut("stock vLLM offloads from a GPU, and there is none here")
        batches = (len(LENGTHS),) if compared else self.batches
        longest, output = (max(LENGTHS), ANSWER) if compared else (max(SHORT, self.prompt_tokens), self.decode_tokens)
        model = self.models[run.part]
        drafts = Drafts(DRAFTS, self.heads[run.part], model.parent / "draft")
        loaded = {"VLLM_PLUGINS": ",".join([*(["spac"] if case.knobs is not None else []), *self.plugins])}
        settings = Settings(
            model, drafts, longest, output, batches, self.seed, self.eager, self.dtype if compared else "auto",
            self.disk_dir, environment=loaded,
        )  # fmt: skip
        job = case.job(settings)
        job["options"] |= {"max_model_len": longest + output + _SLACK}
        job["options"] |= {"max_num_batched_tokens": max(1024, longest + output + _SLACK)}
        if self.gpu:
            job["options"] |= self._on_gpu(batches, job["speculative"], compared)
        job["options"] |= self.options
        job["spac"] = None if case.knobs is None else self.knobs(run)
        return job

    def _on_gpu(self, batches: Sequence[int], speculative: dict | None, compared: bool) -> dict:
        """Returns the share of the GPU, and only those graphs that are replayed: each takes a while to capture."""
        found: dict[str, Any] = {"gpu_memory_utilization": 0.8 / self.at_once if compared else 0.8}
        found["kv_cache_memory_bytes"] = (1 if compared else 2) << 30
        if not self.eager:
            drafts = speculative["num_speculative_tokens"] if speculative else 0
            powers = [1 << n for n in range(max(batches).bit_length())]
            sizes = sorted({*powers, *batches, *(batch * (drafts + 1) for batch in batches)})
            found["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        return found

    def knobs(self, run: Run) -> dict[str, str]:
        """Returns the plugin's knobs."""
        assert run.case.knobs is not None, "stock has no knobs"
        found = {"slots": run.share, **run.case.knobs}
        if not self.gpu and "executor" not in found:
            found.setdefault("store", "host")  # a GPU's default
        if found.get("store") == "disk" or "executor" in found:  # workers have disks
            found["disk_dir"] = str(self.disk_dir)
        return found


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


def run_one(run: Run, asked: Asked, clock: Clock) -> tuple[dict, list[list[int]]]:
    """Returns the row of one engine and, of one whose tokens are compared, its answers."""
    case = run.case
    row: dict[str, Any] = {"part": run.part, "name": run.name, "speculation": case.speculation, "exact": case.exact}
    row |= {"slots": run.share} if case.has_share else {}
    said: list[list[int]] = []
    begin = time.monotonic()
    try:
        until, job = clock.limit(), asked.job(run)
        row["knobs"] = job["spac"]
        with closing(LiveEngine(job, case.knobs is None, until - time.monotonic())) as engine:
            row |= {"start_seconds": time.monotonic() - begin, **engine.ready}
            if run.part == "tokens":
                said = _compared(engine, asked, row, until)
            else:
                _timed(engine, asked, row, until)
    except (LeftOut, PlanError) as error:
        return row | {"left_out": str(error)}, said
    except (EngineError, SpacError, OSError, ValueError) as error:
        row["error"] = str(error)[-4000:]
    row["seconds"] = time.monotonic() - begin
    if "error" not in row:
        clock.fastest = min(clock.fastest or row["seconds"], row["seconds"])
    return row, said


def _ask(engine: LiveEngine, until: float, ids: list[list[int]], tokens: int) -> dict:
    engine.timeout = max(1.0, until - time.monotonic())
    return engine.batch(ids, tokens)


def _compared(engine: LiveEngine, asked: Asked, row: dict, until: float) -> list[list[int]]:
    """Adds to ``row`` what was answered, and returns the answers."""
    measured = _ask(engine, until, asked.compare, ANSWER)
    said: list[list[int]] = measured["tokens"]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]
    row |= {"tokens": sum(map(len, said)), "digest": digest, **_chosen(measured)}
    return said


def _timed(engine: LiveEngine, asked: Asked, row: dict, until: float) -> None:
    """Adds to ``row`` what each batch size takes, and a long prompt; what was measured before an error stays."""
    row["decode"] = []
    for size in asked.batches:
        ids = asked.short[:size]
        _ask(engine, until, ids, WARM)
        best = min((_ask(engine, until, ids, asked.decode_tokens) for _ in range(REPEATS)), key=_per_token)
        seconds, moved = _per_token(best), best["counters"].pop("bytes", {})  # the prompts' bytes are among them
        row["decode"].append(
            {
                "batch": size,
                "ms_per_token": 1e3 * seconds,
                "tokens_per_second": size / seconds,
                "bytes": moved,
                "bytes_per_token": sum(moved.values()) / (size * asked.decode_tokens),
            }
            | _chosen(best)
        )
    _ask(engine, until, asked.long[-1:], 1)
    answers = [_ask(engine, until, [ids], 1) for ids in asked.long]
    row["prompt_ms"] = [1e3 * answer["ttft"][0] for answer in answers]
    row["prompt_bytes"] = [sum(answer["counters"].get("bytes", {}).values()) for answer in answers]


def _per_token(measured: dict) -> float:
    """Returns the median over requests of the seconds per token after the first."""
    return statistics.median(measured["tpot"])


def _chosen(measured: dict) -> dict:
    """Returns what the plugin was, and the counters that a row keeps."""
    counters = {name: value for name, value in measured["counters"].items() if name in _COUNTED}
    said = {name: measured["choices"][name] for name in ("mode", "execution", "store") if name in measured["choices"]}
    return said | {"counters": counters}


def agreed(mine: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Returns the number of tokens until the first difference of each answer."""
    total = 0
    for said, its in zip(mine, other, strict=True):
        pairs = zip(said, its, strict=False)
        total += next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(said), len(its)))
    return total


def judge(rows: Sequence[dict], said: Mapping[str, list[list[int]]]) -> None:
    """Adds to each row of tokens how many are stock's, once stock has answered, and what that means."""
    if not (stock := said.get(STOCK)):
        return
    for row in rows:
        if row["part"] == "tokens" and row["name"] != STOCK and said.get(row["name"]):
            row["as_stock"] = agreed(said[row["name"]], stock)
            same = said[row["name"]] == stock
            row["verdict"] = "same" if same else "differs" if row["exact"] else "lossy"


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


def execute(todo: Sequence[Run], asked: Asked, clock: Clock, about: dict, output: Path) -> list[dict]:
    """Runs all engines; writes the result so far after each."""
    rows: list[dict] = []
    said: dict[str, list[list[int]]] = {}
    with progress() as bar:
        task = bar.add_task("", total=len(todo))
        for part in PARTS:
            mine = [run for run in todo if run.part == part]
            bar.update(task, description=part)
            workers = asked.at_once if part == "tokens" else 1
            for row, answers in side_by_side(mine, lambda run: run_one(run, asked, clock), workers):
                rows.append(row)
                if part == "tokens":
                    said[row["name"]] = answers
                judge(rows, said)
                _write(output, about, rows)
                state = "left out" if "left_out" in row else "failed" if "error" in row else "done"
                bar.console.print(f"{part}: {row['name']}: {state}")
                bar.advance(task)
    return rows


def _write(output: Path, about: dict, rows: Sequence[dict]) -> None:
    ran = [row for row in rows if "left_out" not in row]
    parts = {
        part: [{k: v for k, v in row.items() if k != "part"} for row in ran if row["part"] == part] for part in PARTS
    }
    gone = [{"part": row["part"], "name": row["name"], "why": row["left_out"]} for row in rows if "left_out" in row]
    write_result(output, about | parts | {"left_out": gone})


def large_toy(console: Console) -> Path:
    """Returns the folder of the toy with experts of a published size; makes it and its head where they are missing."""
    if not (LARGE / "config.json").is_file():
        console.print(f"writing the toy with experts of {LIKE}'s size to {LARGE}: a minute", soft_wrap=True)
        hidden, intermediate = PRESETS[LIKE]
        source = TOY / "models" / "target"
        inflate_head(TOY / "models" / "eagle3", source, _head(LARGE), inflate(source, LARGE, intermediate, hidden))
    return LARGE


def _head(model: Path) -> Path:
    return model.with_name(f"{model.name}-eagle3")


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
    compared = [row for row in rows if row["part"] == "tokens" and "tokens" in row]
    if compared:
        show(f"tokens, {asked.dtype}", compared, "name", "mode", "execution", "graphs", "tokens", "as_stock", "verdict")
    timed = [
        row | {f"ms_at_{each['batch']}": each["ms_per_token"] for each in row["decode"]}
        for row in rows
        if "decode" in row
    ]
    if timed:
        columns = [f"ms_at_{size}" for size in asked.batches]
        show(
            "ms per token" if asked.gpu else f"ms per token ({_ON_CPU})",
            timed,
            "name",
            "slots",
            "graphs",
            *columns,
            "prompt_ms",
        )
    for row in rows:
        for what, style in (("error", "red"), ("left_out", "yellow")):
            if what in row:
                line = [text for text in row[what].splitlines() if text.strip()][-1:]
                console.print(f"[{style}]{escape(row['part'])}: {escape(row['name'])}: {escape(' '.join(line))}[/]")


@app.main
def main(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of the model. Default: the toy, with large experts for times on a GPU.", exists=True
        ),
    ] = None,
    part: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}.")] = ",".join(PARTS),
    only: Annotated[list[str] | None, typer.Option(help="These engines and stock's. Can be repeated.")] = None,
    side: Annotated[list[str] | None, typer.Option(help="An engine in place of the table's, as of paired.py.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the engines, run none.")] = False,
    minutes: Annotated[float, typer.Option(min=0.1, help="For everything: what does not fit is left out.")] = 60.0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one engine may take.")] = 180.0,
    slots: Annotated[
        str, typer.Option(help="Shares of the experts in slots; all engines run at the first.")
    ] = "25%,20%",
    batch: Annotated[str, typer.Option(help="Requests at once, for times.")] = "1,4,16",
    decode_tokens: Annotated[int, typer.Option(min=2, help="Tokens per timed answer.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a long prompt.")] = 900,
    dtype: Annotated[str, typer.Option(help="For tokens; in float32 exact rows must equal stock's.")] = "float32",
    eager: Annotated[bool | None, typer.Option("--eager/--compile", help="Default: --compile with a GPU.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Engines side by side, where only tokens are compared.")] = 1,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: eagle3 next to the model.")] = None,
    disk_dir: PackedFolder = PACKED,
    plugin: Annotated[list[str] | None, typer.Option(help="Another plugin of vLLM for all engines.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE: an argument of all engines.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and engines.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON.", show_default=str(OUTPUT.relative_to(ROOT)))] = OUTPUT,
) -> None:
    begin = time.monotonic()
    console, gpu = wide(), torch.cuda.is_available()
    todo = runs(split(part), only or [], slot_counts(slots), side or [])
    batches, options = sizes(batch), parsed_options(option or [])
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
    models = dict.fromkeys(PARTS, model) if model else _toys(console, gpu and any(r.part == PARTS[1] for r in todo))
    heads = {
        name: eagle3 or (_head(LARGE) if folder == LARGE else folder.parent / "eagle3")
        for name, folder in models.items()
    }
    asked = Asked(
        models, heads, batches, decode_tokens, prompt_tokens, dtype, not gpu if eager is None else eager, gpu,
        at_once, seed, disk_dir, tuple(plugin or ()), options,
    ).with_prompts()  # fmt: skip
    about = {
        "label": "toy model" if is_toy(models["serving"]) else None,
        "device": torch.cuda.get_device_name(0) if gpu else "cpu",
        "times": None if gpu else _ON_CPU,
        "models": {name: folder.name for name, folder in models.items()},
        "dtype_of_tokens": dtype,
        "enforce_eager": asked.eager,
        "answer_tokens": ANSWER,
        "decode_tokens": decode_tokens,
        "prompt_tokens": prompt_tokens,
        "seed": seed,
        "options": options,
        "provenance": origin,
    }
    rows = execute(todo, asked, Clock(begin + 60 * minutes, timeout), about, output)
    print_rows(console, rows, asked)
    console.print(f"wrote {output}", soft_wrap=True)
    wrong = [row for row in rows if row.get("verdict") == "differs"]
    if wrong and dtype != "float32":
        console.print(f"{len(wrong)} exact engines differ: in {dtype} a near-tie may; --dtype float32 decides")
    if any("error" in row for row in rows) or (wrong and dtype == "float32"):
        raise typer.Exit(1)


def _toys(console: Console, large: bool) -> dict[str, Path]:
    """Returns the toy for tokens, and for times the large one where it is wanted."""
    unpack()
    toy = TOY / "models" / "target"
    return {"tokens": toy, "serving": large_toy(console) if large else toy}


if __name__ == "__main__":
    app()
