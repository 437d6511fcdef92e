"""Compares what ``vllm-spac tune`` chooses with the best of 20 configurations that were chosen by hand.

This is done under two limits of the machine: a quarter of the experts in slots with all cores, and half of them with
one core. Under each, tune runs as a user starts it. Then each configuration answers prompts in turns with the default,
both engines alive. The default, tune's choice and the configuration that was best in these turns answer further prompts
in turns at the end, because the best of 20 is partly the luckiest. All tokens must be the default's (float32).
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
from common import RESULTS, ROOT, exit_on_sigterm, is_toy, provenance, write_result

from vllm_spac.config import tuned_profile
from vllm_spac.config.tuned_profile import Candidate, TunedProfile, path_of
from vllm_spac.decisions.comparison import Ratio, orders
from vllm_spac.storage.checkpoint.headers import find_folder
from vllm_spac.tools.evaluation.prompts import read
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError, ProcessMeasurer

ENGINE = {"enforce_eager": True, "max_model_len": 512, "max_num_seqs": 8, "dtype": "float32"}
PROMPT_TOKENS = 512  # longer prompts are cut, as tune does
_NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/tuned.py .cache/toy/mid --eagle3 .cache/toy/mid-eagle3

python benchmarks/serving/tuned.py benchmarks/toy/models/target --limits slots --minutes 1 --turns 2 --last 4 --first 3
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass(frozen=True)
class Limit:
    """A limit of the machine.

    Attributes:
        slots: as ``--spac-slots``.
        cores: of all engines; 0: all.
    """

    slots: str
    cores: int = 0


LIMITS = {"slots": Limit("25%"), "core": Limit("50%", cores=1)}


def by_hand(eagle3: Path | None) -> list[Candidate]:
    """Returns what somebody who knows the knobs might try: 20 configurations with an EAGLE-3 head, 14 without."""
    found = [
        Candidate("policy=lru", "", {"policy": "lru"}),
        Candidate("policy=layer_lru", "", {"policy": "layer_lru"}),
        Candidate("policy=lfu", "", {"policy": "lfu"}),
        Candidate("policy=utility", "", {"policy": "utility"}),
        Candidate("io_threads=1", "", {"io_threads": 1}),
        Candidate("io_threads=2", "", {"io_threads": 2}),
        Candidate("io_threads=8", "", {"io_threads": 8}),
        Candidate("prefetch=utility", "", {"prefetch": "utility"}),
        Candidate("policy=utility prefetch=utility", "", {"policy": "utility", "prefetch": "utility"}),
        Candidate("policy=lru io_threads=8", "", {"policy": "lru", "io_threads": 8}),
        Candidate("ngram 2", "", {}, {**_NGRAM, "num_speculative_tokens": 2}),
        Candidate("ngram 4", "", {}, {**_NGRAM, "num_speculative_tokens": 4}),
        Candidate("ngram 4 guard=off", "", {"guard": "off"}, {**_NGRAM, "num_speculative_tokens": 4}),
        Candidate("policy=layer_lru ngram 4", "", {"policy": "layer_lru"}, {**_NGRAM, "num_speculative_tokens": 4}),
    ]
    if eagle3 is None:
        return found

    def head(tokens: int) -> dict[str, Any]:
        return {"method": "eagle3", "model": str(eagle3), "num_speculative_tokens": tokens}

    return [
        *found,
        Candidate("EAGLE-3 2", "", {}, head(2)),
        Candidate("EAGLE-3 4", "", {}, head(4)),
        Candidate("EAGLE-3 4 guard=off", "", {"guard": "off"}, head(4)),
        Candidate("policy=lru EAGLE-3 4", "", {"policy": "lru"}, head(4)),
        Candidate("io_threads=8 EAGLE-3 4", "", {"io_threads": 8}, head(4)),
        Candidate("tree=8 EAGLE-3", "", {"tree": 8}, head(8)),
    ]


def limited(candidate: Candidate, slots: str) -> Candidate:
    """Returns the candidate with so many slots."""
    return Candidate(candidate.name, "hand", {**(candidate.knobs or {}), "slots": slots}, candidate.drafts)


@contextlib.contextmanager
def cores(count: int) -> Iterator[None]:
    """Limits this process and those that it starts to ``count`` cores; 0 changes nothing."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, sorted(before)[: count or len(before)])
        yield
    finally:
        os.sched_setaffinity(0, before)


def take_turns(
    engines: Sequence[Engine], prompts: Sequence[str | Sequence[int]], tokens: int, seed: int
) -> list[list[Answer]]:
    """Returns the engines' answers, [turns][engines]; each is equally often first."""
    found = []
    for prompt, order in zip(prompts, orders(seed, len(engines)), strict=False):
        answers = {which: engines[which].answer(prompt, tokens) for which in order}
        found.append([answers[which] for which in range(len(engines))])
    return found


def compared(turns: Sequence[Sequence[Answer]], other: int, base: int = 0) -> dict[str, Any]:
    """Returns the ratio of the tokens per second of two engines of ``turns``, and whether their tokens are equal."""
    ratio = Ratio.of([answers[other].rate / answers[base].rate for answers in turns])
    return {
        **ratio.model_dump(),
        "tokens_per_second": statistics.median(answers[other].rate for answers in turns),
        "tokens_equal": all(list(answers[other].ids) == list(answers[base].ids) for answers in turns),
    }


def measured_by_hand(
    configurations: Sequence[Candidate],
    default: Candidate,
    measurer: Measurer,
    prompts: Sequence[str | Sequence[int]],
    tokens: int,
    tell: Any = lambda text: None,
) -> list[dict[str, Any]]:
    """Returns a row for each configuration, of turns with the default; one that does not start has a problem."""
    rows: list[dict[str, Any]] = []
    with measurer.start(default) as base:
        base.answer(prompts[0], 2)  # warm
        for number, configuration in enumerate(configurations):
            tell(configuration.name)
            row: dict[str, Any] = {"name": configuration.name, "problem": ""}
            try:
                with measurer.start(configuration) as engine:
                    engine.answer(prompts[0], 2)
                    row |= compared(take_turns([base, engine], prompts, tokens, number), 1)
            except MeasuringError as error:
                row["problem"] = str(error).strip().splitlines()[-1]
            rows.append(row)
    return rows


def best_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the name of the row with the highest ratio among those with the default's tokens."""
    return max((row for row in rows if row.get("tokens_equal")), key=lambda row: row["median"])["name"]


def tuned(
    model: Path, eagle3: Path | None, limit: Limit, disk_dir: Path, minutes: float, tokens: int
) -> TunedProfile | None:
    """Runs ``vllm-spac tune``; returns the profile that it wrote, or None if the time was too short for a decision.

    Raises:
        CalledProcessError: it failed.
    """
    path = path_of(disk_dir, tuned_profile.identity(find_folder(str(model))))
    path.unlink(missing_ok=True)
    asked = ["--minutes", str(minutes), "--slots", limit.slots, "--disk-dir", str(disk_dir), "--fresh"]
    asked += ["--output-tokens", str(tokens), "--engine", json.dumps(ENGINE)]
    asked += ["--eagle3", str(eagle3)] if eagle3 is not None else []
    command = [sys.executable, "-P", "-m", "vllm_spac.cli.main", "tune", str(model), *asked]
    subprocess.run(command, check=True, env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"})
    return TunedProfile.read(path) if path.exists() else None


def one(
    model: Path,
    eagle3: Path | None,
    limit: Limit,
    disk_dir: Path,
    minutes: float,
    tokens: int,
    turns: int,
    last: int,
    first: int | None,
    tell: Any,
) -> dict[str, Any]:
    """Returns the result under one limit."""
    prompts = read(Path(str(files("vllm_spac.tools.tuning").joinpath("prompts.jsonl"))))
    tell("vllm-spac tune")
    profile = tuned(model, eagle3, limit, disk_dir, minutes, tokens)
    default = Candidate("default", "hand", {"slots": limit.slots})
    choice = default
    if profile is not None and profile.knobs:
        choice = Candidate(profile.choice, "tune", profile.knobs, profile.speculative_config)
    configurations = [limited(candidate, limit.slots) for candidate in by_hand(eagle3)][:first]
    measurer = ProcessMeasurer(str(model), disk_dir, ENGINE, PROMPT_TOKENS)
    rows = measured_by_hand(configurations, default, measurer, prompts[:turns], tokens, tell)
    best = best_of(rows)
    tell("the last turns")
    final = [default, choice, next(each for each in configurations if each.name == best)]
    asked = [prompts[(turns + number) % len(prompts)] for number in range(last)]
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(measurer.start(candidate)) for candidate in final]
        for engine in engines:
            engine.answer(asked[0], 2)
        answers = take_turns(engines, asked, tokens, 0)
    return {
        "slots": limit.slots,
        "cores": limit.cores or len(os.sched_getaffinity(0)),
        "tune": {
            "choice": choice.name,
            "decided": profile is not None,
            "knobs": dict(choice.knobs or {}),
            "drafts": choice.drafts,
        },
        "by_hand": rows,
        "best": best,
        "tune_over_default": compared(answers, 1),
        "best_over_default": compared(answers, 2),
        "tune_over_best": compared(answers, 1, 2),
    }


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head; without it 14 configurations are tried.")] = None,
    limits: Annotated[str, typer.Option(help="Which limits.")] = ",".join(LIMITS),
    minutes: Annotated[float, typer.Option(min=0.1, help="Of vllm-spac tune under each limit.")] = 8.0,
    tokens: Annotated[int, typer.Option("--output-tokens", min=2, help="Tokens generated per prompt.")] = 32,
    turns: Annotated[int, typer.Option(min=2, help="Of each configuration with the default.")] = 3,
    last: Annotated[int, typer.Option(min=2, help="Turns at the end.")] = 16,
    first: Annotated[int | None, typer.Option(min=1, help="Only so many configurations: does it work?")] = None,
    disk_dir: Annotated[Path, typer.Option(help="Folder of the packed experts.")] = ROOT / ".cache" / "tuned",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "tuned_toy.json",
) -> None:
    exit_on_sigterm()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # of all engines
    console = Console(width=max(120, Console().width))
    asked = plan.split(limits)
    if unknown := sorted(set(asked) - set(LIMITS)):
        console.print(f"[bold red]error:[/] --limits {escape(', '.join(unknown))}: use {', '.join(LIMITS)}")
        raise typer.Exit(2)
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "minutes": minutes,
        "output_tokens": tokens,
        "turns": turns,
        "last_turns": last,
        "engine": ENGINE,
        "limits": {},
        "provenance": provenance(),
    }
    disk_dir.mkdir(parents=True, exist_ok=True)
    with Progress(console=Console(stderr=True)) as progress:
        for name in asked:
            task = progress.add_task(name, total=len(by_hand(eagle3)[:first]) + 2)

            def tell(text: str, name: str = name, task: Any = task) -> None:
                progress.update(task, advance=1, description=f"{name}: {text}")

            limit = LIMITS[name]
            with cores(limit.cores):
                found = one(model, eagle3, limit, disk_dir, minutes, tokens, turns, last, first, tell)
            result["limits"][name] = found
            write_result(output, result)
    show(console, result)
    console.print(f"wrote {output}", soft_wrap=True)
    kinds = ("tune_over_default", "best_over_default")
    if not all(found[kind]["tokens_equal"] for found in result["limits"].values() for kind in kinds):
        raise typer.Exit(1)


def show(console: Console, result: Mapping[str, Any]) -> None:
    table = Table(title="tokens per second, ratio per turn (95 %)", title_justify="left")
    for column in (
        "limit",
        "tune's choice",
        "over the default",
        "best of the others",
        "over the default",
        "tune / best",
    ):
        table.add_column(column, overflow="fold")
    for name, found in result["limits"].items():
        shown = ["{median:.2f} ({low:.2f} - {high:.2f})".format(**found[f"{kind}"]) for kind in _RATIOS]
        table.add_row(
            f"{name}: {found['slots']}, {found['cores']} cores",
            found["tune"]["choice"],
            shown[0],
            found["best"],
            *shown[1:],
        )
    console.print(table)


_RATIOS = ("tune_over_default", "best_over_default", "tune_over_best")


if __name__ == "__main__":
    app()
