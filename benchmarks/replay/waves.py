"""Counts the loads of prompts whose layers need more experts than there are slots, by how rows are split into waves.

[bold]in order[/]: a row joins the last wave unless the slots are too few. [bold]shared[/]: as in serving, rows are
chosen by the experts that they share (row_waves). The experts of the last wave are taken to be there still, and no
others. [bold]least[/]: each expert once, which no split into rows may reach.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, TRACES, provenance, sha256, write_result

from vllm_spac.execution.slot_layers import row_waves
from vllm_spac.recording.trace_file import Trace
from vllm_spac.tools.traces.replayed import rows_of_records

FEWEST_ROWS = 64  # of a record that is taken for a prompt's
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False)


def in_order(ids: np.ndarray, slots: int) -> list[set[int]]:
    """Returns the experts of each wave if a row joins the last wave where it fits; ids int [rows, top_k]."""
    found: list[set[int]] = []
    for experts in map(set, ids.tolist()):
        if found and len(found[-1] | experts) <= slots:
            found[-1] |= experts
        else:
            found.append(experts)
    return found


def shared(ids: np.ndarray, slots: int, experts: int) -> list[set[int]]:
    """Returns the experts of each wave of serving; arguments as of ``row_waves``."""
    return [set(ids[rows].ravel().tolist()) for rows in row_waves(ids, slots, experts)]


def loads(waves: list[set[int]]) -> int:
    """Returns how many experts are loaded if those of the last wave are there still."""
    return sum(len(wave - last) for last, wave in pairwise([set(), *waves]))


def prompts(trace: Trace) -> Iterator[np.ndarray]:
    """Yields the experts of the rows of each layer of a prompt, int64 [rows, top_k]."""
    return (ids.astype(np.int64) for ids in rows_of_records(trace) if len(ids) >= FEWEST_ROWS)


@app.command(help=__doc__)
def main(
    shares: Annotated[str, typer.Option(help="Slots, in percent of the experts of one layer.")] = "25 50 75",
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_waves.json",
) -> None:
    result: dict[str, Any] = {"provenance": provenance(), "traces": {}, "rows": []}
    for routing, folder in (("flat", TRACES), ("local", TRACES / "local")):
        for name in ("none1", "none8"):
            path = folder / f"{name}.trace"
            trace = Trace.load(path)
            result["traces"][str(path.relative_to(TRACES).with_suffix(""))] = {"sha256": sha256(path)}
            layers, experts = list(prompts(trace)), trace.facts.experts
            for share in map(float, shares.split()):
                slots = int(share / 100 * experts)
                before, after = (
                    [in_order(ids, slots) for ids in layers],
                    [shared(ids, slots, experts) for ids in layers],
                )
                row: dict[str, Any] = {
                    "routing": routing,
                    "trace": name,
                    "slots": slots,
                    "experts": experts,
                    "layers": len(layers),
                }
                row["prompt_rows"] = round(float(np.mean([len(ids) for ids in layers])), 1)
                row["in_order"] = round(sum(map(loads, before)) / len(layers), 2)
                row["shared"] = round(sum(map(loads, after)) / len(layers), 2)
                row["least"] = round(sum(len(np.unique(ids)) for ids in layers) / len(layers), 2)
                row["waves"] = [round(sum(map(len, each)) / len(layers), 2) for each in (before, after)]
                result["rows"].append(row)
    write_result(output, result)
    Console().print(result["rows"])


if __name__ == "__main__":
    app()
