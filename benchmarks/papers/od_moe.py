"""OD-MoE's speed of Mixtral with its hardware, and what workers on other networks would do. Everything is calculated.

The paper (OD-MoE, section 4): Mixtral-8x7B in FP32 at batch size 1, eight workers in four groups of two, 1 Gbit/s
Ethernet. A layer takes 1 / (32 x 4.89) s where all experts are in memory. An expert has 704.6 MB: 0.75 ms are needed
to read it from an RTX 3090's memory (936 GB/s; RTX 3080: 760), and 22 ms to load it at the 31.5 GB/s that PCIe 4.0 x16
has at most. A hop takes 150 us and the time of the rows at 117 MB/s. Keys and values of a token have 256 KB. Assumed: a
layer of the shadow takes half as long as one of the resident model, and the shadow begins no token before the model
(figure 4). Recall is the paper's where its text has it, or an INT8 shadow's of the carved model (``shadow.py``), over
the 256 tokens of figures 8 to 10.

The last table: 1 to 16 workers, each with memory for a share of all experts, over four networks, with the sizes of
Qwen3-30B-A3B. A layer belongs to one worker. The routing is a trace's, or by default synthetic. With --layers, a trace
of fewer layers is stacked, as in replay/policies.py, and its prompts are left out.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import RESULTS, Script, provenance, show, write_result
from benchmarks.papers.od_moe_clock import Cycle, ShadowTimes, cacheless, prefill
from benchmarks.papers.simulated_workers import LayerTimes, Network, cached
from benchmarks.replay.policies import facts, stack
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.synthetic import synthetic_trace

PAPER, RESIDENT = 3.69, 4.89
LAYERS, TOP_K, EXPERTS, WORKERS_OF_GROUP, GROUPS = 32, 2, 8, 2, 4
PARAMETERS, WEIGHT = 46.7e9, 4  # of Mixtral; bytes of each: 180 GB, 16 KB a row, 8 KB of keys and values a layer
EXPERT, ROW, KV = 3 * 4096 * 14336 * WEIGHT, 4096 * WEIGHT, LAYERS * 8 << 10
MEMORY, LINK = {"RTX 3090": 936e9, "RTX 3080": 760e9}, 31.5e9  # bytes per second
RECALLS = {"1, 1": 0.9734, "never, never": 0.45, "random": 0.25}  # sections 3.2 and 4.2
PERIODS = (1, 2, 4, 8, 16)
TABLE_2 = {  # (tokens of the prompt, of the answer): ms to the first, tokens/s of decoding, and in all
    (16, 64): (1349.78, 3.67, 3.41),
    (16, 256): (1340.89, 3.65, 3.54),
    (128, 64): (3150.87, 3.74, 3.09),
    (128, 256): (3135.85, 3.71, 3.44),
}
NETWORKS = {  # latency one way with its software, bandwidth: assumed
    "1 Gbit/s": Network(latency=150e-6, bandwidth=0.117e9),
    "10 Gbit/s": Network(latency=45e-6, bandwidth=1.17e9),
    "25 Gbit/s": Network(latency=40e-6, bandwidth=2.9e9),
    "100 Gbit/s": Network(latency=5e-6, bandwidth=11.5e9),
}
WORKERS = (1, 2, 4, 8, 16)
SYNTHETIC: dict[str, Any] = {"layers": 48, "experts": 128, "top_k": 8, "steps": 100, "reuse": 0.5}
app = Script(__doc__)


@app.main
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
    latency_us: Annotated[float, typer.Option(min=0, help="One way, of a further network.")] = 0.0,
    bandwidth: Annotated[
        float | None, typer.Option(min=0, help="Bytes per second of a further network.", show_default="none")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the numbers as JSON, too.")] = None,
) -> None:
    origin = provenance()
    networks = NETWORKS | ({} if bandwidth is None else {"as named": Network(latency_us / 1e6, bandwidth)})
    recorded = synthetic_trace(**SYNTHETIC) if trace is None else Trace.load(trace)
    loaded = recorded if layers is None else stack(recorded, layers, steps)
    times = LayerTimes(main_ms / 1e3, compute_ms / 1e3, load_ms / 1e3)
    result: dict[str, Any] = {
        "calculated": True,
        "mixtral": mixtral(),
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
    print(f"Mixtral, calculated: {result['mixtral']['tokens_per_second']:.2f} tokens/s; the paper: {PAPER}")
    for name in ("ablation", "periods", "rtx3080", "groups", "link"):
        show(name, result["mixtral"][name], *result["mixtral"][name][0])
    rows = ({"network": name, **speeds} for name, speeds in result["workers"].items())
    show("tokens/s by number of workers, calculated", rows, "network", *map(str, counts(loaded)))


def of_layer(gpu: str = "RTX 3090", link: float = LINK) -> LayerTimes:
    """Returns the paper's times of a layer, with workers of this kind."""
    main = 1 / (LAYERS * RESIDENT) - TOP_K * EXPERT / MEMORY["RTX 3090"]
    return LayerTimes(main, EXPERT / MEMORY[gpu], EXPERT / link)


SHADOW = 0.5 / (LAYERS * RESIDENT)  # seconds of one of its layers, assumed
ON_DEMAND = ShadowTimes(math.inf)


def speed(
    recall: float,
    shadow: ShadowTimes | None,
    times: LayerTimes | None = None,
    groups: int = GROUPS,
    fan: int = WORKERS_OF_GROUP,
) -> float:
    """Returns tokens per second of 256 tokens."""
    net, times = NETWORKS["1 Gbit/s"], times or of_layer()
    return cacheless(LAYERS, TOP_K, groups, net, times, ROW, recall, 256, fan, shadow=shadow).per_second


def aligned(tokens: int | None, kv: int | None, layer: float = SHADOW) -> ShadowTimes:
    return ShadowTimes.aligned(layer, NETWORKS["1 Gbit/s"], KV, tokens, kv)


def measured_recalls(tokens: int = 256) -> dict[str, float]:
    """Returns pair of periods -> recall of the carved model's INT8 shadow over the first tokens."""
    found = json.loads((RESULTS / "real_shadow.json").read_text())
    blocks = tokens // found["block"]
    return {pair: sum(of["by_token"][:blocks]) / blocks for pair, of in found["shadows"]["int8"].items()}


def mixtral() -> dict[str, Any]:
    """Returns the paper's figures 8 to 10 and table 2, and what they depend on."""
    ours, times, net = measured_recalls(), of_layer(), NETWORKS["1 Gbit/s"]
    cases = {"1, 1": (1, 1), "1, never": (1, None), "never, 1": (None, 1), "never, never": (None, None)}
    first = RECALLS["1, 1"]
    decoded = speed(first, aligned(1, 1))
    return {
        "paper": PAPER,
        "tokens_per_second": decoded,
        "ablation": [
            _case(case, ours[case], speed(ours[case], aligned(*pair)), *_with_paper(case, aligned(*pair)))
            for case, pair in cases.items()
        ]
        + [
            _case("random", None, None, *_with_paper("random", None)),
            _case("on demand", None, None, None, speed(1.0, ON_DEMAND)),
        ],
        "periods": [
            {"tokens": t, "kv": kv, "recall": ours[f"{t}, {kv}"], "speed": speed(ours[f"{t}, {kv}"], aligned(t, kv))}
            for t in PERIODS
            for kv in PERIODS
        ],
        "rtx3080": [
            {"kv": kv, "speed": speed(ours[f"1, {kv}"], aligned(1, kv), of_layer("RTX 3080"))} for kv in (*PERIODS, 32)
        ],
        "departure": [
            {
                "shadow_ms": 1e3 * layer,
                "speeds": {
                    name: speed(1.0, aligned(tokens, kv, layer))
                    for name, tokens, kv in (("none", None, None), ("tokens", 1, None), ("both", 1, 1))
                },
            }
            for layer in (SHADOW / 2, SHADOW, 1.5 * SHADOW, 2 * SHADOW, 2.5 * SHADOW)
        ],
        "groups": [
            {"groups": groups, "fan": fan, "speed": speed(first, aligned(1, 1), groups=groups, fan=fan)}
            for groups in (1, 2, 4, 8)
            for fan in (1, 2)
        ],
        "link": [
            {"gigabytes": link / 1e9, "speed": speed(first, aligned(1, 1), of_layer(link=link))}
            for link in (16e9, 25e9, LINK)
        ],
        "prompts": [
            {"rows": rows, "parts": parts, "groups": groups, "ms": 1e3 * _prompt(rows, parts, groups)}
            for rows in (16, 128)
            for groups in (1, GROUPS)
            for parts in (1, 4)
        ],
        "table_2": [
            {"prompt": rows, "answer": new, "paper": paper, "ttft_ms": 1e3 * ttft, "decode": decoded}
            | {"output": new / (ttft + (new - 1) / decoded)}
            for (rows, new), paper in TABLE_2.items()
            for ttft in [_prompt(rows, 4, 1)]
        ],
        "memory_gb": {
            "main": (PARAMETERS * WEIGHT - LAYERS * EXPERTS * EXPERT) / 1e9,
            "shadow": PARAMETERS / 1e9,
            "worker": EXPERT / 1e9,
            "resident": PARAMETERS * WEIGHT / 1e9,
        },
        "slack_ms": 1e3 * Cycle(times.main, times.compute + 2 * net.hop(ROW, 2), times.load).slack(GROUPS),
        "assumed": {f"{name}_ms": 1e3 * seconds for name, seconds in asdict(times).items()}
        | {"shadow_ms": 1e3 * SHADOW, "link": LINK, "resident_tokens_per_second": RESIDENT, "recall": first},
    }


def _with_paper(case: str, shadow: ShadowTimes | None) -> tuple[float | None, float | None]:
    """Returns the paper's recall, where its text has it, and tokens per second with that."""
    recall = RECALLS.get(case)
    return recall, None if recall is None else speed(recall, shadow)


def _case(case: str, *figures: float | None) -> dict[str, Any]:
    names = "recall", "speed", "paper_recall", "at_paper_recall"
    return {"case": case} | dict(zip(names, figures, strict=True))


def _prompt(rows: int, parts: int, groups: int) -> float:
    """Seconds to the first token."""
    workers, net = GROUPS * WORKERS_OF_GROUP, NETWORKS["1 Gbit/s"]
    return prefill(LAYERS, EXPERTS, rows, TOP_K, workers, net, of_layer(), ROW, parts, groups)


def counts(trace: Trace) -> list[int]:
    """Returns the numbers of workers that the trace's layers can be divided among."""
    return [count for count in WORKERS if count <= trace.facts.layers]


def _speed(trace: Trace, count: int, share: float, network: Network, times: LayerTimes, hidden: int) -> float:
    return cached(trace, count, min(1.0, share * count), network, times, 2 * hidden).per_second


if __name__ == "__main__":
    app()
