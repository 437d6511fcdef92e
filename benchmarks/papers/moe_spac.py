"""MoE-SpAc's figure 9, from recorded routing: what the utility scores before a step say about it.

9b: the rows of a verify step that select an expert, by the expert's score before the step. 9a: by threshold tau, the
share r_c of the step's selections whose expert scores below tau (for the CPU), and the share r_g of its distinct
experts that score at least tau (for the GPU). Steps that verify the drafts of one request only; each layer of a step is
one observation, and the estimator has the paper's knobs, K = 4 and the trace's gamma. arXiv:2603.09983, appendix C.1;
the paper's figure is of Qwen3 on MT-Bench.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.common import RESULTS, Script, write_result
from benchmarks.papers import spread
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.recording.trace_file import DRAFT, STEP_KINDS, Trace

UPPER = 4  # K
_VERIFY = STEP_KINDS.index("verify")
app = Script(__doc__)


@app.main
def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces or folders of them.", show_default="benchmarks/traces")
    ] = None,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_moe_spac.json",
) -> None:
    loaded = spread.load(traces)
    found = {name: scores(one.trace) for name, one in loaded.items() if mostly_verifies(one.trace)}
    if not found:
        raise typer.BadParameter("no trace has mainly steps that verify drafts of one request; record with speculation")
    result = spread.result(loaded, found) | {"upper": UPPER}
    write_result(output, spread.nan_to_none(result))


def verifying(trace: Trace) -> np.ndarray:
    """Returns bool [steps]: whether the step verifies drafts of one request and does nothing else."""
    step = np.repeat(np.arange(trace.steps), trace.step_rows.astype(np.int64))
    requests = np.bincount(step[trace.row_kind != DRAFT], minlength=trace.steps)
    return (trace.step_kind == _VERIFY) & (requests == 1)


def mostly_verifies(trace: Trace) -> bool:
    """Returns whether most steps that verify do so for one request: those at the end of a batch are no sample."""
    return 2 * int(verifying(trace).sum()) > int((trace.step_kind == _VERIFY).sum())


def scores(trace: Trace, upper: int = UPPER) -> dict[str, list[float]]:
    """Returns the curves of one trace.

    ``frequency`` and ``median``: rows that selected an expert of score 0 .. ``upper``, nan for a score that no expert
    had; ``experts``: share of the experts with that score. ``r_c`` and ``r_g``: for tau 1 .. ``upper``, means over
    layers and steps.
    """
    counted, layers = verifying(trace), trace.facts.layers
    gamma = int(trace.step_rows[counted].max(initial=1)) - 1
    estimator = UtilityEstimator(trace.facts.total, gamma=gamma, upper=upper)
    histogram = np.zeros((upper + 1, int(trace.step_rows.max(initial=0)) + 1), dtype=np.int64)
    thresholds = np.arange(1, upper + 1)[:, None, None]
    cpu, gpu = [], []
    for one, counts in zip(counted.tolist(), trace.step_counts(), strict=True):
        if counts is None:
            continue
        if one:
            known, ran = estimator.scores, counts >= 0
            np.add.at(histogram, (known[ran], counts[ran]), 1)
            by_layer, cold = counts.clip(0).reshape(layers, -1), known.reshape(layers, -1) < thresholds
            used = by_layer.sum(axis=1) > 0
            cpu.append(((by_layer * cold).sum(axis=2) / np.maximum(1, by_layer.sum(axis=1)))[:, used])
            active = by_layer > 0
            gpu.append(((active & ~cold).sum(axis=2) / np.maximum(1, active.sum(axis=1)))[:, used])
        estimator.observe_step(counts)
    experts = histogram.sum(axis=1)
    rows = np.arange(histogram.shape[1])
    with np.errstate(invalid="ignore"):
        mean = (histogram * rows).sum(axis=1) / experts
    median = [float(np.searchsorted(np.cumsum(row), row.sum() / 2)) if row.sum() else np.nan for row in histogram]
    return {
        "frequency": mean.tolist(),
        "median": median,
        "experts": (experts / experts.sum()).tolist(),
        "r_c": np.concatenate(cpu, axis=1).mean(axis=1).tolist(),
        "r_g": np.concatenate(gpu, axis=1).mean(axis=1).tolist(),
    }


if __name__ == "__main__":
    app()
