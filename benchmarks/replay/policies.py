"""Compares eviction policies on recorded routing with Belady's ceiling, and measures predictors of the next step.

Policies that need a calibration get the counts of the other traces. Those of benchmarks/traces are of the same prompts
with other drafts and batches, which is the best that a calibration can be.
Counts hits and moves no bytes; an expert is counted once per layer and step, prompts included. Predictions are for
decode and verify only. A layer that needs more experts than there are slots runs in parts; Belady's rule is then
optimal in loads, not in hits.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.common import RESULTS, ROOT, Script, is_toy, provenance, sha256, show, trace_files, write_result
from benchmarks.replay.hot_experts import accuracy, agreement, as_last_step, nothing_is_hot
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.recording.trace_file import PREFILL, Trace, TraceFacts
from vllm_spac.tools.traces.simulation import simulate

POLICIES = (
    "lru",
    "layer_lru",
    "lfu",
    "utility",
    "reuse",
    "reuse@half_lives=(1,4,16)",
    "belady",
)
EXAMPLES = """[bold]Examples[/]

policies.py                                           [dim]# those in benchmarks/traces[/]

policies.py decode.trace --policy "lru reuse reuse@half_lives=(8,)" --shares "10 25" --output /tmp/half_lives.json
"""

app = Script(__doc__, EXAMPLES)


@app.main
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces, or folders of them.", exists=True, show_default="benchmarks/traces"),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies, optionally with knobs: name@knob=value.")] = " ".join(POLICIES),
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10 17 25 50",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_policies.json",
) -> None:
    traces = trace_files(traces)
    recorded = {path.stem: Trace.load(path) for path in traces}
    result: dict[str, Any] = {
        "provenance": provenance(),
        "toy_model": any(is_toy(ROOT / trace.facts.model) for trace in recorded.values()),
        "shares_percent": [float(share) for share in shares.split()],
        "traces": {path.stem: facts(path, recorded[path.stem]) for path in traces},
        "hit_rates": {},
        "prediction_accuracy": {name: accuracies(trace) for name, trace in recorded.items()},
    }
    cases = [(name, spec, share) for name in recorded for spec in policy.split() for share in result["shares_percent"]]
    costs = Costs.read("rtx4090")  # hits do not depend on it
    for name, spec, share in track(cases, "replaying", console=Console(stderr=True), transient=True):
        slots = math.ceil(share / 100 * recorded[name].facts.total)
        rate = simulate(recorded[name], slots, costs, policy=spec, expert_bytes=1).hit_rate
        result["hit_rates"].setdefault(name, {}).setdefault(spec, []).append(round(rate, 4))
    result["mean_hit_rates"] = {
        spec: [round(float(x), 4) for x in np.mean([result["hit_rates"][name][spec] for name in recorded], axis=0)]
        for spec in policy.split()
    }
    write_result(output, result)
    shown = [f"{share:g} %" for share in result["shares_percent"]]
    rates = result["mean_hit_rates"].items()
    rows = ({"policy": spec, **dict(zip(shown, values, strict=True))} for spec, values in rates)
    show("hit rates, mean of the traces", rows, "policy", *shown)
    predicted = result["prediction_accuracy"].items()
    rows = ({"trace": name, **{key: value["mean"] for key, value in found.items()}} for name, found in predicted)
    predictors = next(iter(result["prediction_accuracy"].values()))
    show("hot or cold in the next step, mean of layers", rows, "trace", *predictors)


def facts(path: Path, trace: Trace) -> dict:
    distinct = [int((counts > 0).sum()) for counts in trace.step_counts() if counts is not None]
    return {
        "sha256": sha256(path),
        "model": trace.facts.model,
        "layers": trace.facts.layers,
        "experts": trace.facts.experts,
        "top_k": trace.facts.top_k,
        "steps": trace.steps,
        "rows_a_step": round(float(trace.step_rows.mean()), 2),
        "drafts": int(np.count_nonzero(trace.row_kind == 3)),
        "distinct_experts_a_step": round(float(np.mean(distinct)), 1),
    }


def stack(trace: Trace, layers: int, steps: int) -> Trace:
    """Stacks up to ``steps`` steps without prompts and with the most frequent number of rows to ``layers`` layers."""
    known = trace.facts
    starts = trace.row_start[:-1]
    prompts = np.array(
        [(trace.row_kind[a : a + n] == PREFILL).any() for a, n in zip(starts, trace.step_rows, strict=True)]
    )
    rows = int(np.bincount(trace.step_rows[~prompts]).argmax())
    chosen = np.flatnonzero(~prompts & (trace.step_rows == rows))[:steps]
    records = np.searchsorted(trace.record_step, chosen)[:, None] + np.arange(known.layers)
    if layers % known.layers or (trace.record_layer[records] != np.arange(known.layers)).any():
        raise typer.BadParameter(f"{known.layers} layers, all of which run in each step, cannot be stacked to {layers}")
    ids = trace.ids[trace.record_start[records][:, :, None] + np.arange(rows)]  # [steps, layers, rows, top_k]
    times = layers // known.layers
    ids = np.concatenate([np.roll(ids, -(len(ids) * turn // times), axis=0) for turn in range(times)], axis=1)
    return Trace.of(
        TraceFacts(layers, known.experts, known.top_k, known.expert_bytes, known.model),
        step_kind=trace.step_kind[chosen],
        step_rows=trace.step_rows[chosen],
        step_tokens=trace.step_tokens[chosen],
        row_kind=trace.row_kind[starts[chosen][:, None] + np.arange(rows)].ravel(),
        record_step=np.repeat(np.arange(len(chosen), dtype=np.uint32), layers),
        record_layer=np.tile(np.arange(layers, dtype=np.uint16), len(chosen)),
        ids=ids.reshape(-1, known.top_k),
    )


def accuracies(trace: Trace) -> dict:
    """Returns predictor -> share of experts and steps predicted correctly, layer by layer.

    Scores count as hot from tau = 1, probabilities from 1/2. ``last step`` predicts that nothing changes, ``none``
    that no expert is selected: base rates that a predictor must beat.
    """
    found = {variant: accuracy(trace, variant=variant) for variant in ("paper", "literal", "released")}
    found["K=1"] = accuracy(trace, upper=1)
    policy = Reuse()

    def reuse(counts: np.ndarray) -> np.ndarray:
        policy.observe(counts)
        return policy.likely >= 0.5

    found |= {"reuse": agreement(trace, reuse), "last step": as_last_step(trace), "none": nothing_is_hot(trace)}
    return {
        name: {"mean": round(float(layers.mean()), 4), "layers": [round(x, 4) for x in layers.tolist()]}
        for name, layers in found.items()
    }


if __name__ == "__main__":
    app()
