"""Compares the plugin with llama.cpp on a CPU: the same weights, each prompt to both in turns, at equal memory.

For each size of the slots, llama.cpp maps the GGUF file in up to three processes: [bold]all[/], with as much memory as
it wants; [bold]weights[/], where as many bytes of weights fit as the plugin has in RAM; [bold]process[/], with as much
memory as the plugin's process takes in all, vLLM, torch and KV cache included. A control group limits the last two; it
counts the pages of the mapped file. Each has its own copy of the file, since pages that another process has read cost
nothing. Read-ahead decides how fast mapped files are, and large values ruin random reads: --read-ahead-kib 128, a
common default, sets it for the run. Limits and read-ahead need root.

Both sides have weights of --dtype. With bfloat16, llama.cpp rounds what it multiplies with them to bfloat16, and keys
and values to float16, so that it may choose other experts than vLLM; with float32 it rounds neither. With --four-bits
experts are INT4 by 32 in the plugin, which computes them by its own kernel, and the same codes in Q4_0.

Needs: pip install "vllm-spac[peers]" (llama.cpp in the wheel xllamacpp)
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import RESULTS, ROOT, PlanError, Script, is_toy, progress, provenance, show, wide, write_result
from benchmarks.peers import gguf_model, int4, process_memory
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, Case, Drafts, PackedFolder, Settings, split
from benchmarks.serving.processes import LiveEngine, LiveProcess
from benchmarks.serving.turns import in_turns, ratio_of
from vllm_spac.storage.checkpoint.headers import Checkpoint, read_checkpoint
from vllm_spac.storage.checkpoint.quantisation import FormatKernels

LLAMA = Path(__file__).with_name("llama.py")
KINDS = ("all", "weights", "process")
QUIET_OPENMP = {"OMP_WAIT_POLICY": "passive"}  # threads that spin would take the cores of the other side
SLACK = 8 << 20  # bytes of a control group that its kernel structures take
_EPILOG = """[bold]Examples[/]

python benchmarks/peers/beside_llama.py .cache/toy/mid --slots 25%

python benchmarks/peers/beside_llama.py .cache/real/target --dtype float32 --read-ahead-kib 128

python benchmarks/peers/beside_llama.py MODEL --slots 10%,25%,50%,100% --read-ahead-kib 128
"""
app = Script(__doc__, _EPILOG)


class Dtype(StrEnum):
    """The type of the weights of both sides."""

    bfloat16 = "bfloat16"
    float32 = "float32"

    @property
    def element(self) -> torch.dtype:
        return getattr(torch, self.value)


@dataclass
class Measured:
    """One participant: what it took for each turn, and its memory at the end.

    Attributes:
        seconds, tpot, ttft: per turn. ``tokens``: what it said. ``hits``, ``misses``: the plugin's, of all turns.
    """

    name: str
    limit: int | None = None  # bytes that it may take; None: as many as it wants
    seconds: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    used: dict[str, float] = field(default_factory=dict)  # CPU seconds and bytes read from disks, of all turns
    memory: dict[str, int] = field(default_factory=dict)  # bytes, see ``process_memory.taken``

    def add(self, answer: dict) -> None:
        self.seconds.append(answer["seconds"])
        self.tpot.append(answer["tpot"][0])
        self.ttft.append(answer["ttft"][0])
        self.tokens.append(answer["tokens"][0])
        counters = answer.get("counters", {})
        self.hits, self.misses = self.hits + counters.get("hits", 0), self.misses + counters.get("misses", 0)


class Llama(LiveProcess):
    """llama.cpp with a file of its own, in a control group if its memory is limited; ``slots``: requests at once."""

    def __init__(
        self,
        file: Path,
        context: int,
        threads: int,
        exact: bool,
        limit: process_memory.MemoryLimit | None,
        timeout: float,
        repacks: bool = False,
        slots: int = 1,
    ):
        job = {"model": str(file), "context": context, "threads": threads, "mapped": True, "exact": exact}
        job |= {"slots": slots, "repacks": repacks}  # a copy in a layout of its own takes as much memory as all weights
        self._limit = limit

        def command(folder: Path) -> list[str]:
            (folder / "job.json").write_text(json.dumps(job))
            return [sys.executable, str(LLAMA), str(folder / "job.json")]

        process_memory.forget_file(file)
        super().__init__(command, timeout, QUIET_OPENMP, limit.join if limit else None)

    def turn(self, prompt: list[int], tokens: int) -> dict:
        return self.ask({"prompt": prompt, "tokens": tokens})

    def close(self) -> None:
        super().close()
        if self._limit is not None:
            self._limit.close()


@app.main
def main(
    model: Annotated[
        Path, typer.Argument(help="Folder of a Qwen3-MoE or DeepSeek (v1) in bf16.", exists=True, file_okay=False)
    ],
    slots: Annotated[str, typer.Option(help="Values of --spac-slots, one comparison each.")] = "25%",
    turns: Annotated[int, typer.Option(min=2, help="Turns that count, each with a prompt of its own.")] = 20,
    warm: Annotated[int, typer.Option(min=1, help="Turns before them.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per turn.")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="Threads of llama.cpp.")] = 2,
    read_ahead_kib: Annotated[int | None, typer.Option(min=0, help="Of the disk; default: as it is.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of both sides.")] = Dtype.bfloat16,
    four_bits: Annotated[bool, typer.Option("--four-bits", help="Experts of 4 bits; the others as --dtype.")] = False,
    disk_dir: PackedFolder = PACKED,
    work: Annotated[Path, typer.Option(help="Folder of the GGUF files.", show_default=".cache/peers")] = ROOT
    / ".cache"
    / "peers",
    eager: Annotated[bool, typer.Option("--eager/--compile", help="enforce_eager of vLLM.")] = True,
    seed: Annotated[int, typer.Option(help="Of the prompts and of the order of a turn.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds that a start or a turn may take.")] = 1800.0,
    output: Annotated[Path, typer.Option(help="JSON; a picture beside it.", show_default=False)] = RESULTS
    / "peers_toy.json",
) -> None:
    work.mkdir(parents=True, exist_ok=True)
    served, name, side = model, f"{model.resolve().parent.name}-{model.name}-{dtype}", "spac"
    if four_bits:
        served, name, side = work / f"{name}-int4", f"{name}-int4", "spac plane=table"
        if not (served / "config.json").exists():
            int4.write(model, served)
    settings = Settings(
        served, Drafts(4, model, model), prompt_tokens, output_tokens, seed=seed, eager=eager, dtype=dtype.value,
        disk_dir=disk_dir, timeout=timeout, environment=QUIET_OPENMP,
    )  # fmt: skip
    cases = {size: Case.parse(side, size) for size in split(slots)}
    checkpoint, gguf = read_checkpoint(served, FormatKernels.OURS if four_bits else None), work / f"{name}.gguf"
    if not gguf.exists():
        gguf_model.convert(model, gguf, dtype.element, four_bits=four_bits)
    try:
        asked = prompts.load(model, warm + turns, prompt_tokens, seed)
    except PlanError as error:
        raise PlanError(f"--prompt-tokens {prompt_tokens}: {error}") from error
    result: dict[str, Any] = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "prompts": asked.describe(),
        "output_tokens": output_tokens,
        "warm_turns": warm,
        "threads": threads,
        "dtype": dtype,
        "four_bits": four_bits,
        "enforce_eager": eager,
        "seed": seed,
        "gguf_bytes": gguf.stat().st_size,
        "rows": [],
        "provenance": provenance(),
    }
    with (
        process_memory.read_ahead(work, read_ahead_kib) as found,
        progress() as bar,
    ):
        result["read_ahead_kib"] = found
        task = bar.add_task("", total=len(cases) * (warm + turns))
        for size, case in cases.items():
            bar.update(task, description=size)
            compared = Comparison(
                case.job(settings) | {"kernels_without_amx": four_bits}, settings, checkpoint, gguf, threads
            )
            for _ in compared.run(asked.ids, warm):
                bar.advance(task)
            result |= {"llama": compared.llama}
            result["rows"].append(compared.row(size, seed))
            write_result(output, result)
    rows = [row | {"peer": peer} for row in result["rows"] for peer in row["peers"]]
    ours = "plugin.tokens_per_second", "plugin.cpu_seconds_per_token", "plugin.read_bytes_per_token"
    theirs = [f"peer.{name}" for name in ("tokens_per_second", "cpu_seconds_per_token", "read_bytes_per_token")]
    ratios = "peer.ratio", "peer.interval", "peer.equal_answers"
    show("spac over llama.cpp, decoding", rows, "slots", "peer.name", "peer.limit_bytes", *ratios, *ours, *theirs)
    wide().print(f"wrote {output}", soft_wrap=True)


class Comparison:
    """One size of the slots: an engine of the plugin and llama.cpp's processes, which take turns."""

    def __init__(self, job: dict, settings: Settings, checkpoint: Checkpoint, gguf: Path, threads: int) -> None:
        self._job, self._settings, self._checkpoint, self._gguf = job, settings, checkpoint, gguf
        self._threads = threads
        self.plugin = Measured("spac")
        self.peers: list[Measured] = []
        self.llama: dict = {}
        self.choices: dict = {}

    def run(self, ids: list[list[int]], warm: int) -> Iterator[None]:
        """Runs all turns; yields after each."""
        with ExitStack() as stack:
            engine = stack.enter_context(closing(LiveEngine(self._job, False, self._settings.timeout)))
            first = engine.turn(ids[0], self._settings.output_tokens)
            self.choices = first["choices"]
            taken = process_memory.taken(engine.pid)["total"]
            peers = self._start_peers(stack, ids[0], taken)
            everyone: list[tuple[Measured, LiveEngine | Llama]] = [(self.plugin, engine)]
            everyone += zip(self.peers, peers, strict=True)
            before: list[dict] = []

            def prompts_and_start() -> Iterator[list[int]]:
                for number, prompt in enumerate(ids):
                    if number == warm:
                        before[:] = [process_memory.used(process.pid) for _, process in everyone]
                    yield prompt

            def asking(process: LiveEngine | Llama) -> Callable[[list[int]], dict]:
                return lambda prompt: process.turn(prompt, self._settings.output_tokens)

            ask = [asking(process) for _, process in everyone]
            for number, answers in enumerate(in_turns(ask, prompts_and_start(), self._settings.seed)):
                for (measured, _), answer in zip(everyone, answers, strict=True):
                    if number >= warm:
                        measured.add(answer)
                yield
            for (measured, process), start in zip(everyone, before, strict=True):
                measured.used = {name: value - start[name] for name, value in process_memory.used(process.pid).items()}
                measured.memory = process_memory.taken(process.pid)

    def row(self, slots: str, seed: int) -> dict:
        """Returns what was measured, and the plugin's speed over llama.cpp's per turn."""
        return {
            "slots": slots,
            "weights_bytes": self._weights(),
            "hit_rate": self.plugin.hits / max(1, self.plugin.hits + self.plugin.misses),
            "plugin": summary(self.plugin),
            "peers": [summary(peer) | compared(self.plugin, peer, seed) for peer in self.peers],
        }

    def _weights(self) -> int:
        return resident_bytes(self._checkpoint, self.choices["slots"], Dtype(self._settings.dtype).element)

    def _start_peers(self, stack: ExitStack, prompt: list[int], taken: int) -> list[Llama]:
        """Starts llama.cpp once per kind of limit. Its needs beside weights are measured in a process without one."""
        context = self._settings.prompt_tokens + self._settings.output_tokens + 8
        options = context, self._threads, self._settings.dtype == Dtype.float32
        with closing(Llama(self._gguf, *options, None, self._settings.timeout)) as mapped:
            mapped.turn(prompt, self._settings.output_tokens)
            besides = process_memory.taken(mapped.pid)["anonymous"] + SLACK
        free = Llama(self._gguf, *options, None, self._settings.timeout, repacks=True)
        stack.enter_context(closing(free))
        free.turn(prompt, self._settings.output_tokens)
        self.llama = free.ready
        limits = {"weights": besides + self._weights(), "process": taken}
        found = []
        for kind in KINDS:
            self.peers.append(Measured(kind, limits.get(kind)))
            if kind == "all":
                found.append(free)
                continue
            limit = process_memory.MemoryLimit(kind, limits[kind])
            file = Path(shutil.copyfile(self._gguf, self._gguf.with_suffix(f".{kind}.gguf")))
            stack.callback(file.unlink)
            found.append(stack.enter_context(closing(Llama(file, *options, limit, self._settings.timeout))))
        return found


def resident_bytes(checkpoint: Checkpoint, slots: int, dtype: torch.dtype) -> int:
    """Returns the bytes of weights that the plugin has in RAM with so many slots, as ``dtype``."""
    experts = sum(checkpoint.layer_bytes.values())
    resident = checkpoint.other_bytes + round(experts * slots / checkpoint.total)
    return resident * dtype.itemsize // torch.bfloat16.itemsize


def summary(measured: Measured) -> dict:
    """Returns the medians of a participant, and its totals per token."""
    tokens = sum(map(len, measured.tokens))
    return {
        "name": measured.name,
        "limit_bytes": measured.limit,
        "memory": measured.memory,
        "tokens_per_second": 1 / statistics.median(measured.tpot),
        "ttft": statistics.median(measured.ttft),
        "cpu_seconds_per_token": measured.used["cpu_seconds"] / tokens,
        "read_bytes_per_token": measured.used["read_bytes"] / tokens,
        "turns": {name: asdict(measured)[name] for name in ("seconds", "tpot", "ttft")},
    }


def compared(plugin: Measured, peer: Measured, seed: int) -> dict:
    """Returns how much faster the plugin decodes, per turn, and how far both said the same tokens."""
    ratios = [theirs / ours for ours, theirs in zip(plugin.tpot, peer.tpot, strict=True)]
    pairs = list(zip(plugin.tokens, peer.tokens, strict=True))
    return {
        **ratio_of(ratios, seed),
        "equal_answers": sum(ours == theirs for ours, theirs in pairs),
        "equal_first_tokens": statistics.median(_agreed(ours, theirs) for ours, theirs in pairs),
    }


def _agreed(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


if __name__ == "__main__":
    app()
