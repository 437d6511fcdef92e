"""MoE-SpAc's tables 2 to 4 and figures 5 and 6, simulated on recorded routing: milliseconds per token.

The serving code runs on a virtual clock (``vllm-spac trace simulate``) with the costs of a profile, for experts of
Qwen3-30B-A3B in bf16. What a step and a draft token take outside of experts is scaled to the layers of the recorded
model. Rows with drafts replay the traces of 8 drafts of a dense model, the others those without. Exact: no row changes
a token. Reads ahead are limited as in serving (``extra`` of ``--spac-prefetch``).

Table 2: the systems' eviction and division of misses, not the systems: theirs also differ in kernels and formats.
Table 3: the shape of DeepSeek-V2-Lite, cut out of a recorded model that is no smaller: its first 26 layers, of each
choice the first 6, and experts of 17.3 MB. Table 4: MoE-SpAc's recipe without one of its parts, and our variants of it.
Figure 5: the recipe by generated tokens (middle), and by K, the greatest score (right). Figure 6: whether memory serves
better as slots or for a drafter. The paper's speeds are of other models on a real RTX 4090 (arXiv:2603.09983).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.common import RESULTS, Script, show, write_result
from benchmarks.papers import recorded
from benchmarks.scaled.proportions import EXPERT_PARAMETERS, LAYERS
from vllm_spac.config.presets import PRESETS
from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import STEP_KINDS, Trace
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.trace_statistics import draft_depths

EXPERT_BYTES = 2 * EXPERT_PARAMETERS
PLAIN, DRAFTED = "none1", "draft8_1"  # names of traces begin with these


@dataclass(frozen=True)
class System:
    """Knobs of a row."""

    policy: str
    balancer: str = "none"
    prefetch: str = "off"
    drafts: bool = False  # whether it speculates, with a drafter in ``drafter`` % of the experts' memory
    drafter: float = 0
    tokens: int | None = None  # about so many tokens at the start of the traces are served; None: all


def recipe(estimator: str = "", balancer: str = "") -> System:
    """Returns the knobs of the preset ``moe-spac``, with further arguments of its estimator and of its balancer."""
    knobs = PRESETS["moe-spac"].knobs
    prefetch = f"{knobs['prefetch']}@extra={EXTRA}{estimator}"
    return System(knobs["policy"] + estimator, knobs["cpu_experts"] + balancer, prefetch, drafts=True)


RECIPE = recipe()
SYSTEMS = {
    "layer_lru (Mixtral-Offloading)": System("layer_lru"),
    "lfu": System("lfu"),
    "reuse": System("reuse"),
    "layer_lru, drafts": System("layer_lru", drafts=True),
    "lfu, drafts": System("lfu", drafts=True),
    "reuse, drafts": System("reuse", drafts=True),
    "MoE-SpAc": RECIPE,
    "reuse, CPU experts": System("reuse", "waterfill"),
    "reuse, CPU experts, drafts": System("reuse", "waterfill", drafts=True),
}
ABLATIONS = {
    "MoE-SpAc": RECIPE,
    "without SpecUE (K = 1)": recipe("@upper=1", "@upper=1"),
    "without AdaBC (boundaries 3, 1)": recipe("@boundaries=(3,1)"),
    "without HetWB (threshold 2)": recipe(balancer="@fixed=2"),
    "without CPU experts": replace(RECIPE, balancer="none"),
    "without SG-Prefetcher": replace(RECIPE, prefetch="off"),
    "without SG-Evictor (lru)": replace(RECIPE, policy="lru"),
    "without drafts": replace(RECIPE, drafts=False),
    "used experts keep their scores": replace(RECIPE, policy="utility"),
    "hot misses are loaded on demand": recipe(balancer="@misses=load"),
    "evicts by reuse": replace(RECIPE, policy="reuse"),
}
UPPER = {f"K = {upper}": recipe(f"@upper={upper}", f"@upper={upper}") for upper in (1, 2, 4, 8)}
LENGTHS = {
    f"{name}, {'all' if tokens is None else tokens} tokens": replace(SYSTEMS[name], tokens=tokens)
    for name in ("MoE-SpAc", "reuse, CPU experts, drafts")
    for tokens in (128, 256, 512, None)
}
DRAFTER = 8.0  # percent: Qwen3-4B in FP8 over the experts of Qwen3-30B-A3B, appendix A.1
MEMORY = {
    "no drafts": System("reuse"),
    "drafter in 8 % of the memory": System("reuse", drafts=True, drafter=DRAFTER),
    "CPU experts, no drafts": System("reuse", "waterfill"),
    "CPU experts, drafter in 8 % of the memory": System("reuse", "waterfill", drafts=True, drafter=DRAFTER),
}
TABLES = {
    "table2": SYSTEMS,
    "table3": SYSTEMS,
    "table4": ABLATIONS,
    "figure5_length": LENGTHS,
    "figure5": UPPER,
    "figure6": MEMORY,
}
DEEPSEEK = (26, 6, 2 * 3 * 2048 * 1408)  # DeepSeek-V2-Lite: MoE layers, experts per token, bytes of an expert in bf16
EXAMPLES = """[bold]Examples[/]

moe_spac_tables.py benchmarks/traces --output /tmp/flat.json

moe_spac_tables.py benchmarks/traces/real --shares 17,25 --machine h200
"""
app = Script(__doc__, EXAMPLES)


@app.main
def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces or folders of them.", show_default="benchmarks/traces")
    ] = None,
    machine: Annotated[str, typer.Option(help="Profile of the machine.")] = "rtx4090",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10,17,25",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_tables.json",
) -> None:
    loaded = {name: one for name, one in recorded.load(traces).items() if name.startswith((PLAIN, DRAFTED))}
    by_kind = {kind: [one.trace for name, one in loaded.items() if name.startswith(kind)] for kind in (PLAIN, DRAFTED)}
    if not all(by_kind.values()):
        raise typer.BadParameter(f"traces whose names begin with {PLAIN} and with {DRAFTED} are needed: record.py")
    known, facts = recorded.known(loaded), by_kind[PLAIN][0].facts
    asked = [float(share) for share in shares.split(",")]
    tables = {name: systems for name, systems in TABLES.items() if name != "table3" or facts.layers >= DEEPSEEK[0]}
    rows = [(table, name, share) for table, systems in tables.items() for name in systems for share in asked]
    found: dict[str, Any] = {table: {} for table in tables}
    for table, name, share in track(rows, "simulating", console=Console(stderr=True), transient=True):
        system, (layers, top_k, nbytes) = tables[table][name], (facts.layers, facts.top_k, EXPERT_BYTES)
        if table == "table3":
            layers, top_k, nbytes = DEEPSEEK
        of_kind = [cut(each, layers, top_k, system.tokens) for each in by_kind[DRAFTED if system.drafts else PLAIN]]
        cell = measured(of_kind, system, scaled(Costs.read(machine), layers), share, nbytes)
        found[table].setdefault(name, []).append(cell)
    result = known | {
        "how": "simulated",
        "profile": scaled(Costs.read(machine), facts.layers).model_dump(mode="json"),
        "expert_bytes": EXPERT_BYTES,
        "table3_shape": dict(zip(("layers", "top_k", "expert_bytes"), DEEPSEEK, strict=True)),
        "shares_percent": asked,
        **found,
    }
    write_result(output, recorded.nan_to_none(result))
    for table in tables:
        lines = [
            {"system": name, **{f"{share:g} %": cell["tpot_ms"] for share, cell in zip(asked, cells, strict=True)}}
            for name, cells in result[table].items()
        ]
        show(f"{table}, simulated: ms per token, by share in slots", lines, *lines[0])


def scaled(costs: Costs, layers: int) -> Costs:
    """Returns ``costs`` of a model with ``layers`` layers whose other parts are in proportion."""
    part = layers / LAYERS
    return costs.model_copy(update={"other": costs.other * part, "draft": costs.draft * part})


def cut(trace: Trace, layers: int, top_k: int, tokens: int | None) -> Trace:
    """Returns the first ``layers`` of a trace and the first ``top_k`` of its choices, as far as ``tokens`` are served.

    The experts of a row come in the order of their scores.
    """
    facts = trace.facts
    served = np.cumsum(trace.step_tokens)
    steps = trace.steps if tokens is None else min(trace.steps, int(np.searchsorted(served, tokens)) + 1)
    if (layers, top_k, steps) == (facts.layers, facts.top_k, trace.steps):
        return trace
    kept = (trace.record_layer < layers) & (trace.record_step < steps)
    rows = slice(0, int(trace.row_start[steps]))
    of_rows = {"row_back": trace.row_back, "row_accepted": trace.row_accepted}
    return Trace.of(
        replace(facts, layers=layers, top_k=top_k),
        step_kind=trace.step_kind[:steps],
        step_rows=trace.step_rows[:steps],
        step_tokens=trace.step_tokens[:steps],
        row_kind=trace.row_kind[rows],
        **{name: column[rows] for name, column in of_rows.items() if column is not None},
        record_step=trace.record_step[kept],
        record_layer=trace.record_layer[kept],
        ids=trace.ids[np.repeat(kept, np.diff(trace.record_start)), :top_k],
    )


def outside(trace: Trace, costs: Costs) -> float:
    """Returns the seconds per token that steps take outside of experts, and for drafts, as ``Outcome.tpot`` counts."""
    depths, generating = draft_depths(trace), trace.step_kind != STEP_KINDS.index("prefill")
    deepest = np.maximum.reduceat(depths, trace.row_start[:-1])[generating]
    return float((costs.other + deepest * costs.draft).sum() / trace.step_tokens[generating].sum())


def measured(
    traces: Sequence[Trace], system: System, costs: Costs, share: float, nbytes: int = EXPERT_BYTES
) -> dict[str, Any]:
    """Returns the figures of one row at one share of slots: the median over ``traces``, and the range of TPOT."""
    runs = [
        simulate(
            trace,
            max(trace.facts.top_k, math.ceil((share - system.drafter) / 100 * trace.facts.total)),
            costs,
            policy=system.policy,
            balancer=system.balancer,
            prefetch=system.prefetch,
            expert_bytes=nbytes,
        )
        for trace in traces
    ]
    tpot = [float("nan") if run.tpot is None else 1e3 * run.tpot for run in runs]
    asked = [run.hits + run.misses + run.cpu for run in runs]
    return {
        "tpot_ms": round(statistics.median(tpot), 4),
        "outside_ms": round(statistics.median(1e3 * outside(trace, costs) for trace in traces), 4),
        "tpot_ms_range": [round(min(tpot), 4), round(max(tpot), 4)],
        "hit_rate": round(statistics.median(run.hit_rate for run in runs), 4),
        "cpu_share": round(statistics.median(run.cpu / all for run, all in zip(runs, asked, strict=True)), 4),
        "loads_per_step": round(statistics.median(run.loads / run.steps for run in runs), 2),
        "prefetches_per_step": round(statistics.median(run.prefetches / run.steps for run in runs), 3),
        "prefetch_hits_per_step": round(statistics.median(run.prefetch_hits / run.steps for run in runs), 3),
    }


if __name__ == "__main__":
    app()
