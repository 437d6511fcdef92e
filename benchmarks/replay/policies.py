"""Compares eviction policies on recorded routing with Belady's ceiling, and measures predictors of the next step.

Policies that need a calibration get the counts of the other traces. Those of benchmarks/traces are of the same prompts
with other drafts and batches, which is the best that a calibration can be.
Counts hits and moves no bytes; an expert is counted once per layer and step, prompts included. Predictions are for
decode and verify only. A layer that needs more experts than there are slots runs in parts; Belady's rule is then
optimal in loads, not in hits.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, ROOT, is_toy, provenance, sha256, trace_files, write_result

from vllm_spac import components
from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.trace_statistics import accuracy, agreement, as_last_step, nothing_is_hot

POLICIES = (
    "lru",
    "layer_lru",
    "lfu",
    "pinned",
    "utility",
    "utility@variant=literal",
    "utility@variant=released",
    "utility@upper=1",
    "utility@recycle=True",
    "reuse",
    "reuse@half_lives=(1,4,16)",
    "belady",
)
TIMED = ("lru", "layer_lru", "lfu", "utility", "reuse")
LAYERS, EXPERTS, SLOTS, SELECTED = 48, 128, 1500, 40  # where calls are timed: Qwen3-30B-A3B, experts of a verify step
TIMED_STEPS = 12
EXAMPLES = """[bold]Examples[/]

policies.py                                           [dim]# those in benchmarks/traces[/]

policies.py decode.trace eagle.trace --timed          [dim]# also time calls: on an idle machine[/]

policies.py decode.trace --policy "lru reuse reuse@half_lives=(8,)" --shares "10 25" --output /tmp/half_lives.json
"""

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Traces, or folders of them.", exists=True, show_default="benchmarks/traces"),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policies, optionally with knobs: name@knob=value.")] = " ".join(POLICIES),
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "5 10 17 25 35 50",
    timed: Annotated[bool, typer.Option("--timed", help="Also time the calls of policies.")] = False,
    output: Annotated[Path, typer.Option(help="JSON; the picture is written next to it.")] = RESULTS
    / "toy_policies.json",
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
    if timed:
        shape = {"layers": LAYERS, "experts": EXPERTS, "slots": SLOTS, "selected": SELECTED}
        result["microseconds_a_call"] = shape | {name: microseconds(name) for name in TIMED}
    cases = [(name, spec, share) for name in recorded for spec in policy.split() for share in result["shares_percent"]]
    costs = Costs.read("rtx4090")  # hits do not depend on it
    for name, spec, share in track(cases, "replaying", console=Console(stderr=True), transient=True):
        slots = math.ceil(share / 100 * recorded[name].facts.total)
        others = [path for path in traces if path.stem != name]
        rate = simulate(recorded[name], slots, costs, policy=held_out(spec, others), expert_bytes=1).hit_rate
        result["hit_rates"].setdefault(name, {}).setdefault(spec, []).append(round(rate, 4))
    result["mean_hit_rates"] = {
        spec: [round(float(x), 4) for x in np.mean([result["hit_rates"][name][spec] for name in recorded], axis=0)]
        for spec in policy.split()
    }
    write_result(output, result)
    draw(result, output.with_suffix(".png"))
    show(result)


def held_out(spec: str, others: Sequence[Path]) -> str:
    """Returns ``spec`` with the traces ``others`` if the policy needs a calibration and ``spec`` names none."""
    policy = components.find("policies", spec.partition("@")[0])
    if not policy.needs_calibration or "@trace=" in spec or "@calibration=" in spec:
        return spec
    if not others:
        raise ConfigError(f"policy {spec} is calibrated with the other traces, and there is one only; name more")
    return f"{spec}@trace={tuple(map(str, others))}"


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


def microseconds(name: str) -> dict:
    """Measures the median microseconds of the calls of a policy."""
    rng = np.random.default_rng(0)
    policy = components.build("policies", name)
    popularity = 1 / np.arange(1, EXPERTS + 1)
    times: dict[str, list[float]] = {"evict": [], "use": [], "observe": []}
    for key in rng.permutation(LAYERS * EXPERTS)[:SLOTS].tolist():
        policy.insert(key)
    for _ in range(TIMED_STEPS):
        counts = np.zeros(LAYERS * EXPERTS, dtype=np.int64)
        for layer in range(LAYERS):
            first = layer * EXPERTS
            keys = (first + rng.choice(EXPERTS, SELECTED, False, popularity / popularity.sum())).tolist()
            counts[keys] += 1
            policy.enter(range(first, first + EXPERTS))
            missing = [key for key in keys if key not in policy]
            times["evict"].append(_timed(partial(policy.evict, len(missing), set(keys))))
            times["use"].append(_timed(partial(_use, policy, keys)) / SELECTED)
        times["observe"].append(_timed(partial(policy.observe, counts)))
    return {call: round(1e6 * float(np.median(taken)), 2) for call, taken in times.items()}


def _use(policy, keys: list[int]) -> None:
    for key in keys:
        (policy.touch if key in policy else policy.insert)(key)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rates = result["hit_rates"]
    columns = min(3, len(rates))
    rows = -(-len(rates) // columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(5 * columns, 3.6 * rows), layout="constrained", squeeze=False
    )
    for spot, (name, policies) in zip(axes.flat, rates.items(), strict=False):
        for spec, values in policies.items():
            base = spec.partition("@")[0]
            width = 2.5 if spec in ("reuse", "layer_lru", "belady") else 1
            style = {"belady": "k--"}.get(spec, "-" if base == spec else ":")
            spot.plot(
                result["shares_percent"], [100 * v for v in values], style, label=spec, linewidth=width, marker="."
            )
        distinct = result["traces"][name]["distinct_experts_a_step"]
        spot.set(
            title=f"{name}: {distinct:.0f} experts per step", xlabel="experts in fast memory, %", ylabel="hit rate, %"
        )
        spot.set_ylim(0, 100)
    for spot in axes.flat[len(rates) :]:
        spot.set_axis_off()
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center")
    kind = "toy model, not representative of a real one" if result["toy_model"] else "recorded routing"
    figure.suptitle(f"Hit rate of eviction policies ({kind})")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def show(result: dict) -> None:
    console = Console(width=140)
    for name, policies in (result["hit_rates"] | {"mean of the traces": result["mean_hit_rates"]}).items():
        table = Table("policy", *(f"{share:g} %" for share in result["shares_percent"]), title=name)
        for spec, values in policies.items():
            table.add_row(spec, *(f"{100 * value:.1f}" for value in values))
        console.print(table)
    predictors = list(next(iter(result["prediction_accuracy"].values())))
    table = Table("trace", *predictors, title="hot or cold in the next step, mean of layers")
    for name, found in result["prediction_accuracy"].items():
        table.add_row(name, *(f"{found[predictor]['mean']:.3f}" for predictor in predictors))
    console.print(table)
    if "microseconds_a_call" in result:
        console.print(result["microseconds_a_call"])


if __name__ == "__main__":
    app()
