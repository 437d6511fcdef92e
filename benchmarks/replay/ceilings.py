"""Calculates what a better overlap of loads could gain at most, before anybody writes it. Nothing is measured.

The serving code on a virtual clock, with recorded routing that is stacked to the layers of a model with experts of that
size, see policies.py. Time per token with loads on demand, over that with

- rows first: rows whose experts all have slots run while a layer loads, then the others; an expert that both need is
  computed twice. Exact, and not served.
- hits first: all experts with slots run while a layer loads. It would change bits; no rows can overlap more.
- one layer ahead: reads ahead by a predictor that names the experts of the next layer, right in a given share, with the
  limit that serving has (extra of --spac-prefetch).
- the whole step ahead: by one that knows what all routers of the step will choose.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from common import RESULTS, ROOT, TRACES, is_toy, provenance, sha256, show, write_result
from policies import stack

from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.simulation import simulate

EXAMPLES = """[bold]Examples[/]

python benchmarks/replay/ceilings.py                                          [dim]# those in benchmarks/traces[/]

python benchmarks/replay/ceilings.py run.trace --profile here.json --shares 25 --output /tmp/ceilings.json
"""
SHOWN = tuple(f"{folder}{name}.trace" for folder in ("", "local/") for name in ("none1", "none8", "eagle4_8"))
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    traces: Annotated[
        list[Path] | None,
        typer.Argument(help="Files of --spac-trace.", exists=True, dir_okay=False, show_default=", ".join(SHOWN)),
    ] = None,
    profile: Annotated[str, typer.Option(help="Profiles.")] = "rtx4090,h200",
    policy: Annotated[str, typer.Option(help="Of all.")] = "reuse",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "25,50",
    recall: Annotated[float, typer.Option(min=0, max=1, help="Of the predictor of the next layer.")] = 0.8,
    expert_bytes: Annotated[int, typer.Option(min=1, help="Of Qwen3-30B-A3B in bf16.")] = 9437184,
    layers: Annotated[int, typer.Option(min=1, help="Layers that traces are stacked to.")] = 48,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps per trace.")] = 100,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_ceilings.json",
) -> None:
    origin = provenance()
    files = traces or [TRACES / name for name in SHOWN]
    recorded = {
        str((path.relative_to(TRACES) if path.is_relative_to(TRACES) else path).with_suffix("")): path for path in files
    }
    stacked = {name: stack(Trace.load(path), layers, steps) for name, path in recorded.items()}
    costs = {name: Costs.read(name) for name in profile.split(",")}
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "rows": {"overlap": "rows"},
        "hits": {"overlap": "hits"},
        "layer": {"prefetch": f"oracle@reach=1@recall={recall}@extra={EXTRA}"},
        "step": {"prefetch": "oracle"},
    }
    cases = [(name, machine, float(share)) for name in stacked for machine in costs for share in shares.split(",")]
    rows: list[dict[str, Any]] = []
    for name, machine, share in track(cases, "replaying", console=Console(stderr=True), transient=True):
        trace, slots = stacked[name], math.ceil(share / 100 * stacked[name].facts.total)
        found = {
            way: simulate(trace, slots, costs[machine], policy=policy, expert_bytes=expert_bytes, **knobs)
            for way, knobs in ways.items()
        }
        seconds = {way: outcome.seconds for way, outcome in found.items()}
        rows.append(
            {
                "trace": name,
                "profile": machine,
                "share_percent": share,
                "rows_a_step": int(trace.step_rows[0]),
                "hit_rate": round(found["none"].hit_rate, 4),
                "ms_a_step": 1e3 * seconds["none"] / trace.steps,
                "gain": {way: seconds["none"] / seconds[way] for way in ways if way != "none"},
                "bytes": {way: outcome.bytes / found["none"].bytes for way, outcome in found.items()},
            }
        )
    result = {
        "provenance": origin,
        "toy_model": any(is_toy(ROOT / trace.facts.model) for trace in stacked.values()),
        "calculated": {name: known.provenance.model_dump(mode="json") for name, known in costs.items()},
        "policy": policy,
        "recall": recall,
        "expert_bytes": expert_bytes,
        "layers": layers,
        "traces": {name: {"sha256": sha256(path), "steps": stacked[name].steps} for name, path in recorded.items()},
        "rows": rows,
    }
    write_result(output, result)
    gains = [f"gain.{way}" for way in rows[0]["gain"]]
    columns = "trace", "profile", "share_percent", "hit_rate", "ms_a_step"
    show(f"calculated: times the tokens/s of loads on demand ({policy})", rows, *columns, *gains)
    Console().print(f"wrote {output}", soft_wrap=True)


if __name__ == "__main__":
    app()
