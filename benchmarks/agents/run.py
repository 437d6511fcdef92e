"""Measures engines that serve several agents at once, with recorded requests, in turns: all get the same ones.

Agents share a long prefix, and each asks its next turn when its last one is answered (``recorded.py``). --scale and
--answer-scale make prompts and answers smaller, so that a small machine can serve them. All engines keep prefixes; each
agent has a slot of llama.cpp's server for itself, and what was asked once before is the prefix.

llama.cpp has the same weights, as --peers says: [bold]weights[/] fits as many bytes of weights as the plugin has in
RAM, [bold]all[/] has as much memory as it wants, [bold]process[/] as much as the plugin's process takes in all. A
control group limits them, which needs root (``peers/beside_llama.py``).

Reported are medians over the rounds: tokens per second of all agents; seconds to the first token and per token after
it, and the longest gap between two tokens of an answer; bytes read from the disk per token; the share of answers that
are stock's.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.agents.recorded import Recording
from benchmarks.agents.served import equal, measures
from benchmarks.common import RESULTS, ROOT, PlanError, Script, is_toy, progress, provenance, show, wide, write_result
from benchmarks.peers import gguf_model, process_memory
from benchmarks.peers.beside_llama import QUIET_OPENMP, SLACK, Llama, resident_bytes
from benchmarks.serving.cases import PACKED, STOCK, Case, Drafts, PackedFolder, Settings, sizes, split
from benchmarks.serving.processes import LiveEngine, LiveProcess
from benchmarks.serving.turns import in_turns
from vllm_spac.storage.checkpoint.headers import read_checkpoint

LLAMA = "llama.cpp"
KINDS = ("weights", "all", "process")
MEASURES = ("tokens_per_s", "ttft_p50", "ttft_p95", "tpot_p50", "tpot_p95", "longest_gap", "bytes_per_token")
_WARM = 2  # agents of the round that does not count
_SPARE = 32  # tokens of a context beyond the longest turn
_EPILOG = """[bold]Examples[/]

python benchmarks/agents/run.py .cache/toy/local-mid

python benchmarks/agents/run.py .cache/real/target --side stock --side spac --side "spac plane=table" --peers ""
"""
app = Script(__doc__, _EPILOG)


@dataclass(frozen=True)
class Participant:
    """One engine that answers: ``memory``: which limit llama.cpp has; ``slots``: the plugin's."""

    engine: str
    process: LiveProcess
    slots: str | None = None
    memory: str | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        return self.engine if self.memory is None else f"{self.engine}, {self.memory}"

    def ask(self, asked: dict) -> dict:
        """Returns what it answered, and the bytes that it read from disks."""
        before = process_memory.used(self.process.pid)["read_bytes"]
        answer: dict = self.process.ask({name: asked[name] for name in ("agents", "first")})
        return answer | {"read_bytes": process_memory.used(self.process.pid)["read_bytes"] - before}


@app.main
def main(
    models: Annotated[list[Path], typer.Argument(help="Folders of models.", exists=True, file_okay=False)],
    agents: Annotated[str, typer.Option(help="Numbers of agents.")] = "1,2,4,8,16",
    side: Annotated[list[str] | None, typer.Option(help="Engines, as of paired.py. Default: stock and spac.")] = None,
    slots: Annotated[str, typer.Option(help="Value of --spac-slots.")] = "25%",
    peers: Annotated[
        str, typer.Option(help=f"llama.cpp's memory, of {', '.join(KINDS)}; empty: none.")
    ] = "weights,all",
    scale: Annotated[float, typer.Option(help="What prompts are multiplied by.")] = 1 / 32,
    answer_scale: Annotated[float, typer.Option(help="What answers are multiplied by.")] = 1 / 4,
    chunk: Annotated[int, typer.Option(min=1, help="Value of --max-num-batched-tokens.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="How often all numbers of agents run.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads of llama.cpp.")] = 2,
    read_ahead_kib: Annotated[int | None, typer.Option(min=0, help="Of the disk; default: as it is.")] = None,
    dtype: Annotated[str, typer.Option(help="Of all engines: bfloat16 or float32.")] = "bfloat16",
    disk_dir: PackedFolder = PACKED,
    work: Annotated[Path, typer.Option(help="Folder of GGUF files.", show_default=".cache/peers")] = ROOT
    / ".cache"
    / "peers",
    seed: Annotated[int, typer.Option(help="Of who is first.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a round may take.")] = 900.0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "agents.json",
) -> None:
    counts, kinds, recording = sizes(agents, "--agents"), split(peers), Recording.read(scale, answer_scale)
    if unknown := set(kinds) - set(KINDS):
        raise PlanError(f"--peers {', '.join(sorted(unknown))}: use {', '.join(KINDS)}")
    cases = [Case.parse(text, slots) for text in side or [STOCK, "spac"]]
    if kinds and all(case.is_stock for case in cases):
        raise PlanError(f"--peers {peers}: llama.cpp's memory is that of the plugin; add a --side spac, or --peers ''")
    work.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "label": "toy model" if all(map(is_toy, models)) else None,
        "chunk": chunk,
        "rounds": rounds,
        "dtype": dtype,
        "threads": threads,
        "seed": seed,
        "requests": {},
        "rows": [],
        "provenance": provenance(),
    }
    numbers = [_WARM, *(count for _ in range(rounds) for count in counts)]
    with process_memory.read_ahead(work, read_ahead_kib) as found, progress() as bar:
        result["read_ahead_kib"] = found
        task = bar.add_task("", total=len(models) * len(numbers))
        for model in models:
            name = f"{model.resolve().parent.name}-{model.name}"
            bar.update(task, description=name)
            result["requests"][name] = recording.describe(model)
            settings = Settings(
                model, Drafts(4, model, model), recording.context, _SPARE, (max(counts),), seed, True, dtype,
                disk_dir, timeout, QUIET_OPENMP,
            )  # fmt: skip
            asked = [asking(recording, model, count, run) for run, count in enumerate(numbers)]
            with ExitStack() as stack:
                everyone = [_engine(stack, case, settings, chunk, slots) for case in cases]
                everyone += _llamas(stack, everyone, settings, asked, kinds, threads, work)
                ask = [participant.ask for participant in everyone]
                answers = []
                for each in in_turns(ask, asked, seed):
                    answers.append(each)
                    bar.advance(task)
            result["rows"] += rows_of(name, everyone, numbers[1:], answers[1:])
            write_result(output, result)
    show("several agents", result["rows"], "model", "engine", "memory", "agents", *MEASURES, "as_stock")
    wide().print(f"wrote {output}", soft_wrap=True)


def asking(recording: Recording, model: Path, agents: int, run: int) -> dict:
    """Returns what a round asks, for a line of JSON."""
    turns = [[request.line for request in mine] for mine in recording.agents(model, agents, run)]
    return {"agents": turns, "first": recording.prefix_of(model, run)}


def rows_of(
    model: str, everyone: Sequence[Participant], numbers: Sequence[int], answers: Sequence[list[dict]]
) -> Iterator[dict[str, Any]]:
    """Yields the row of each engine and number of agents: medians over the rounds.

    Args:
        answers: of each round, with so many agents as ``numbers`` says, those of all engines.
    """
    stock = next((place for place, one in enumerate(everyone) if one.engine == STOCK), None)
    for place, participant in enumerate(everyone):
        for count in dict.fromkeys(numbers):
            mine = [each for number, each in zip(numbers, answers, strict=True) if number == count]
            found = [measures(each[place]["served"]) for each in mine]
            read = [each[place]["read_bytes"] / one["tokens"] for each, one in zip(mine, found, strict=True)]
            same = None
            if stock is not None and stock != place:
                same = statistics.mean(equal(each[place]["served"], each[stock]["served"]) for each in mine)
            yield {
                "model": model,
                "engine": participant.engine,
                "memory": participant.memory,
                "limit_bytes": participant.limit,
                "slots": participant.slots,
                "agents": count,
                **{name: statistics.median(each[name] for each in found) for name in found[0]},
                "bytes_per_token": statistics.median(read),
                "as_stock": same,
                "each_tokens_per_s": [each["tokens_per_s"] for each in found],
            }


def _engine(stack: ExitStack, case: Case, settings: Settings, chunk: int, slots: str) -> Participant:
    job = case.job(settings)
    job["options"] |= {"max_num_batched_tokens": chunk, "enable_prefix_caching": True, "skip_tokenizer_init": False}
    process = stack.enter_context(closing(LiveEngine(job, case.is_stock, settings.timeout)))
    return Participant(case.name, process, None if case.knobs is None else case.knobs["slots"])


def _llamas(
    stack: ExitStack,
    engines: Sequence[Participant],
    settings: Settings,
    asked: Sequence[dict],
    kinds: Sequence[str],
    threads: int,
    work: Path,
) -> Iterator[Participant]:
    """Yields a llama.cpp of each kind of memory; what it needs beside weights is measured in one without a limit."""
    if not kinds:
        return
    dtype = getattr(torch, settings.dtype)
    gguf = work / f"{settings.model.resolve().parent.name}-{settings.model.name}-{settings.dtype}.gguf"
    if not gguf.exists():
        gguf_model.convert(settings.model, gguf, dtype)
    plugin = next(each for each in engines if each.slots is not None)
    most = max(asked, key=lambda each: len(each["agents"]))
    slots = len(most["agents"])
    options = slots * (settings.prompt_tokens + settings.output_tokens), threads, dtype == torch.float32
    limits: dict[str, int] = {}
    if "weights" in kinds:
        with closing(Llama(gguf, *options, None, settings.timeout, slots=slots)) as mapped:
            mapped.ask(most)
            besides = process_memory.taken(mapped.pid)["anonymous"] + SLACK
        held = plugin.process.ask({"prompts": [most["first"]], "tokens": 2})["choices"]["slots"]
        limits["weights"] = besides + resident_bytes(read_checkpoint(settings.model), held, dtype)
    if "process" in kinds:
        plugin.ask(most)
        limits["process"] = process_memory.taken(plugin.process.pid)["total"]
    for kind in kinds:
        limit, file = None, gguf
        if kind in limits:
            limit = process_memory.MemoryLimit(f"agents-{kind}", limits[kind])
            file = Path(shutil.copyfile(gguf, gguf.with_suffix(f".{kind}.gguf")))
            stack.callback(file.unlink)
        process = stack.enter_context(
            closing(Llama(file, *options, limit, settings.timeout, repacks=kind == "all", slots=slots))
        )
        yield Participant(LLAMA, process, None, kind, limits.get(kind))


if __name__ == "__main__":
    app()
