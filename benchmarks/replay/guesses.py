"""Records what ``gate`` names of each layer before its router has run, beside a trace of recorded routing.

The model reads each prompt of the trace with the answer that it gave. Its routers' inputs in layer l give the guess for
layer l + 1. The result is a trace like the recorded one, which has guesses in place of choices, the likeliest first;
the first layer's, which nothing names, are its own choices. What its routers chose here is compared with the trace.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.common import TRACES, PlanError, Script, provenance, sha256, write_result
from benchmarks.serving import prompts
from benchmarks.toy.stored import pack
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors._trained import Sizes
from vllm_spac.decisions.predictors.base import Signal
from vllm_spac.decisions.predictors.gate import Gate
from vllm_spac.recording.trace_file import STEP_KINDS, Trace

LEAST = 0.98  # share of the trace's choices that must be found again, else the model is another one

app = Script(__doc__)


@app.main
def main(
    model: Annotated[Path, typer.Argument(help="Folder of the carved model.")] = Path(".cache/real/target"),
    trace: Annotated[Path, typer.Option(help="Recorded with one request at a time.")] = TRACES / "real/none1.trace",
    output: Annotated[Path, typer.Option(help="Trace with the guesses.")] = TRACES / "real/none1_gate.trace",
) -> None:
    origin, recorded = provenance(), Trace.load(trace)
    asked = prompts.load(model, _requests(recorded), int(recorded.step_rows.max()))
    samples, guesses = observed(model, asked.ids, _longest(recorded) - 1)
    made, agreed = guessed(recorded, samples, guesses, [len(ids) for ids in asked.ids])
    if agreed < LEAST:
        raise PlanError(f"{agreed:.1%} of the choices in {trace} are found again: it is of another model")
    made.save(output)
    pack(output)
    about = {"trace": sha256(trace), "guesses": sha256(output), "found_again": agreed, "recall": recall(recorded, made)}
    write_result(output.with_suffix(".json"), {"provenance": origin, "prompts": asked.describe()} | about)
    print(about)


def observed(model: Path, texts: list[list[int]], more: int) -> tuple[Samples, torch.Tensor]:
    """Returns the samples of all texts, each with ``more`` greedy tokens behind it, and int [layers, rows, top_k]."""
    from vllm_spac.decisions.predictors._trained import Gates
    from vllm_spac.storage.checkpoint import router_weights
    from vllm_spac.tools.evaluation import engine
    from vllm_spac.tools.evaluation.evaluated_model import EvaluatedModel

    length = max(map(len, texts)) + more + 1
    with engine.engine(str(model), {"slots": "100%"}, length, tokenizer=False) as llm:
        answers = engine.generate(llm, texts, more)
        evaluated = EvaluatedModel(llm)
        layers = evaluated.facts()["layers"]
        whole = [text + answer for text, answer in zip(texts, answers, strict=True)]
        samples = evaluated.collect(whole, 0, lambda rows: None).samples
    sizes = Sizes(samples.layers, samples.experts, samples.top_k, samples.hidden.shape[2], 1)
    gate = Gate(sizes, Gate.computed(sizes, Gates(*router_weights.read(model, layers))), {})
    guesses, every = samples.ids.clone(), slice(0, samples.rows)
    for layer in range(samples.layers - 1):
        scores = gate.of_next(samples.inputs(layer, every, frozenset({Signal.ROUTER_INPUT})))
        guesses[layer + 1] = scores.topk(samples.top_k).indices.int()
    return samples, guesses


def guessed(recorded: Trace, samples: Samples, guesses: torch.Tensor, prompted: list[int]) -> tuple[Trace, float]:
    """Returns ``recorded`` with guesses as ids, and the share of its choices that ``samples`` have.

    Args:
        guesses: int [layers, rows, top_k], of the rows of ``samples``.
        prompted: tokens of the prompt of each text.
    """
    ids, same, total, request, row = recorded.ids.copy(), 0, 0, -1, 0
    records = np.searchsorted(recorded.record_step, np.arange(recorded.steps + 1))
    chosen, named = samples.ids.numpy(), guesses.numpy()
    for step in range(recorded.steps):
        rows = int(recorded.step_rows[step])
        if STEP_KINDS[recorded.step_kind[step]] == "prefill":
            request += 1
            row = samples.starts[request % len(prompted)]
            assert rows == prompted[request % len(prompted)], "the trace has other prompts"
        for record in range(records[step], records[step + 1]):
            layer, there = int(recorded.record_layer[record]), recorded.record_start[record]
            here, place = slice(row, row + rows), slice(there, there + rows)
            both = np.sort(chosen[layer, here]) == np.sort(recorded.ids[place])
            same, total = same + int(both.sum()), total + both.size
            ids[place] = named[layer, here]
        row += rows
    return replace(recorded, ids=ids, weights=None), same / total


def recall(recorded: Trace, made: Trace) -> float:
    """Returns the share of choices that were named, in decode steps and layers after the first."""
    rows = recorded.counted() & (np.repeat(recorded.record_layer, np.diff(recorded.record_start)) > 0)
    return float((recorded.ids[rows][:, :, None] == made.ids[rows][:, None]).any(2).mean())


def _requests(recorded: Trace) -> int:
    """The number of different prompts: each was given twice, first for a few tokens of warm-up."""
    return int((recorded.step_kind == STEP_KINDS.index("prefill")).sum()) // 2


def _longest(recorded: Trace) -> int:
    """The most steps of a request."""
    begins = np.flatnonzero(recorded.step_kind == STEP_KINDS.index("prefill"))
    return int(np.diff(np.append(begins, recorded.steps)).max())


if __name__ == "__main__":
    app()
