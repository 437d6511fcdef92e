"""Compares a model in bf16 with quantised copies of it at equal memory: each has as many slots as the bytes of bf16's.

All engines stay alive and take turns: each prompt goes to every one of them, in an order that changes. Reported are
tokens per second over bf16's, the median over the turns with a bootstrapped 95 % interval; bytes read per token; and
the perplexity of held-out text, by each engine's own log-probabilities. The copies are written by vllm-spac quantise
next to the model where they are missing.

vLLM selects its kernels for quantised experts on a CPU with AMX only. On a CPU with AVX-512 they run too, and this
script makes vLLM select them: the result says so.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, exit_on_sigterm, is_toy, progress, provenance, show, write_result
from processes import LiveEngine
from run import PACKED, PackedFolder, Settings

from vllm_spac.decisions.comparison import interval, orders
from vllm_spac.storage.checkpoint.headers import read_checkpoint
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

PAUSE = 0.3  # seconds; OpenMP threads of the engine that has just run still spin for 0.2
FORMATS = ("fp8", "int8", "int4")
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/quantised.py .cache/toy/quantised --slots 25%,10%

python benchmarks/serving/quantised.py .cache/toy/quantised --formats int4 --turns 40
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the models.

    Attributes:
        name: its format.
        folder: of its checkpoint.
        expert_bytes: of an expert in a slot.
    """

    name: str
    folder: Path
    expert_bytes: int

    @classmethod
    def of(cls, name: str, folder: Path) -> Arm:
        (nbytes,) = read_checkpoint(folder, FormatKernels.CPU if name != "bf16" else None).expert_bytes
        return cls(name, folder, nbytes)

    def percent(self, percent: int, bf16: Arm) -> int:
        """The share of its experts that takes as many bytes as ``percent`` of bf16's."""
        return min(100, percent * bf16.expert_bytes // self.expert_bytes)


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model in bf16.", exists=True, file_okay=False)],
    formats: Annotated[str, typer.Option(help="Copies to compare, of fp8, int8 and int4.")] = ",".join(FORMATS),
    group: Annotated[int, typer.Option(help="Columns that share a scale, of int4.")] = 128,
    slots: Annotated[str, typer.Option(help="Share of the experts that bf16 has in slots.")] = "25%",
    turns: Annotated[int, typer.Option(min=2, help="Turns that count, each with a prompt of its own.")] = 20,
    warm: Annotated[int, typer.Option(min=0, help="Turns that do not count.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per turn.")] = 64,
    scored: Annotated[
        int, typer.Option(min=1, help="Texts whose perplexity is measured, as long as a prompt and its answer.")
    ] = 12,
    disk_dir: PackedFolder = PACKED,
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a turn.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "quantised_toy.json",
) -> None:
    exit_on_sigterm()
    asked = formats.split(",")
    if unknown := set(asked) - set(FORMATS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: use {', '.join(FORMATS)}")
    found = provenance()
    arms = [Arm.of("bf16", model)] + [Arm.of(name, _copy(model, name, group)) for name in asked]
    drafts = plan.Drafts(4, model.parent / "eagle3", model.parent / "draft")
    settings = Settings(model, (1,), prompt_tokens, output_tokens, seed, True, None, disk_dir, drafts, 1800.0)
    ids = prompts.load(model, warm + turns, prompt_tokens, seed).ids
    texts = prompts.load(model, scored, prompt_tokens + output_tokens, seed + 1).ids  # as long as engines allow
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "group": group,
        "kernels": "vLLM's for a CPU with AMX, selected on this CPU",
        "output_tokens": output_tokens,
        "turns": turns,
        "rows": rows,
        "provenance": found,
    }
    for size in slots.split(","):
        percent = int(size.removesuffix("%"))
        with ExitStack() as stack, progress() as bar:
            engines = [
                stack.enter_context(
                    closing(LiveEngine(_job(arm, arm.percent(percent, arms[0]), settings), False, 1800.0))
                )
                for arm in arms
            ]
            scores = [[engine.score(text, 1) for text in texts] for engine in engines]
            answers: list[list[dict]] = []
            task = bar.add_task(size, total=len(ids))
            for prompt, order in zip(ids, orders(seed, len(arms)), strict=False):
                turn: list[dict] = [{} for _ in arms]
                for which in order:
                    time.sleep(PAUSE)
                    turn[which] = engines[which].turn(prompt, output_tokens)
                answers.append(turn)
                bar.advance(task)
        rows += [
            _row(size, percent, arm, arms[0], which, answers[warm:], scores, seed) for which, arm in enumerate(arms)
        ]
        write_result(output, result)
    columns = ("slots", "format", "percent", "ratio", "interval", "tokens_per_second", "bytes_per_token", "perplexity")
    show("at equal memory", rows, *columns)


def _copy(model: Path, name: str, group: int) -> Path:
    """Returns the folder of a quantised copy, which is written if it is missing."""
    target = model.with_name(f"{model.name}-{name}")
    if not (target / "config.json").exists():
        options = ["--format", name, "--group", str(group), "--output", str(target)]
        subprocess.run([sys.executable, "-m", "vllm_spac.cli.main", "quantise", str(model), *options], check=True)
    return target


def _job(arm: Arm, percent: int, settings: Settings) -> dict:
    job = dataclasses.replace(settings, model=arm.folder).job(plan.Configuration(None, None, "none"), [])
    job["spac"] = {"slots": f"{percent}%", "store": "disk", "disk_dir": str(settings.disk_dir)}
    return job | {"kernels_without_amx": True}


def _row(
    size: str,
    percent: int,
    arm: Arm,
    bf16: Arm,
    which: int,
    answers: list[list[dict]],
    scores: list[list[dict[str, list]]],
    seed: int,
) -> dict[str, Any]:
    rates = [[len(answer["tokens"][0]) / answer["seconds"] for answer in turn] for turn in answers]
    ratios = [turn[which] / turn[0] for turn in rates]
    tokens = sum(len(turn[which]["tokens"][0]) for turn in answers)
    loads = sum(turn[which]["counters"]["loads"] for turn in answers)
    logprobs = [value for text in scores[which] for value in text["logprobs"]]
    best = [value for text in scores[which] for value in text["best"]]
    return {
        "slots": size,
        "format": arm.name,
        "percent": arm.percent(percent, bf16),
        "expert_bytes": arm.expert_bytes,
        "ratio": statistics.median(ratios),
        "interval": list(interval(ratios, seed)),
        "tokens_per_second": [turn[which] for turn in rates],
        "loads_per_token": loads / tokens,
        "bytes_per_token": loads * arm.expert_bytes / tokens,
        "perplexity": math.exp(-statistics.fmean(logprobs)),
        "top_1": statistics.fmean(best),
        "scored_tokens": len(logprobs),
    }


if __name__ == "__main__":
    app()
