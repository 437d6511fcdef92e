"""MoE-SpAc's tables 2 and 4 and figures 5 and 6, simulated on recorded routing: milliseconds per token.

The serving code runs on a virtual clock (``vllm-spac simulate``) with the costs of a profile, for experts of
Qwen3-30B-A3B in bf16. What a step and a draft token take outside of experts is scaled to the layers of the recorded
model. Rows with drafts replay the traces of 8 drafts of a dense model, the others those without. Exact: no row changes
a token.

Reads ahead are limited as in serving (``extra`` of ``--spac-prefetch``), but for the row that says so.

Table 2: the systems' eviction and division of misses, not the systems: theirs also differ in kernels and formats.
Table 4: MoE-SpAc's recipe without one of its parts. Figure 5 (right): the recipe by K, the greatest score. Figure 6:
whether memory serves better as slots or for a drafter. The paper's speeds are of another model on a real RTX 4090
(arXiv:2603.09983).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaled"))
import spread
from common import RESULTS, show, write_result
from proportions import EXPERT_PARAMETERS, LAYERS

from vllm_spac.config.types import EXTRA
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.simulation import simulate

EXPERT_BYTES = 2 * EXPERT_PARAMETERS
PLAIN, DRAFTED = "none1", "draft8_1"  # names of traces begin with these


@dataclass(frozen=True)
class System:
    """Knobs of a row.

    Attributes:
        extra: limit of reads ahead; None: no limit, which serving does not have.
        drafts: whether it speculates, with a drafter in ``drafter`` % of the experts' memory.
    """

    policy: str
    balancer: str = "none"
    prefetch: str = "off"
    extra: float | None = EXTRA
    drafts: bool = False
    drafter: float = 0

    @property
    def reads(self) -> str:
        """Reads ahead with their limit."""
        limited = self.prefetch != "off" and self.extra is not None
        return f"{self.prefetch}@extra={self.extra}" if limited else self.prefetch


RECIPE = System("utility", "threshold", "utility", drafts=True)
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
    "without SpecUE (K = 1)": replace(
        RECIPE, policy="utility@upper=1", balancer="threshold@upper=1", prefetch="utility@upper=1"
    ),
    "without AdaBC (boundaries 3, 1)": replace(
        RECIPE, policy="utility@boundaries=(3,1)", prefetch="utility@boundaries=(3,1)"
    ),
    "without HetWB (threshold 2)": replace(RECIPE, balancer="threshold@fixed=2"),
    "without CPU experts": replace(RECIPE, balancer="none"),
    "without SG-Prefetcher": replace(RECIPE, prefetch="off"),
    "without the limit of reads ahead": replace(RECIPE, extra=None),
    "without SG-Evictor (lru)": replace(RECIPE, policy="lru"),
    "without drafts": replace(RECIPE, drafts=False),
}
UPPER = {
    f"K = {upper}": System(f"utility@upper={upper}", f"threshold@upper={upper}", f"utility@upper={upper}", drafts=True)
    for upper in (1, 2, 4, 8)
}
DRAFTER = 8.0  # percent: Qwen3-4B in FP8 over the experts of Qwen3-30B-A3B, appendix A.1
MEMORY = {
    "no drafts": System("reuse"),
    "drafter in 8 % of the memory": System("reuse", drafts=True, drafter=DRAFTER),
    "CPU experts, no drafts": System("reuse", "waterfill"),
    "CPU experts, drafter in 8 % of the memory": System("reuse", "waterfill", drafts=True, drafter=DRAFTER),
}
TABLES = {"table2": SYSTEMS, "table4": ABLATIONS, "figure5": UPPER, "figure6": MEMORY}
EXAMPLES = """[bold]Examples[/]

moe_spac_tables.py benchmarks/traces --output /tmp/flat.json

moe_spac_tables.py benchmarks/traces/local --shares 17,25 --machine h200
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


@app.command(help=__doc__, epilog=EXAMPLES)
def main(
    traces: Annotated[
        list[Path] | None, typer.Argument(help="Traces or folders of them.", show_default="benchmarks/traces")
    ] = None,
    machine: Annotated[str, typer.Option(help="Profile of the machine.")] = "rtx4090",
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10,17,25,50",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_tables.json",
) -> None:
    loaded = {name: one for name, one in spread.load(traces).items() if name.startswith((PLAIN, DRAFTED))}
    by_kind = {kind: [one.trace for name, one in loaded.items() if name.startswith(kind)] for kind in (PLAIN, DRAFTED)}
    if not all(by_kind.values()):
        raise typer.BadParameter(f"traces whose names begin with {PLAIN} and with {DRAFTED} are needed: record.py")
    costs = scaled(Costs.read(machine), by_kind[PLAIN][0].facts.layers)
    asked = [float(share) for share in shares.split(",")]
    rows = [(table, name, share) for table, systems in TABLES.items() for name in systems for share in asked]
    found: dict[str, Any] = {table: {} for table in TABLES}
    for table, name, share in track(rows, "simulating", console=Console(stderr=True), transient=True):
        system = TABLES[table][name]
        of_kind = by_kind[DRAFTED if system.drafts else PLAIN]
        found[table].setdefault(name, []).append(measured(of_kind, system, costs, share))
    result = spread.known(loaded) | {
        "how": "simulated",
        "profile": costs.model_dump(mode="json"),
        "expert_bytes": EXPERT_BYTES,
        "shares_percent": asked,
        **found,
    }
    write_result(output, spread.nan_to_none(result))
    for table in TABLES:
        lines = [
            {"system": name, **{f"{share:g} %": cell["tpot_ms"] for share, cell in zip(asked, cells, strict=True)}}
            for name, cells in result[table].items()
        ]
        show(f"{table}, simulated: ms per token, by share in slots", lines, *lines[0])


def scaled(costs: Costs, layers: int) -> Costs:
    """Returns ``costs`` of a model with ``layers`` layers whose other parts are in proportion."""
    part = layers / LAYERS
    return costs.model_copy(update={"other": costs.other * part, "draft": costs.draft * part})


def measured(traces: Sequence[Trace], system: System, costs: Costs, share: float) -> dict[str, Any]:
    """Returns the figures of one row at one share of slots: the median over ``traces``, and the range of TPOT."""
    runs = [
        simulate(
            trace,
            max(trace.facts.top_k, math.ceil((share - system.drafter) / 100 * trace.facts.total)),
            costs,
            policy=system.policy,
            balancer=system.balancer,
            prefetch=system.reads,
            expert_bytes=EXPERT_BYTES,
        )
        for trace in traces
    ]
    tpot = [float("nan") if run.tpot is None else 1e3 * run.tpot for run in runs]
    asked = [run.hits + run.misses + run.cpu for run in runs]
    return {
        "tpot_ms": round(statistics.median(tpot), 4),
        "tpot_ms_range": [round(min(tpot), 4), round(max(tpot), 4)],
        "hit_rate": round(statistics.median(run.hit_rate for run in runs), 4),
        "cpu_share": round(statistics.median(run.cpu / all for run, all in zip(runs, asked, strict=True)), 4),
        "loads_per_step": round(statistics.median(run.loads / run.steps for run in runs), 2),
        "prefetch_hits_per_step": round(statistics.median(run.prefetch_hits / run.steps for run in runs), 3),
    }


if __name__ == "__main__":
    app()
