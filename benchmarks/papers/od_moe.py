"""OD-MoE's decoding speed of Mixtral, and what workers on other networks would do. Everything here is calculated.

The paper (OD-MoE, section 5): Mixtral-8x7B at batch size 1 on eight workers in four groups of two, 1 Gbit/s Ethernet:
3.69 tokens/s, 75.5 % of the 4.89 tokens/s of Hugging Face Transformers with all experts in memory. Assumed here: a
layer takes 1 / (32 x 4.89) s in all, of which 1.4 ms are experts; a hop takes 150 us and the time of the rows at 117
MB/s; an expert of 352 MB is loaded in 22 ms (16 GB/s); recall 97.34 % (an INT8 shadow). The load time is the free
parameter.

The second table: 1 to 16 workers, each with memory for a share of all experts, over four networks, with the sizes of
Qwen3-30B-A3B. A layer belongs to one worker. The routing is a trace's, or by default synthetic. With --layers, a trace
of fewer layers is stacked, as in replay/policies.py, and its prompts are left out.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))
from common import provenance, show, write_result
from policies import facts, stack

from vllm_spac.decisions.costs import Costs, Network
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.simulated_workers import LayerTimes, cached, cacheless
from vllm_spac.tools.traces.synthetic import synthetic_trace

PAPER, RESIDENT = 3.69, 4.89
MIXTRAL = {"layers": 32, "top_k": 2, "groups": 4, "fan": 2, "row_bytes": 4096 * 4}
RECALL = 0.9734
TIMES = LayerTimes(main=5.0e-3, compute=1.4e-3, load=22e-3)
NETWORKS = {  # latency one way with its software, bandwidth: assumed
    "1 Gbit/s": Network(latency=150e-6, bandwidth=0.117e9),
    "10 Gbit/s": Network(latency=45e-6, bandwidth=1.17e9),
    "25 Gbit/s": Network(latency=40e-6, bandwidth=2.9e9),
    "100 Gbit/s": Network(latency=5e-6, bandwidth=11.5e9),
}
WORKERS = (1, 2, 4, 8, 16)
SYNTHETIC: dict[str, Any] = {"layers": 48, "experts": 128, "top_k": 8, "steps": 100, "reuse": 0.5}
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__)
def main(
    trace: Annotated[
        Path | None, typer.Argument(help="Routing of one request without drafts.", show_default="synthetic")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Stack the trace to so many layers.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of steps of a stacked trace.")] = 250,
    share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Of all experts, what one worker's memory holds.")
    ] = 0.125,
    main_ms: Annotated[float, typer.Option(help="The main process's part of a layer.")] = 0.08,
    compute_ms: Annotated[float, typer.Option(help="A layer's experts for one row.")] = 0.08,
    load_ms: Annotated[float, typer.Option(help="Loading one expert.")] = 3.0,
    hidden: Annotated[int, typer.Option(help="Width of a row of 16 bits.")] = 2048,
    profile: Annotated[
        Path | None, typer.Option(help="Add the network of this file of vllm-spac profile --peer.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the numbers as JSON, too.")] = None,
) -> None:
    origin = provenance()
    measured = None if profile is None else Costs.read(profile).network
    if profile is not None and measured is None:
        raise typer.BadParameter(f"{profile} has no network; run vllm-spac profile --peer", param_hint="--profile")
    networks = NETWORKS | ({} if measured is None else {f"measured: {measured.peer}": measured})
    recorded = synthetic_trace(**SYNTHETIC) if trace is None else Trace.load(trace)
    loaded = recorded if layers is None else stack(recorded, layers, steps)
    times = LayerTimes(main_ms / 1e3, compute_ms / 1e3, load_ms / 1e3)
    result: dict[str, Any] = {
        "calculated": True,
        "mixtral": {
            "paper": PAPER,
            "tokens_per_second": round(mixtral(), 3),
            "assumed": MIXTRAL
            | {f"{name}_ms": 1e3 * seconds for name, seconds in asdict(TIMES).items()}
            | {"recall": RECALL, "resident_tokens_per_second": RESIDENT},
        },
        "workers": {
            name: {str(n): round(_speed(loaded, n, share, network, times, hidden), 2) for n in counts(loaded)}
            for name, network in networks.items()
        },
        "assumed": {"share": share, "main_ms": main_ms, "compute_ms": compute_ms, "load_ms": load_ms, "hidden": hidden},
        "networks": {name: {"latency": net.latency, "bandwidth": net.bandwidth} for name, net in networks.items()},
        "routing": {"layers": loaded.facts.layers, "experts": loaded.facts.experts, "steps": loaded.steps}
        | ({"synthetic": SYNTHETIC} if trace is None else {}),
        "traces": {} if trace is None else {trace.stem: facts(trace, recorded)},
        "provenance": origin,
    }
    if output is not None:
        write_result(output, result)
    print(f"Mixtral, calculated: {result['mixtral']['tokens_per_second']} tokens/s; the paper: {PAPER}")
    rows = ({"network": name, **speeds} for name, speeds in result["workers"].items())
    show("tokens/s by number of workers, calculated", rows, "network", *map(str, counts(loaded)))


def mixtral() -> float:
    """Returns tokens per second of the paper's set-up."""
    return cacheless(
        MIXTRAL["layers"],
        MIXTRAL["top_k"],
        MIXTRAL["groups"],
        NETWORKS["1 Gbit/s"],
        TIMES,
        MIXTRAL["row_bytes"],
        recall=RECALL,
        tokens=500,
        fan=MIXTRAL["fan"],
    ).per_second


def counts(trace: Trace) -> list[int]:
    """Returns the numbers of workers that the trace's layers can be divided among."""
    return [count for count in WORKERS if count <= trace.facts.layers]


def _speed(trace: Trace, count: int, share: float, network: Network, times: LayerTimes, hidden: int) -> float:
    return cached(trace, count, min(1.0, share * count), network, times, 2 * hidden).per_second


if __name__ == "__main__":
    app()
