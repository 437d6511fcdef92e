"""Hits where the device decides which experts have slots, beside those where the host does, on recorded routing.

Only steps without prompts count: a prompt selects nearly every expert. No time is simulated. ``--times`` compares the
calculated tokens/s of ``one_pool.json`` with those that it had in an earlier commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import print

from benchmarks.common import RESULTS, Script, provenance, sha256, write_result
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import STEP_KINDS, Trace
from vllm_spac.tools.traces.replayed import Outcome, Replay, filling, parts, rows_of_records
from vllm_spac.tools.traces.simulated_pointers import PointersReplay
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy, build_prefetch

SHARES = (0.1, 0.25, 0.5)  # of the experts, in slots
TRACES = {1: "benchmarks/traces/real/none1.trace", 8: "benchmarks/traces/real/none8.trace"}  # by batch size
COLUMNS = ("host", "device_before", "device")
PROMPTS = {STEP_KINDS.index("prefill"), STEP_KINDS.index("mixed")}

app = Script(__doc__)


@app.main
def main(
    policy: Annotated[str, typer.Option(help="Policy, with its arguments.")] = "reuse",
    before: Annotated[bool, typer.Option(help="Write what this code's device plane has as that before.")] = False,
    times: Annotated[str, typer.Option(help="Commit: write tokens/s over those of its one_pool.json, no hits.")] = "",
    output: Annotated[Path, typer.Option(help="JSON; what is not made again is kept.")] = RESULTS / "device_plane.json",
) -> None:
    known = json.loads(output.read_text()) if output.exists() else {}
    if times:
        write_result(output, known | {"rows": list(over(times)), "times": provenance() | {"before": times}})
        return
    made, result = provenance(), known | {"traces": {}}
    earlier = {(row["slots"], row["batch"]): row for row in known.get("hits", ())}
    rows = []
    for batch, name in TRACES.items():
        trace = Trace.load(Path(name))
        result["traces"][Path(name).stem] = {"file": name, "sha256": sha256(Path(name)), "model": trace.facts.model}
        for share in SHARES:
            slots = int(trace.facts.total * share)
            row: dict[str, Any] = {"slots": share, "batch": batch} | dict.fromkeys(COLUMNS)
            row |= earlier.get((share, batch), {})
            for column in ("device_before",) if before else ("host", "device"):
                row[column] = round(hit_rate(trace, slots, policy, on_host=column == "host"), 4)
            rows.append(row)
            print(row)
    result["hits"] = rows
    result["before" if before else "provenance"] = made
    result.setdefault("provenance", made)
    write_result(output, result)


def over(commit: str) -> Iterator[dict[str, Any]]:
    """Yields the calculated tokens/s of models over pointers, and their ratio to those of ``commit``."""
    where, command = "benchmarks/results/one_pool.json", ["git", "show"]
    then = json.loads(subprocess.run([*command, f"{commit}:{where}"], check=True, capture_output=True).stdout)["rows"]
    earlier = {(row["model"], row["memory_gib"]): row["tokens_per_s"] for row in then}
    for row in json.loads((RESULTS / "one_pool.json").read_text(encoding="utf-8"))["rows"]:
        if row["plane"] == "pointers":
            before = earlier[row["model"], row["memory_gib"]]
            yield {
                "machine": f"{row['machine']}, {row['memory_gib']} GiB",
                "model": row["model"],
                "format": row["format"],
                "slots": row["slots"],
                "part": "policy on the device, hits computed while misses arrive",
                "tokens_per_s": row["tokens_per_s"],
                "over_before": row["tokens_per_s"] / before,
            }


def hit_rate(trace: Trace, slots: int, policy: str, *, on_host: bool) -> float:
    """Returns the share of experts of steps without prompts that had a slot when their layer ran."""
    costs, nbytes = Costs.read("h200"), trace.facts.expert_bytes
    chosen = build_policy(policy, trace, slots)
    outcome = Outcome(policy, "none", slots, slots / trace.facts.total)
    if on_host:
        slots_replay = SlotsReplay(trace, costs, nbytes, outcome, chosen, None, build_prefetch("off", trace))
        return decoding(slots_replay, rows_of_records(trace))
    return decoding(PointersReplay(trace, costs, nbytes, outcome, chosen), parts(trace, trace.facts.total))


def decoding(replay: Replay[Any], work: Sequence[Any]) -> float:
    """Replays ``work``; returns the share of hits over steps without prompts."""
    trace, outcome = replay.trace, replay.outcome
    replay.fill(filling(trace, outcome.slots))
    ends, found, kinds = replay.end_step, [0, 0], iter(trace.step_kind.tolist())
    before = [0, 0]

    def end_step() -> None:
        ends()
        now = [outcome.hits, outcome.misses]
        if next(kinds) not in PROMPTS:
            found[:] = [sum_ + after - had for sum_, after, had in zip(found, now, before, strict=True)]
        before[:] = now

    replay.end_step = end_step  # type: ignore[method-assign]
    replay.run(work)
    return found[0] / sum(found)


if __name__ == "__main__":
    app()
