"""Simulates ways to reach experts on recorded routing: slots, pointers, and flashlib's LRU on the device.

On a virtual clock with calculated profiles; nothing is measured. Traces of a model with few layers are stacked to the
layers of a model with experts of that size: the recorded layers are repeated, each time from another position of the
recording. Steps with prompts are left out, and so are steps with other than the most frequent number of rows. Loads of
slots and flashlib overlap with the computation of hits; slots' waiting for the host is not counted, in their favour.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from admission import AdmissionReplay
from common import RESULTS, ROOT, TRACES, is_toy, provenance, write_result
from policies import facts

from vllm_spac.decisions.costs import Costs
from vllm_spac.execution.moves import STEP_BYTES, most_moves
from vllm_spac.recording.trace_file import PREFILL, Trace, TraceFacts
from vllm_spac.tools.traces.replayed import Outcome, filling, parts
from vllm_spac.tools.traces.simulation import simulate

EXAMPLES = """[bold]Examples[/]

python benchmarks/replay/executions.py                                     [dim]# those in benchmarks/traces[/]

python benchmarks/replay/executions.py none1.trace --policy reuse,lru --moves 0,7,14 --output /tmp/executions.json
"""
SHOWN = ("none1.trace", "none8.trace", "eagle4_1.trace")
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of --spac-trace.", exists=True, dir_okay=False, show_default=", ".join(SHOWN)),
    ] = None,
    profile: Annotated[str, typer.Option(help="Profiles.")] = "rtx4090,h200",
    policy: Annotated[str, typer.Option(help="Policies of pointers.")] = "reuse,lru",
    slots_policy: Annotated[str, typer.Option(help="Policies of slots.")] = "reuse,lru",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10,25,50",
    moves: Annotated[str, typer.Option(help="Pointers: experts in flight at once.")] = "0,4,14,28",
    expert_bytes: Annotated[int, typer.Option(min=1, help="Of Qwen3-30B-A3B in bf16.")] = 9437184,
    layers: Annotated[int, typer.Option(min=1, help="Layers that traces are stacked to.")] = 48,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps per trace.")] = 250,
    output: Annotated[Path, typer.Option(help="JSON; the picture is written next to it.")] = RESULTS
    / "toy_executions.json",
) -> None:
    origin = provenance()
    traces = traces or [TRACES / name for name in SHOWN]
    recorded = {path.stem: Trace.load(path) for path in traces}
    stacked = {name: stack(trace, layers, steps) for name, trace in recorded.items()}
    costs = {name: Costs.read(name) for name in profile.split(",")}
    ways: list[dict[str, Any]] = [
        {"execution": "slots", "policy": name, "overlap": "hits"} for name in slots_policy.split(",")
    ]
    ways += [{"execution": "flashlib"}]
    ways += [{"execution": "pointers", "policy": name, "admission": "layer"} for name in policy.split(",")]
    ways += [
        {"execution": "pointers", "policy": name, "admission": "step", "step_bytes": int(most) * expert_bytes}
        for name in policy.split(",")
        for most in moves.split(",")
    ]
    cases = [
        (name, machine, float(share), way)
        for name in stacked
        for machine in costs
        for share in shares.split(",")
        for way in ways
    ]
    rows = [
        case(stacked[name], costs[machine], share, way, expert_bytes) | {"trace": name, "profile": machine}
        for name, machine, share, way in track(cases, "replaying", console=Console(stderr=True), transient=True)
    ]
    usual = most_moves(STEP_BYTES, expert_bytes)
    result = {
        "provenance": origin,
        "toy_model": any(is_toy(ROOT / trace.facts.model) for trace in recorded.values()),
        "calculated": {name: known.provenance.model_dump(mode="json") for name, known in costs.items()},
        "expert_bytes": expert_bytes,
        "default_moves": usual,
        "time_over_admission_in_the_layer": {
            name: ratios([r for r in rows if r["trace"] == name], usual) for name in stacked
        },
        "traces": {
            path.stem: facts(path, recorded[path.stem])
            | {"stacked_layers": layers, "steps_taken": stacked[path.stem].steps}
            for path in traces
        },
        "rows": rows,
    }
    write_result(output, result)
    draw(result, output.with_suffix(".png"))
    show(result)


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


def case(trace: Trace, costs: Costs, share: float, way: dict, nbytes: int) -> dict:
    """Simulates one way to reach experts on one trace."""
    slots = math.ceil(share / 100 * trace.facts.total)
    found = {"share_percent": share, "slots": slots, "execution": way["execution"]}
    if way["execution"] == "flashlib":
        replay = AdmissionReplay(trace, costs, nbytes, Outcome("lru", "none", slots, slots / trace.facts.total))
        replay.fill(filling(trace, slots))
        outcome = replay.run(parts(trace, trace.facts.total))
        found |= {"policy": "lru", "moves": None, "impossible": replay.impossible / trace.records}
        found |= {"admission_ms_a_step": 1e3 * replay.admission_seconds / trace.steps}
    else:
        outcome = simulate(trace, slots, costs, expert_bytes=nbytes, **way)
        found |= {"policy": way["policy"], "admission": way.get("admission")}
        found |= {"moves": way["step_bytes"] // nbytes if "step_bytes" in way else None}
    tokens = int(trace.step_tokens.sum())
    return found | {
        "hit_rate": round(outcome.hit_rate, 4),
        "moved_bytes_a_token": outcome.bytes // tokens,
        "streamed_bytes_a_token": outcome.streamed_bytes // tokens,
        "tpot_ms": _milliseconds(outcome.tpot),
        "bound_ms": _milliseconds(outcome.bound_tpot),
    }


def _milliseconds(seconds: float | None) -> float:
    assert seconds is not None, "these traces have the tokens of each step"
    return 1e3 * seconds


def ratios(rows: list[dict], moves: int) -> dict:
    """Returns way -> [least, most] time per token over that of in-layer admission, over sizes and machines.

    Args:
        rows: of one trace; only those with the first policy of pointers are used.
        moves: experts in flight at once with admission between steps.
    """
    times: dict[tuple, dict[str, float]] = {}
    admitting = [row["policy"] for row in rows if row.get("admission") == "layer"]
    for row in rows:
        way = row.get("admission") or row["execution"]
        if (row["policy"] == admitting[0] or way == "flashlib") and (way != "step" or row["moves"] == moves):
            times.setdefault((row["profile"], row["share_percent"]), {})[way] = row["tpot_ms"]
    found: dict[str, list[float]] = {}
    for here in times.values():
        for way, took in here.items():
            found.setdefault(way, []).append(took / here["layer"])
    return {way: [round(min(values), 3), round(max(values), 3)] for way, values in found.items() if way != "layer"}


def label(row: dict) -> str:
    moves = "" if row["moves"] is None else f" {row['moves']}"
    layer = ", in the layer" if row.get("admission") == "layer" else ""
    return f"{row['execution']} {row['policy']}{moves}{layer}"


def draw(result: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in result["rows"] if row["profile"] == next(iter(result["calculated"]))]
    traces, shares = ([*dict.fromkeys(row[key] for row in rows)] for key in ("trace", "share_percent"))
    figure, axes = pyplot.subplots(
        len(traces), len(shares), figsize=(4.2 * len(shares), 3 * len(traces)), layout="constrained", squeeze=False
    )
    for line, trace in zip(axes, traces, strict=True):
        for spot, share in zip(line, shares, strict=True):
            here = [row for row in rows if (row["trace"], row["share_percent"]) == (trace, share)]
            ahead = [row for row in here if row.get("admission") == "step"]
            for policy in dict.fromkeys(row["policy"] for row in ahead):
                mine = [row for row in ahead if row["policy"] == policy]
                spot.plot([r["moves"] for r in mine], [r["tpot_ms"] for r in mine], ".-", label=f"pointers {policy}")
            others = [row for row in here if row.get("admission") != "step"]
            styles = ["k--", "k:", "r--", *(f"C{number}--" for number in range(len(others)))]
            for row, style in zip(others, styles, strict=False):
                ends = [0, max(r["moves"] for r in ahead)]
                spot.plot(ends, [row["tpot_ms"]] * 2, style, label=label(row))
            spot.axvline(result["default_moves"], color="0.8", zorder=0)
            spot.set_xscale("symlog", base=2, linthresh=1)
            spot.set_xticks(ticks := sorted({row["moves"] for row in ahead}), map(str, ticks))
            spot.set_xlim(-0.3, 1.2 * max(ticks))
            spot.set(title=f"{trace}, {share:g} %", xlabel="experts in flight at once", ylabel="TPOT, ms")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right center")
    kind = "toy model's routing" if result["toy_model"] else "recorded routing"
    figure.suptitle(f"Simulated on {rows[0]['profile']} (calculated): {kind}, grey line: admission=step as it serves")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def show(result: dict) -> None:
    console = Console(width=150)
    console.print(
        "time per token relative to pointers with in-layer admission:", result["time_over_admission_in_the_layer"]
    )
    names = ("way", "hits", "moved MB/token", "streamed MB/token", "TPOT ms", "bound ms", "impossible")
    groups = dict.fromkeys((row["trace"], row["profile"], row["share_percent"]) for row in result["rows"])
    for group in groups:
        mine = [r for r in result["rows"] if (r["trace"], r["profile"], r["share_percent"]) == group]
        table = Table(*names, title="{}, {} (calculated), {:g} %".format(*group))
        for row in mine:
            table.add_row(
                label(row),
                f"{100 * row['hit_rate']:.1f}%",
                f"{row['moved_bytes_a_token'] / 1e6:.0f}",
                f"{row['streamed_bytes_a_token'] / 1e6:.0f}",
                f"{row['tpot_ms']:.2f}",
                f"{row['bound_ms']:.2f}",
                f"{100 * row['impossible']:.1f}%" if "impossible" in row else "",
            )
        console.print(table)


if __name__ == "__main__":
    app()
