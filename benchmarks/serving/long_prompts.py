"""Measures how long running requests wait for a token while long prompts arrive, with steps between chunks and without.

Two engines take turns, with equal knobs; in one, prompts do not wait between their chunks
(``SPAC_WITHOUT_PATCH``). Each turn starts streams, and once they run two long prompts at once.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, ROOT, Script, provenance, show, write_result
from benchmarks.serving import prompts
from benchmarks.serving.cases import PACKED, PackedFolder
from benchmarks.serving.processes import LiveEngine
from benchmarks.serving.turns import in_turns
from vllm_spac.decisions.prompt_chunks import SHARE
from vllm_spac.integration.hooks import patches

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
    rounds = [
        {"beside": short, "long": every.ids[_LONG * at : _LONG * (at + 1)], "tokens": long} for at in range(1 + turns)
    ]
    options = {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": long + 16,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": streams + _LONG,
        "enable_prefix_caching": False,
    }
    spac = {"slots": slots, "disk_dir": str(disk_dir)}
    job = {"model": str(model), "spac": spac, "speculative": None, "options": options}
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


def _engine(job: dict, paced: bool) -> LiveEngine:
    environment = {"VLLM_PLUGINS": "spac"} | ({} if paced else {patches.WITHOUT: patches.THROTTLE})
    return LiveEngine(job | {"environment": environment}, False, 600)


if __name__ == "__main__":
    app()
