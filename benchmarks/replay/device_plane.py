"""Hits where the device decides which experts have slots, beside those where the host does, on recorded routing.

Only steps without prompts count: a prompt selects nearly every expert. No time is simulated. ``--times`` compares the
calculated tokens/s of ``one_pool.json`` with those that it had in an earlier commit. ``--disk`` plans models that are
larger than GPU and host memory together, and compares with the plane whose layers wait for the host.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import print

from benchmarks.common import RESULTS, Script, provenance, sha256, write_result
from benchmarks.recipes import named
from benchmarks.stages import tensors
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import STEP_KINDS, Trace
from vllm_spac.storage.checkpoint.published import published
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_memory import Load
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import routings
from vllm_spac.tools.planning.planned_serving import make_plan
from vllm_spac.tools.traces.replayed import Outcome, Replay, filling, parts, rows_of_records
from vllm_spac.tools.traces.simulated_pointers import PointersReplay
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_policy, build_prefetch

SHARES = (0.1, 0.25, 0.5)  # of the experts, in slots
TRACES = {1: "benchmarks/traces/real/none1.trace", 8: "benchmarks/traces/real/none8.trace"}  # by batch size
DISK = "experts on a disk, host memory before it"
DISK_AND_CPU = f"{DISK}, a share of it the CPU's"
ON_DISK = (  # models, whose quantisation they have instead of their own, and GB of host memory
    ("openai/gpt-oss-120b", "", 32),
    ("Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", 64),
    ("zai-org/GLM-4.5-Air-FP8", "", 64),
)
COLUMNS = ("host", "device_before", "device")
PROMPTS = {STEP_KINDS.index("prefill"), STEP_KINDS.index("mixed")}

app = Script(__doc__)


@app.main
def main(
    policy: Annotated[str, typer.Option(help="Policy, with its arguments.")] = "reuse",
    before: Annotated[bool, typer.Option(help="Write what this code's device plane has as that before.")] = False,
    times: Annotated[str, typer.Option(help="Commit: write tokens/s over those of its one_pool.json, no hits.")] = "",
    disk: Annotated[bool, typer.Option(help="Write tokens/s of models on a disk, no hits.")] = False,
    output: Annotated[Path, typer.Option(help="JSON; what is not made again is kept.")] = RESULTS / "device_plane.json",
) -> None:
    known = json.loads(output.read_text()) if output.exists() else {}
    if times or disk:
        before_disk, with_disk = (
            [row for row in known.get("rows", ()) if row["part"].startswith(DISK) == on] for on in (0, 1)
        )
        rows = [*(over(times) if times else before_disk), *(on_disk() if disk else with_disk)]
        made = {"times": provenance() | {"before": times}} if times else {"disk": provenance()}
        write_result(output, known | {"rows": rows} | made)
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


def on_disk() -> Iterator[dict[str, Any]]:
    """Yields the calculated tokens/s over pointers of models on a disk, and their ratio to the host's plane."""
    for name, like, host in ON_DISK:
        recipe: dict[str, Any] = {"config": published()[name], "model": name}
        if like:
            quantisation = {"quantization_config": published()[like]["quantization_config"]}
            recipe = {"config": published()[name] | quantisation, "model": f"{name}-GPTQ-Int4"}
        for gpu, cards in (("rtx4090", 1), ("rtx5090", 1), ("rtx4090", 2)):
            machine = PlannedMachine.of(gpu, None, host << 30)
            if cards > 1:
                if not like:
                    continue  # all of them fit memory
                machine = tensors(replace(machine, gpu=cards * machine.gpu), cards)
            with named(recipe) as model:
                ways = list(ServedModel.ways(model, "auto", on_cpu=False, capability=machine.capability, amx=False))
            plans = [make_plan(way, machine, Load(8192, 1), routings(None, way)) for way in ways]
            ours, other = sorted(plans, key=lambda plan: plan.model.execution != "pointers")
            same = [row for row in ours.rows if replace(row.choice, cpu=ours.best.choice.cpu) == ours.best.choice]
            for row in sorted(same, key=lambda row: row.choice.cpu):
                speed = row.compared.tokens_per_second
                yield {
                    "machine": f"{cards} × {gpu}, {host} GB" if cards > 1 else f"{gpu}, {host} GB",
                    "model": recipe["model"],
                    "format": ours.model.kind,
                    "slots": row.choice.slots,
                    "part": DISK_AND_CPU if row.choice.cpu else DISK,
                    "tokens_per_s": speed,
                    "tokens_per_s_high": row.high.tokens_per_second,
                    "over_before": speed / other.best.compared.tokens_per_second,
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
