"""Measures how long running requests wait for a token while long prompts arrive, with steps between chunks and without.

Two servers' engines take turns, with equal knobs; in one, prompts do not wait between their chunks
(``SPAC_WITHOUT_PATCH``). Each turn starts streams, and once they run two long prompts at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, ROOT, Script, provenance, show, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, PackedFolder
from benchmarks.serving.turns import in_turns
from vllm_spac.decisions.prompt_chunks import SHARE
from vllm_spac.integration.hooks import patches
from vllm_spac.tools.tuning.measurer import LiveProcess

_LONG = 2  # prompts that arrive together
_EPILOG = """[bold]Examples[/]

python benchmarks/serving/long_prompts.py .cache/toy/mid

python benchmarks/serving/long_prompts.py benchmarks/toy/models/target --turns 1 --output /tmp/long_prompts.json
"""
app = Script(__doc__, _EPILOG)


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the model.")] = ROOT / ".cache" / "toy" / "mid",
    slots: Annotated[str, typer.Option(help="Value of --spac-slots.")] = "25%",
    streams: Annotated[int, typer.Option(min=1, help="Requests that run when the long prompts arrive.")] = 4,
    long: Annotated[int, typer.Option(min=1, help="Tokens of a long prompt.")] = 900,
    chunk: Annotated[int, typer.Option(min=1, help="Value of --max-num-batched-tokens.")] = 128,
    turns: Annotated[int, typer.Option(min=1, help="Turns after the first, which counts for nothing.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the prompts and of who is first.")] = 0,
    disk_dir: PackedFolder = PACKED,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "long_prompts_toy.json",
) -> None:
    origin = provenance()
    every = prompts.load(model, (1 + turns) * _LONG, long, seed)
    short = prompts.load(model, streams, 16, seed).ids
    rounds = [{"streams": short, "long": every.ids[_LONG * at : _LONG * (at + 1)]} for at in range(1 + turns)]
    job = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": long + 16,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": streams + _LONG,
        "enable_prefix_caching": False,
        "additional_config": {"spac": {"slots": slots, "disk_dir": str(disk_dir)}},
    }
    with ExitStack() as stack:
        engines = [stack.enter_context(closing(_engine(job, paced))) for paced in (False, True)]
        answers = list(in_turns([engine.ask for engine in engines], rounds, seed))[1:]
    sides = {
        name: {key: median(answer[at][key] for answer in answers) for key in answers[0][at]}
        for at, name in enumerate(("stock's steps", "steps between chunks"))
    }
    payload: dict[str, Any] = {
        "label": "toy model",
        "slots": slots,
        "streams": streams,
        "long": _LONG,
        "long_tokens": long,
        "chunk": chunk,
        "share": SHARE,
        "prompts": every.describe(),
        "turns": answers,
        "rows": [{"side": name, **row} for name, row in sides.items()],
        "provenance": origin,
    }
    write_result(output, payload)
    show("medians of the turns", payload["rows"], "side", "longest_gap", "kept", "first_token", "alone")
    print(f"wrote {output}")


def _engine(job: dict, paced: bool) -> LiveProcess:
    def command(folder: Path) -> list[str]:
        (folder / "job.json").write_text(json.dumps(job))
        return [sys.executable, __file__, "--engine", str(folder / "job.json")]

    environment = {"VLLM_PLUGINS": "spac", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    return LiveProcess(command, 600, environment | ({} if paced else {patches.WITHOUT: patches.THROTTLE}))


async def serve(job: dict) -> None:
    """Answers each line of the input, ``{"streams": [[ids]], "long": [[ids]]}``, with what the streams waited."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what else is printed goes to the log
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job))
    print(json.dumps({}), file=answers)  # ready
    for turn, line in enumerate(iter(sys.stdin.readline, "")):
        print(json.dumps(await _turn(engine, turn, json.loads(line))), file=answers)
    engine.shutdown()


async def _turn(engine: Any, turn: int, asked: dict) -> dict[str, float]:
    """Returns seconds, and ``kept``: the streams' speed while long prompts are computed, over that before."""
    running = [_Request(engine, f"{turn} stream {at}", ids, 10_000) for at, ids in enumerate(asked["streams"])]
    while min(len(request.times) for request in running) < 24:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    long = [_Request(engine, f"{turn} long {at}", ids, 2) for at, ids in enumerate(asked["long"])]
    await asyncio.gather(*(request.task for request in long))
    ended = max(request.times[0] for request in long)
    for request in running:
        request.task.cancel()
    await asyncio.gather(*(request.task for request in running), return_exceptions=True)
    gaps = [gap for request in running for gap in request.gaps(began, ended)]
    before = [gap for request in running for gap in request.gaps(request.times[8], began)]
    return {
        "longest_gap": max(gaps),
        "kept": median(before) * len(gaps) / len(running) / (ended - began),
        "first_token": ended - began,
        "alone": median(before),
    }


class _Request:
    """A request of ``tokens`` tokens that runs; ``times``: when each came."""

    def __init__(self, engine: Any, name: str, ids: list[int], tokens: int) -> None:
        self.times: list[float] = []
        self.task = asyncio.create_task(self._run(engine, name, ids, tokens))

    async def _run(self, engine: Any, name: str, ids: list[int], tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        async for _ in engine.generate({"prompt_token_ids": ids}, sampling, name):
            self.times.append(time.monotonic())

    def gaps(self, began: float, ended: float) -> list[float]:
        """Seconds between tokens of which the later one came in that time."""
        return [
            after - before for before, after in zip(self.times, self.times[1:], strict=False) if began < after <= ended
        ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        asyncio.run(serve(json.loads(Path(sys.argv[2]).read_text())))
    else:
        app()
