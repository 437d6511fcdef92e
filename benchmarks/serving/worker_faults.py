"""Measures the seconds that are lost when an expert worker fails, beside undisturbed runs of the same engine.

One engine, in this process, with expert workers on this machine. In each turn it answers some prompts undisturbed, and
then again while one worker fails in the middle of the first one; prompts are repeated until all workers compute rows
again. [bold]Lost[/] are the seconds that this took beyond those of the undisturbed answers: waiting for the worker,
rows computed elsewhere, and, with two cores, what the worker's new process takes from the engine while it starts. The
longest step is what a user sees as a pause. All tokens must be those of the undisturbed turn.

Faults: [bold]kill[/] (SIGKILL; the worker is started again), [bold]stop[/] (SIGSTOP for 20 s: it is noticed, and
returns), [bold]late[/] (SIGSTOP for 2 s, longer than a call may take, so that its answer comes when nobody waits).
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import plan
import prompts
from common import RESULTS, exit_on_sigterm, is_toy, provenance, show, write_result
from run import PACKED, PackedFolder

from vllm_spac.methods.od_moe.places import MODULE

_ENVIRONMENT = {  # before vLLM is imported: the engine is in this process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
STOPPED = {"stop": 20.0, "late": 2.0}  # seconds between SIGSTOP and SIGCONT
FAULTS = ("kill", *STOPPED)
_BACK = 240.0  # seconds that a worker may take to return
_UNNOTICED = 10.0  # seconds after which a fault that no call was late for is over
_WARM = 2  # answers before anything is measured: deadlines follow what calls took
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/worker_faults.py .cache/toy/mid

python benchmarks/serving/worker_faults.py benchmarks/toy/models/target --turns 1 --faults late --output /tmp/a.json
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@dataclass
class Answers:
    """Answers to prompts: their tokens, and the seconds of each step and of each answer."""

    tokens: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


class Engine:
    """An engine with expert workers in this process.

    Args:
        model: folder.
        spac: knobs.
        options: arguments of ``vllm.LLM``.
    """

    def __init__(self, model: Path, spac: dict[str, Any], options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(model=str(model), additional_config={"spac": spac}, **options)
        self._asked = 0

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def answer(self, ids: Sequence[int], count: int, found: Answers, at: Callable[[int], None] | None = None) -> None:
        """Adds the answer to a prompt; ``at`` is called before each step with the number of tokens so far."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        engine, said = self._llm.llm_engine, list[int]()
        self._asked += 1
        begin = time.perf_counter()
        engine.add_request(str(self._asked), {"prompt_token_ids": list(ids)}, sampling)
        while engine.has_unfinished_requests():
            if at is not None:
                at(len(said))
            start = time.perf_counter()
            for output in engine.step():
                said = list(output.outputs[0].token_ids)
            found.steps.append(time.perf_counter() - start)
        found.seconds.append(time.perf_counter() - begin)
        found.tokens.append(said)

    def stats(self) -> dict[str, Any]:
        """Returns the statistics of the engine's worker process."""
        import vllm_spac

        return vllm_spac.stats(self._llm)["workers"][0]


def worker_pids() -> list[int]:
    """Returns the processes of the expert workers, the first started first."""
    children = [child for child in psutil.Process().children(recursive=True) if MODULE in child.cmdline()]
    return [child.pid for child in sorted(children, key=lambda child: child.create_time())]


def fail(fault: str, pid: int) -> None:
    """Lets a worker fail; one that is stopped goes on later."""
    if fault == "kill":
        os.kill(pid, signal.SIGKILL)
        return
    os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        with contextlib.suppress(ProcessLookupError):  # the engine had lost patience and killed it
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(STOPPED[fault], go_on)
    timer.daemon = True
    timer.start()


def lost(undisturbed: Answers, disturbed: Answers) -> float:
    """Returns the seconds of the disturbed answers beyond those of the undisturbed ones, which they repeat in order."""
    expected = [undisturbed.seconds[n % len(undisturbed.seconds)] for n in range(len(disturbed.seconds))]
    return sum(disturbed.seconds) - sum(expected)


def turn(engine: Engine, ids: Sequence[Sequence[int]], count: int, fault: str, pid: int) -> dict[str, Any]:
    """Answers the prompts undisturbed, then while a worker fails, until it computes again."""
    undisturbed, disturbed = Answers(), Answers()
    for prompt in ids:
        engine.answer(prompt, count, undisturbed)
    before = engine.stats()
    failed: list[float] = []

    def at(tokens: int) -> None:
        if tokens >= count // 2 and not failed:
            fail(fault, pid)
            failed.append(time.perf_counter())

    number, back, after = 0, None, None  # after: when a loss was counted
    while number < len(ids) or back is None:
        engine.answer(ids[number % len(ids)], count, disturbed, at)
        number += 1
        now, passed = engine.stats(), time.perf_counter() - failed[0]
        if after is None and _sum(now, "losses") > _sum(before, "losses"):
            after = now
        elif after is not None and back is None and _all_computed(after, now):
            back = passed
        if passed > (_BACK if after is not None else STOPPED.get(fault, _BACK) + _UNNOTICED):
            break
    expected = [undisturbed.tokens[n % len(ids)] for n in range(len(disturbed.tokens))]
    return {
        "lost_seconds": lost(undisturbed, disturbed),
        "longest_step_seconds": max(disturbed.steps),
        "noticed": after is not None,
        "back_within_seconds": back,
        "undisturbed_step_seconds": statistics.median(undisturbed.steps),
        "undisturbed_longest_step_seconds": max(undisturbed.steps),
        "answers": len(disturbed.tokens),
        "rows_elsewhere": now["worker_rows_elsewhere"] - before["worker_rows_elsewhere"],
        "tokens_equal": disturbed.tokens == expected,
    }


def _sum(stats: dict[str, Any], name: str) -> int:
    return sum(worker[name] for worker in stats["expert_workers"].values())


def _all_computed(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether every worker has computed rows since ``before``."""
    return all(
        worker["rows"] > before["expert_workers"][name]["rows"] for name, worker in now["expert_workers"].items()
    )


@contextlib.contextmanager
def started(model: Path, spac: dict[str, Any], options: dict[str, Any]) -> Iterator[Engine]:
    engine = Engine(model, spac, options)
    try:
        yield engine
    finally:
        engine.close()


@app.command(help=__doc__, epilog=_EPILOG)
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.", exists=True, file_okay=False)],
    faults: Annotated[str, typer.Option(help="Which faults, one after the other.")] = ",".join(FAULTS),
    workers: Annotated[int, typer.Option(min=1, help="Expert workers.")] = 2,
    replicas: Annotated[int, typer.Option(min=0, help="Further workers per layer; 0: the engine's own disk.")] = 0,
    slots: Annotated[str, typer.Option(help="Of each worker.")] = "50%",
    turns: Annotated[int, typer.Option(min=1, help="Of each fault.")] = 3,
    count: Annotated[int, typer.Option("--prompts", min=1, help="Prompts of a turn.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 32,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 64,
    disk_dir: PackedFolder = PACKED,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "worker_faults_toy.json",
) -> None:
    exit_on_sigterm()
    console = Console(width=max(100, Console().width))
    asked = plan.split(faults)
    if unknown := sorted(set(asked) - set(FAULTS)):
        console.print(f"[bold red]error:[/] --faults {escape(', '.join(unknown))}: use {', '.join(FAULTS)}")
        raise typer.Exit(2)
    os.environ.update(_ENVIRONMENT)
    origin = provenance()
    spac = {"executor": f"processes@replicas={replicas}", "workers": workers, "slots": slots}
    spac |= {"disk_dir": str(disk_dir), "tuned": "off"}
    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": prompt_tokens + output_tokens + 8,
        "max_num_seqs": 1,
        "enable_prefix_caching": False,
        "dtype": "float32",  # rows that the engine computes itself may be in waves of other sizes
        "disable_log_stats": False,
    }
    ids = prompts.load(model, count, prompt_tokens, seed)
    rows: list[dict[str, Any]] = []
    with started(model, spac, options) as engine:
        for _ in range(_WARM):
            for prompt in ids.ids:
                engine.answer(prompt, output_tokens, Answers())
        for fault in asked:
            for number in range(turns):
                with console.status(f"{fault}, turn {number + 1} of {turns}"):
                    pids = worker_pids()
                    rows.append({"fault": fault, **turn(engine, ids.ids, output_tokens, fault, pids[0])})
    result = {
        "label": "toy model" if is_toy(model) else None,
        "model": model.name,
        "knobs": {name: value for name, value in spac.items() if name not in ("disk_dir", "tuned")},
        "stopped_seconds": STOPPED,
        "prompts": ids.describe(),
        "output_tokens": output_tokens,
        "rows": rows,
        "provenance": origin,
    }
    write_result(output, result)
    of_fault = "lost_seconds", "longest_step_seconds", "back_within_seconds", "rows_elsewhere", "tokens_equal"
    show("seconds lost per fault of an expert worker", rows, "fault", *of_fault)
    console.print(f"wrote {output}", soft_wrap=True)
    if not all(row["tokens_equal"] and (row["back_within_seconds"] or not row["noticed"]) for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
