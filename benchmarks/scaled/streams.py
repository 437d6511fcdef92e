"""Requests that take turns over requests that share every step, on a scaled machine. Exact.

Two engines answer the same requests together, one after the other: one whose requests share every step, and one that
may set some aside (--spac-guard on@gap=SECONDS) and learns whether that pays. Neither drafts. Speed is tokens per
second of all requests together, prompts included. Times are [bold]scaled[/], see run.py beside this file: only ratios
mean anything.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
import plan
import prompts
from common import RESULTS, exit_on_sigterm, progress, show, write_result
from ladder import PACED, WATERFILL
from paired import Arm, Side, beside_first, take_turns
from processes import EngineError
from proportions import Proportions, names
from run import PACKED, PackedFolder, Settings
from scale import Cores, Scale, head, on

from vllm_spac.errors import SpacError

_EPILOG = """[bold]Example[/]

python benchmarks/scaled/streams.py .cache/toy/mid --machine rtx4090-int4 --slots 25% --requests 4
"""
_COLUMNS = "arm", "ratio", "low", "high", "turns", "tokens_equal", "loads_per_token"
_SHORT = 32  # tokens of the answers by which a layer is measured
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090-int4",
    slots: Annotated[str, typer.Option(help="Value of --spac-slots.")] = "25%",
    cpu: Annotated[bool, typer.Option("--cpu", help="The CPU computes a share of the missed experts.")] = False,
    requests: Annotated[int, typer.Option(min=2, help="Requests that run together.")] = 4,
    gap: Annotated[float, typer.Option(min=0.01, help="Seconds that a request may wait for a token.")] = 60.0,
    turns: Annotated[int, typer.Option(min=2, help="Rounds of requests that count.")] = 6,
    warm: Annotated[int, typer.Option(min=0, help="Rounds before them, in which it learns.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 192,
    disk_dir: PackedFolder = PACKED,
    dtype: Annotated[str, typer.Option(help="Of all engines.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a round.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a round may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="The result.")] = RESULTS / "scaled_streams_toy.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(140, Console().width))
    knobs = {"slots": slots, **PACED, **(WATERFILL if cpu else {})}
    sides = [Side("shared", knobs), Side("turns", {**knobs, "guard": f"on@gap={gap:g}"})]
    drafts = plan.Drafts(1, model, model)
    try:
        cores, real = Cores.here(), Proportions.of(machine)
        settings = Settings(
            model, (requests,), prompt_tokens, output_tokens, seed, True, None, disk_dir, drafts, timeout,
            dtype=dtype, environment=cores.environment(),
        )  # fmt: skip
        asked = prompts.load(model, requests * (warm + turns), prompt_tokens, seed)
        result = head(machine, asked, settings) | {"slots": slots, "requests": requests, "gap": gap, "warm_turns": warm}
        result["knobs"] = knobs
        with progress() as bar, tempfile.TemporaryDirectory(prefix="spac-scaled-") as folder:
            task = bar.add_task("all experts resident", total=warm + turns)
            scale = Scale.derive(real, replace(settings, output_tokens=_SHORT), asked.ids[:3], 1, cores)
            result["scale"], paced = scale.plain(), on(scale.machine, settings, Path(folder))
            answers = []
            batches = [asked.ids[first : first + requests] for first in range(0, len(asked.ids), requests)]
            for turn in take_turns([Arm(side) for side in sides], batches, paced):
                answers.append(turn)
                bar.update(task, advance=1, description=f"{requests} requests, {slots}")
        result["rows"] = [row(side.text, which, answers[warm:], seed) for which, side in enumerate(sides)]
        result["guard"] = answers[-1][1]["choices"].get("guard")
        result["seconds"] = [[each["seconds"] for each in pair] for pair in answers]
    except (ValueError, SpacError, EngineError) as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(1 if isinstance(error, EngineError) else 2) from error
    write_result(output, result)
    show(f"{result['label']}: times the tokens/s of shared steps", result["rows"], *_COLUMNS)
    console.print(f"{result['guard']}\nwrote {output}", highlight=False)
    if not all(each["tokens_equal"] for each in result["rows"]):
        raise typer.Exit(1)


def row(arm: str, which: int, answers: list[list[dict]], seed: int) -> dict:
    """Returns what engine ``which`` did over the first, for the ``answers`` [rounds][engines]."""
    mine = [pair[which] for pair in answers]
    tokens = sum(len(said) for answer in mine for said in answer["tokens"])
    return {
        "arm": arm,
        **beside_first(answers, which, lambda answer: answer["seconds"], seed),
        "loads_per_token": sum(answer["counters"]["loads"] for answer in mine) / tokens,
    }


if __name__ == "__main__":
    app()
