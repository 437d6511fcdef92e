"""Serves a ladder of knobs on a scaled machine: real engines in real time, with the proportions of a real machine.

The forward has one core, loads and CPU experts have another. First a layer is measured with all experts resident; then
loads and CPU experts are made as slow, relative to it, as they are relative to a layer of --machine (calculated from
its packaged profile for Qwen3-30B-A3B). All rungs and the resident engine take turns with each prompt, as far as memory
permits. Times are [bold]scaled[/]: only ratios mean anything.

Answers of a lossy rung are judged by stock vLLM, as those of the first rung are: their perplexity, and the share of
their tokens that are its own first choice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from benchmarks.common import RESULTS, Script, progress, show, wide, write_result
from benchmarks.scaled import ladder as ladders
from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.proportions import Proportions, names
from benchmarks.scaled.scale import Cores, Scale, engines_at_once, head, on
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, STOCK, Case, Drafts, PackedFolder, Settings, slot_counts, split
from benchmarks.serving.processes import LiveEngine
from vllm_spac.config.config import SpacConfig
from vllm_spac.storage.checkpoint.headers import read_checkpoint

_DRAFT_OFF = 1.5  # a draft token that takes this many times as long as on the real machine, or 1 / as long, is reported
_RUNGS = "layer_lru,reuse,prefetch,cpu,drafts,tree"
_EPILOG = """[bold]Examples[/]

python benchmarks/scaled/run.py .cache/toy/mid --machine rtx4090 --slots 25%,50%

python benchmarks/scaled/run.py .cache/toy/mid --machine h200-int4 --slots 25% --rungs reuse,cpu --turns 30

python benchmarks/scaled/run.py .cache/toy/mid --machine rtx4090 --slots 25% --dtype float32

python benchmarks/scaled/run.py .cache/toy/mid --rungs reuse,prefetch --predictor gate

python benchmarks/scaled/run.py MODEL --slots 17%,25% --rungs layer_lru,reuse,cpu,moe_spac --draft PARENT

python benchmarks/scaled/run.py MODEL --slots 25% --rungs cpu,head,drafts,budget --eagle3 HEAD

python benchmarks/scaled/run.py MODEL --slots 2k --rungs drop,executed --predictor quasi_hidden --predictor-file FILE
"""
app = Script(__doc__, _EPILOG)


@dataclass(frozen=True)
class _Run:
    """What is served: ``rungs`` with each number of slots of ``sizes``, paced as ``real``."""

    rungs: list[ladders.Rung]
    sizes: list[str]
    settings: Settings
    ids: list[list[int]]
    real: Proportions
    cores: Cores


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    machine: Annotated[str, typer.Option(help=f"Of {', '.join(names())}.")] = "rtx4090",
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, one ladder each.")] = "25%,50%",
    rungs: Annotated[str, typer.Option(help="Rungs, each added to those before it; prefetch stays beside.")] = _RUNGS,
    predictor: Annotated[str, typer.Option(help="--spac-prefetch of the rung prefetch.")] = "utility",
    predictor_file: Annotated[Path | None, typer.Option(help="Its file, if it is trained.")] = None,
    turns: Annotated[int, typer.Option(min=2, help="Prompts that count.")] = 16,
    warm: Annotated[int, typer.Option(min=0, help="Prompts before them that do not.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    again: Annotated[int, typer.Option(min=0, help="A prompt's first tokens that its end repeats.")] = 0,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens per speculative step.")] = 4,
    eagle3: Annotated[Path | None, typer.Option(help="EAGLE-3 head. Default: MODEL-eagle3.")] = None,
    draft: Annotated[Path | None, typer.Option(help="Draft model of moe_spac. Default: draft beside MODEL.")] = None,
    disk_dir: PackedFolder = PACKED,
    dtype: Annotated[str, typer.Option(help="Of all engines; float32 where rounding changes tokens.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of prompts, engines and the order of a turn.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path | None, typer.Option(help="Default: benchmarks/results/scaled_MACHINE_toy.json.")] = None,
) -> None:
    folders = eagle3 or model.with_name(f"{model.name}-eagle3"), draft or model.with_name("draft")
    cores, real, sizes = Cores.here(), Proportions.of(machine), slot_counts(slots)
    steps = ladders.rungs(split(rungs), predictor, predictor_file)
    settings = Settings(
        model, Drafts(draft_tokens, *folders), prompt_tokens + again, output_tokens, seed=seed, dtype=dtype,
        disk_dir=disk_dir, timeout=timeout, environment=cores.environment(),
    )  # fmt: skip
    for case in ladders.cases(steps, sizes[0]):
        case.job(settings)  # refuses a missing drafter before anything is measured
    asked = prompts.load(model, warm + turns, prompt_tokens, seed)
    if again:
        asked = asked.begun_again(again)
    result = head(machine, asked, settings)
    kinds = prompts.kinds(model, len(asked.ids))[warm:]
    result |= {"warm_turns": warm, "draft_tokens": draft_tokens, "kinds": kinds}
    output = output or RESULTS / f"scaled_{machine}_toy.json"
    _serve(_Run(steps, sizes, settings, asked.ids, real, cores), result, output)
    title = f"{result['label']}: {model.name}"
    times = "tpot_median", "tpot_interval", "speedup", "speedup_interval", "share_of_resident", "served"
    counts = [f"counters.{name}" for name in ("hits", "misses", "loads", "cpu_experts", "prefetches")]
    show(title, result["rows"], "slots", "rung", *times, *counts, "turns", "equal_to_resident", "equal_to_first")
    remarks = [
        *_on_times(result),
        *_on_pace(result, real),
        *_on_tokens(result),
        *_on_quality(result),
    ]
    for line in (*remarks, f"wrote {output}"):
        wide(160).print(escape(line), highlight=False, soft_wrap=True)
    if any(row["equal_to_resident"] < row["turns"] and not row["rounds"] for row in result["rows"]):
        raise typer.Exit(1)


def _serve(run: _Run, result: dict, output: Path) -> None:
    """Derives the scaled machine and serves each number of slots; writes the result so far after each."""
    settings, ids, warm = run.settings, run.ids, result["warm_turns"]
    with progress() as bar, ExitStack() as stack:
        task = bar.add_task("all experts resident", total=None)
        scale = Scale.derive(run.real, settings, ids, warm, run.cores)
        result["scale"] = scale.plain()
        share = max(float(SpacConfig.parse({"slots": size}).parsed_slots.share or 1) for size in run.sizes)
        at_once = engines_at_once(scale.resident, read_checkpoint(settings.model).total, share)
        settings = stack.enter_context(on(scale.machine, settings))
        turns = len(ladders.groups(1 + len(run.rungs), at_once)) * len(ids)
        bar.update(task, total=len(run.sizes) * turns)

        def advance(what: str) -> None:
            bar.update(task, advance=1, description=what)

        for size in run.sizes:
            rows = ladders.serve(run.rungs, size, settings, ids, warm, at_once, advance)
            _judge(rows, run, run.ids[warm:])
            result["rows"] += [row | {"served": scale.served(row["tpot_median"])} for row in rows]
            write_result(output, result)


def _judge(rows: list[dict], run: _Run, asked: list[list[int]]) -> None:
    """Replaces the answers of each row to the prompts ``asked`` by what stock vLLM thinks of them.

    Of lossy rungs, and then of the first one: ``quality``. Of exact rungs: ``differences`` from the resident engine.
    """
    lossy = {rung.name for rung in run.rungs if rung.lossy}
    answers = {row["rung"]: [tokens[0] for tokens in row.pop("answers")] for row in rows}
    resident = answers[ladders.RESIDENT.name]
    exact = [row for row in rows if row["rung"] not in lossy and answers[row["rung"]] != resident]
    if not lossy and not exact:
        return
    with closing(LiveEngine(Case(STOCK, None).job(run.settings), True, run.settings.timeout)) as engine:
        for row in rows:
            said = answers[row["rung"]]
            if lossy and row["rung"] in (*lossy, run.rungs[0].name):
                row["quality"] = _quality(engine, asked, said)
            if row in exact:
                row["differences"] = list(_differences(engine, asked, resident, said))


def _quality(engine: LiveEngine, asked: list[list[int]], said: list[list[int]]) -> dict[str, float]:
    found = [engine.score([*prompt, *tokens], len(prompt)) for prompt, tokens in zip(asked, said, strict=True)]
    logprobs, best = (statistics.fmean(statistics.fmean(each[part]) for each in found) for part in ("logprobs", "best"))
    return {"perplexity": math.exp(-logprobs), "top1_agreement": best}


def _differences(
    engine: LiveEngine, asked: list[list[int]], resident: list[list[int]], said: list[list[int]]
) -> Iterator[dict[str, float]]:
    """Yields the first token of each answer that differs, and by how much less likely stock vLLM finds it (``gap``)."""
    for number, (prompt, theirs, ours) in enumerate(zip(asked, resident, said, strict=True)):
        if ours == theirs:
            continue
        place = next(place for place, (one, other) in enumerate(zip(theirs, ours, strict=True)) if one != other)
        before = [*prompt, *theirs[:place]]
        one, other = (engine.score([*before, tokens[place]], len(before))["logprobs"][0] for tokens in (theirs, ours))
        yield {"prompt": number, "token": place, "gap": one - other}


def _on_times(result: dict) -> Iterator[str]:
    """Yields by how much the machine has changed since the scale was set."""
    before = result["scale"]["machine"]["layer_seconds"] * result["scale"]["resident"]["layers"]
    drift = max(row["tpot_median"] for row in result["rows"] if row["rung"] == "resident") / before
    yield f"the resident engine took up to {drift:.2f} times as long in turns as when the scale was set"


def _on_pace(result: dict, real: Proportions) -> Iterator[str]:
    """Yields the machine's proportions, those that drafts had, and which deadlines were not kept."""
    rows, machine = result["rows"], ScaledMachine.model_validate(result["scale"]["machine"])
    text = f"{real.name}, load : layer : CPU expert = {real.load:.2f} : 1 : {real.cpu:.2f}; a layer takes"
    yield f"{text} {1e3 * machine.layer_seconds:.2f} ms here, {result['scale']['factor']:.0f} times the real machine's"
    count, seconds = ladders.drafted(rows)
    if count:
        here = seconds / machine.layer_seconds
        off = here / real.draft
        verdict = "as there" if 1 / _DRAFT_OFF < off < _DRAFT_OFF else f"too {'slow' if off > 1 else 'fast'} here"
        text = f"draft : layer = {here:.1f} : 1 over {count} draft tokens, on the real machine {real.draft:.1f} : 1"
        yield f"{text} ({real.drafter}): {verdict}"
    for row in rows:
        if text := ladders.disturbed(row["counters"]["own"], machine):
            yield f"{row['slots']}, {row['rung']}: {text}"


def _on_tokens(result: dict) -> Iterator[str]:
    """Yields where tokens of exact rungs differ, which they may where rounding decides between two."""
    for row in result["rows"]:
        for each in row.get("differences", ()):
            yield (
                f"{row['slots']}, {row['rung']}: token {each['token']} of answer {each['prompt']} differs, and "
                f"stock vLLM finds it e^{each['gap']:.4f} times less likely"
            )


def _on_quality(result: dict) -> Iterator[str]:
    """Yields what stock vLLM thinks of the answers of lossy rungs, and of the first rung's."""
    for row in result["rows"]:
        if quality := row.get("quality"):
            yield (
                f"{row['slots']}, {row['rung']}: the answers have a perplexity of {quality['perplexity']:.3f}, and "
                f"{100 * quality['top1_agreement']:.1f} % of their tokens are stock vLLM's first choice"
            )


if __name__ == "__main__":
    app()
