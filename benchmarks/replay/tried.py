"""Replays two changes of ``reuse`` that were tried and not adopted: per-layer minima, and the last run's placement.

[bold]Minima[/]: no layer loses an expert to another one while it has fewer than a part of its equal share of the slots.
[bold]Placement[/]: slots are filled with the experts that another trace of the same model left in them, in place of the
lowest experts of each layer.
"""

from __future__ import annotations

import sys
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, TRACES, provenance, sha256, write_result

from vllm_spac.decisions.costs import Costs
from vllm_spac.decisions.policies.reuse import Reuse
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import Outcome, filling, rows_of_records
from vllm_spac.tools.traces.simulated_components import build_prefetch
from vllm_spac.tools.traces.simulated_slots import SlotsReplay

MINIMA = (0.25, 0.5, 0.75)
NAMES = ("none1", "none8", "eagle4_1")
_COSTS = Costs.read("rtx4090")  # hits do not depend on it
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


class _Protected:
    """The pinned keys, and those of other layers that have no more than ``least`` of them resident."""

    def __init__(self, pinned: Container[int], per_layer: np.ndarray, experts: int, least: int, layer: int) -> None:
        self._pinned, self._poor, self._experts, self._layer = pinned, per_layer <= least, experts, layer

    def __contains__(self, key: Any) -> bool:
        layer = key // self._experts
        return key in self._pinned or (layer != self._layer and bool(self._poor[layer]))


class Minima(Reuse):
    """``Reuse`` with a minimum of resident experts per layer, as long as others can be evicted.

    Args:
        least: experts of a layer that the others leave to it.
        experts: experts of a layer.
    """

    def __init__(self, *, least: int, experts: int) -> None:
        super().__init__()
        self._least, self._experts = least, experts

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims: list[int] = []
        for _ in range(count):
            held = np.bincount(np.flatnonzero(self._held) // self._experts, minlength=len(self._held))
            kept = _Protected(pinned, held, self._experts, self._least, self._layer.start // self._experts)
            try:
                victims += super().evict(1, kept)
            except LookupError:
                victims += super().evict(1, pinned)
        return victims


class Placed(Reuse):
    """``Reuse`` whose slots begin with the experts ``kept``, of an earlier run."""

    def __init__(self, *, kept: tuple[int, ...] = ()) -> None:
        super().__init__()
        self._kept = kept

    def first(self) -> list[int]:
        return list(self._kept)


def replay(trace: Trace, slots: int, policy: Reuse) -> Outcome:
    """Replays ``trace`` with ``policy``, without drafts' guard, prefetch or CPU experts."""
    outcome = Outcome("reuse", "none", slots, slots / trace.facts.total)
    run = SlotsReplay(trace, _COSTS, 1, outcome, policy, None, build_prefetch("off", trace), "none", None)
    run.fill(filling(trace, slots, policy.first()))
    return run.run(rows_of_records(trace))


@app.command(help=__doc__)
def main(
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts.")] = "10 25 50",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_tried.json",
) -> None:
    folders = {"flat": TRACES, "local": TRACES / "local"}
    result: dict[str, Any] = {"provenance": provenance(), "shares_percent": [float(x) for x in shares.split()]}
    paths = [folder / f"{name}.trace" for folder in folders.values() for name in NAMES]
    names = [str(path.relative_to(TRACES).with_suffix("")) for path in paths]
    result["traces"] = {name: {"sha256": sha256(path)} for name, path in zip(names, paths, strict=True)}
    result["minima"], result["placement"] = [], []
    cases = [(routing, share) for routing in folders for share in result["shares_percent"]]
    for routing, share in track(cases, "replaying", console=Console(stderr=True), transient=True):
        recorded = {name: Trace.load(folders[routing] / f"{name}.trace") for name in NAMES}
        for name, trace in recorded.items():
            slots = int(share / 100 * trace.facts.total)
            equal = slots / trace.facts.layers
            rates = [
                replay(trace, slots, Minima(least=int(part * equal), experts=trace.facts.experts)).hit_rate
                for part in (0, *MINIMA)
            ]
            gained = [round(100 * (rate - rates[0]), 3) for rate in rates[1:]]
            result["minima"].append({"routing": routing, "trace": name, "share": share, "points": gained})
        earlier, later = recorded["none8"], recorded["none1"]
        slots, before = int(share / 100 * later.facts.total), Placed()
        replay(earlier, slots, before)
        kept = tuple(key for key in range(later.facts.total) if key in before)
        loads = [replay(later, slots, Placed(kept=first)).loads for first in ((), kept)]
        row = {"routing": routing, "share": share, "slots": slots, "loads": loads[0], "saved": loads[0] - loads[1]}
        result["placement"].append(row)
    write_result(output, result)
    Console().print(result["minima"], result["placement"])


if __name__ == "__main__":
    app()
