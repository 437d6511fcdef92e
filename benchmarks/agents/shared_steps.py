"""What requests get together that share their steps, and what any other grouping of them would gain. SIMULATED.

    python benchmarks/agents/shared_steps.py

Requests of the carved model's trace decode together, each with a text of its own. The serving code decides on a virtual
clock (``vllm_spac/tools/traces``): experts of Qwen3-30B-A3B's size, costs of a profile in proportion to the layers, at
what it attains. Over pointers and over slots, for 1 to 16 requests.

*Ceiling*: slots always hold what is used soonest, and a layer takes as long as the slowest of its loads, its experts on
the CPU and those in fast memory.

Groupings are an upper bound, each known in advance. *Turns*: groups of requests run a number of steps each. *Overlap*:
a step takes those whose experts, known before it, are most like those of the others, then of the last step; none waits
for more than a number of steps. A gap is between two tokens of a request, over the time of a step that all share.

*Chunks*: rows of a prompt in a step select so many experts, and each that misses crosses the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.common import RESULTS, TRACES, Script, progress, provenance, sha256, show, write_result
from benchmarks.papers.drafts_account import Machine
from vllm_spac.execution.device.cpu_share import shares_of
from vllm_spac.recording.trace_file import ROW_KINDS, STEP_KINDS, Trace, TraceFacts
from vllm_spac.tools.traces.replayed import Outcome, Replay, filling, parts, rows_of_records
from vllm_spac.tools.traces.simulated_pointers import PointersReplay
from vllm_spac.tools.traces.simulated_slots import SlotsReplay
from vllm_spac.tools.traces.simulation import build_balancer, build_policy, build_prefetch

TRACE = TRACES / "real" / "none1.trace"
MACHINES = Machine("rtx4090", "int4", True), Machine("h100", "bf16", True)
SHARES = (0.1, 0.25, 0.5)
AGENTS = (1, 2, 4, 8, 16)
WAYS = ("pointers", "pointers, CPU", "slots")  # the plane, and whether the CPU takes a share of the misses
GROUPED_SHARE, GROUPED = 0.25, (2, 4, 8)  # of which other groupings are tried: slots, and requests
LENGTHS = 1, 8, 52  # steps of a turn
GAP = 4  # steps that a request waits at most, of groupings by overlap
CHUNKS = (8, 16, 32, 64)  # rows of a prompt in a step
Schedule = list[list[int]]  # the requests of each step
_POINT = ("machine", "way", "slots", "agents")
app = Script(__doc__)


@cache
def streams(file: Path) -> list[np.ndarray]:
    """Returns the experts of each request's tokens, uint8 [tokens, layers, top_k], equally many; without warm-up."""
    trace = Trace.load(file)
    layers, top_k = trace.facts.layers, trace.facts.top_k
    bounds = trace.record_start[::layers]
    steps = [trace.ids[a:b].reshape(layers, -1, top_k).transpose(1, 0, 2) for a, b in pairwise(bounds)]
    starts = [*np.flatnonzero(trace.step_kind == STEP_KINDS.index("prefill")).tolist(), trace.steps]
    longest = max(b - a for a, b in pairwise(starts))
    texts = [np.concatenate(steps[a:b]) for a, b in pairwise(starts) if b - a == longest]
    return [text[: min(map(len, texts))] for text in texts]


def composed(schedule: Schedule, texts: Sequence[np.ndarray], facts: TraceFacts) -> Trace:
    """Returns the routing trace of a schedule: in each of its steps a request has its next token."""
    at, ids = [0] * len(texts), []
    for step in schedule:
        ids.append(np.stack([texts[each][at[each]] for each in step]).transpose(1, 0, 2).reshape(-1, facts.top_k))
        for each in step:
            at[each] += 1
    rows = np.array([len(step) for step in schedule], dtype=np.uint32)
    count = len(schedule)
    return Trace.of(
        facts,
        step_kind=np.full(count, STEP_KINDS.index("decode"), dtype=np.uint8),
        step_rows=rows,
        step_tokens=rows,
        row_kind=np.full(int(rows.sum()), ROW_KINDS.index("decode"), dtype=np.uint8),
        record_step=np.repeat(np.arange(count, dtype=np.uint32), facts.layers),
        record_layer=np.tile(np.arange(facts.layers, dtype=np.uint16), count),
        ids=np.concatenate(ids),
    )


def turns(requests: int, tokens: int, group: int, steps: int) -> Schedule:
    """Returns the schedule in which groups of ``group`` requests run ``steps`` steps each, in turn."""
    groups = [list(range(first, min(first + group, requests))) for first in range(0, requests, group)]
    rounds = [min(steps, tokens - done) for done in range(0, tokens, steps)]
    return [one for length in rounds for one in groups for _ in range(length)]


def overlapping(texts: Sequence[np.ndarray], experts: int, group: int, gap: int) -> Schedule:
    """Returns a schedule of steps of ``group`` requests whose experts overlap, as they and the last step's are known.

    The request that waits longest is always one of them, and so is each that would otherwise wait for more than ``gap``
    steps; then there are more.
    """
    layers, tokens = texts[0].shape[1], len(texts[0])
    chosen = np.zeros((len(texts), tokens, layers, experts), dtype=bool)
    for number, text in enumerate(texts):
        np.put_along_axis(chosen[number], text.astype(np.int64), True, axis=2)
    at, ran, last = np.zeros(len(texts), dtype=int), np.full(len(texts), -1), np.zeros((layers, experts), dtype=bool)
    schedule: Schedule = []
    while (at < tokens).any():
        left = np.flatnonzero(at < tokens)
        waits = len(schedule) - ran[left]
        step = left[waits >= gap].tolist() or [int(left[waits.argmax()])]
        union = np.logical_or.reduce([chosen[each, at[each]] for each in step])
        while len(step) < min(group, len(left)):
            others = [int(each) for each in left if each not in step]
            likeness = [int((2 * union + last)[chosen[each, at[each]]].sum()) for each in others]
            best = others[int(np.argmax(likeness))]
            union |= chosen[best, at[best]]
            step.append(best)
        last = union
        at[step] += 1
        ran[step] = len(schedule)
        schedule.append(sorted(step))
    return schedule


def foreseen(trace: Trace, slots: int) -> Iterator[tuple[int, int]]:
    """Yields the hits and misses of each record where slots always hold what is used soonest: no fewer miss."""
    total, experts = trace.facts.total, trace.facts.experts
    firsts = trace.record_layer.astype(np.int64) * experts
    records = [first + np.unique(rows) for first, rows in zip(firsts, rows_of_records(trace), strict=True)]
    after, following = np.full(total, len(records)), list[np.ndarray]()
    for number in range(len(records) - 1, -1, -1):
        following.append(after[records[number]].copy())
        after[records[number]] = number
    held = np.zeros(total, dtype=bool)
    held[filling(trace, slots)] = True
    for keys, uses_next in zip(records, reversed(following), strict=True):
        hits = int(held[keys].sum())
        yield hits, len(keys) - hits
        after[keys] = uses_next
        held[keys] = True
        mine = np.flatnonzero(held)
        if len(mine) > slots:
            held[mine[np.argsort(after[mine], kind="stable")[slots:]]] = False


def replay(trace: Trace, machine: Machine, share: float, way: str) -> tuple[Outcome, list[float]]:
    """Replays a trace; returns what came of it, and when each step ended."""
    slots, costs = round(share * trace.facts.total), machine.costs(trace.facts.layers)
    plane, _, cpu = way.partition(", ")
    nbytes, outcome = machine.expert_bytes, Outcome("reuse", "none", slots, share, plane)
    policy = build_policy("reuse", trace, slots)
    if plane == "pointers":
        beside = build_balancer("waterfill", trace, costs, nbytes) if cpu else None
        shares = [] if beside is None else shares_of(beside, trace.facts.experts)
        return outcome, timed(
            PointersReplay(trace, costs, nbytes, outcome, policy, shares), parts(trace, trace.facts.total)
        )
    on_slots = SlotsReplay(trace, costs, nbytes, outcome, policy, None, build_prefetch("off", trace))
    return outcome, timed(on_slots, rows_of_records(trace))


def timed(run: Replay[Any], work: Sequence[Any]) -> list[float]:
    """Runs a replay; returns when each of its steps ended."""
    run.fill(filling(run.trace, run.outcome.slots))
    ends, finish = list[float](), run.end_step

    def end_step() -> None:
        finish()
        ends.append(run.outcome.seconds)

    run.end_step = end_step  # type: ignore[method-assign]
    run.run(work)
    return ends


def ceiling(trace: Trace, machine: Machine, share: float, cpu: bool) -> float:
    """Returns the seconds of a trace with the fewest misses, each layer as long as the slowest of what it does at once.

    Args:
        cpu: the CPU takes the best share of the misses.
    """
    slots, costs, nbytes = round(share * trace.facts.total), machine.costs(trace.facts.layers), machine.expert_bytes
    seconds = trace.steps * costs.other
    for hits, misses in foreseen(trace, slots):
        most = misses if cpu else 0
        seconds += min(costs.bound(nbytes, hits, misses - left, left) for left in range(most + 1))
    return seconds


def longest_gap(schedule: Schedule, ends: Sequence[float]) -> float:
    """Returns the longest time between two tokens of a request, or before its first."""
    last, longest = dict[int, float](), 0.0
    for step, end in zip(schedule, ends, strict=True):
        for each in step:
            longest, last[each] = max(longest, end - last.get(each, 0.0)), end
    return longest


def row(machine: Machine, share: float, way: str, agents: int) -> dict[str, Any]:
    """Returns tokens per second of all when requests share every step, and the ceiling."""
    texts, facts = _texts(agents), _facts(machine)
    trace = composed(turns(agents, len(texts[0]), agents, 1), texts, facts)
    outcome, ends = replay(trace, machine, share, way)
    tokens = agents * len(texts[0])
    missed = outcome.misses / tokens
    return {
        "machine": machine.name,
        "way": way,
        "slots": share,
        "agents": agents,
        "tokens_per_s": tokens / ends[-1],
        "ceiling": tokens / ceiling(trace, machine, share, "CPU" in way),
        "hit_rate": outcome.hit_rate,
        "bytes_per_token": missed * machine.expert_bytes,
    }


def grouped(machine: Machine, share: float, way: str, agents: int) -> list[dict[str, Any]]:
    """Returns what groupings give over steps that all share, and their longest gaps in such steps."""
    texts, facts = _texts(agents), _facts(machine)
    tokens = len(texts[0])
    _, shared = replay(composed(turns(agents, tokens, agents, 1), texts, facts), machine, share, way)
    groups = [size for size in (1, 2, 4, 8) if size < agents]
    ways: dict[tuple[str, int, int], Schedule] = {
        ("turns", size, length): turns(agents, tokens, size, length) for size in groups for length in LENGTHS
    }
    for size in groups:
        if agents <= size * GAP:
            ways["overlap", size, GAP] = overlapping(texts, facts.experts, size, GAP)
    rows = []
    for (kind, size, length), schedule in ways.items():
        _, ends = replay(composed(schedule, texts, facts), machine, share, way)
        step = shared[-1] / tokens
        facts_of = {"machine": machine.name, "way": way, "slots": share, "agents": agents, "kind": kind}
        gain = shared[-1] / ends[-1]
        rows.append(
            facts_of | {"group": size, "steps": length, "gain": gain, "gap": longest_gap(schedule, ends) / step}
        )
    return rows


def best_of(ways: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns, of each point, the best grouping of all, and of those whose gaps are at most ``GAP`` shared steps."""
    points = dict.fromkeys(tuple(way[name] for name in _POINT) for way in ways)
    found = []
    for point in points:
        mine = [way for way in ways if tuple(way[name] for name in _POINT) == point]
        kept = [way for way in mine if way["gap"] <= GAP]
        best, bounded = (max(some, key=lambda way: way["gain"], default=None) for some in (mine, kept))
        found.append(dict(zip(_POINT, point, strict=True)) | {"best": best, "bounded": bounded})
    return found


def chunks(machine: Machine, share: float, step: float) -> Iterator[dict[str, Any]]:
    """Yields what steps with rows of a prompt take, over ``step``: seconds of one that eight requests share."""
    texts, facts = _texts(max(AGENTS)), _facts(machine)
    costs = machine.costs(facts.layers)
    load = float(costs.load.seconds(machine.expert_bytes))
    for rows in (*CHUNKS, 0):
        places = [text[:rows] for text in texts]
        union = np.mean([[len(np.unique(text[:, layer])) for layer in range(facts.layers)] for text in places])
        experts = float(union) if rows else float(facts.experts)
        seconds = step + facts.layers * experts * (1 - share) * load
        about = {"machine": machine.name, "slots": share, "rows": rows or None, "experts": experts}
        yield about | {"gap": seconds / step, "prompt_tokens_per_s": rows / seconds if rows else None}


def _texts(agents: int) -> list[np.ndarray]:
    return streams(TRACE)[:agents]


def _facts(machine: Machine) -> TraceFacts:
    return replace(Trace.load(TRACE).facts, expert_bytes=machine.expert_bytes)


def _row(point: tuple[Machine, float, str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return row(*point)


def _grouped(point: tuple[Machine, float, str, int]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return grouped(*point)


@app.main
def main(
    processes: Annotated[int, typer.Option(min=1, help="At once.")] = 2,
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "agents_simulated.json",
) -> None:
    origin = provenance()
    points = [
        (machine, share, way, agents) for machine in MACHINES for share in SHARES for way in WAYS for agents in AGENTS
    ]
    tried = [(machine, GROUPED_SHARE, way, agents) for machine in MACHINES for way in WAYS[:2] for agents in GROUPED]
    rows, ways = list[dict[str, Any]](), list[dict[str, Any]]()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool, progress() as bar:
        task = bar.add_task("replaying", total=len(points) + len(tried))
        for found in pool.map(_row, points):
            rows.append(found)
            bar.advance(task)
        for found_ways in pool.map(_grouped, tried):
            ways += found_ways
            bar.advance(task)
    for each in rows:
        fewer = [other for other in rows if _alike(other, each) and other["agents"] < each["agents"]]
        for name in ("tokens_per_s", "ceiling"):
            best = max((other[name] for other in fewer), default=None)
            each[f"{name}_over_fewer"] = None if best is None else each[name] / best
    eight = {(row["machine"], row["slots"]): 8 / row["tokens_per_s"] for row in rows if _is_eight(row)}
    facts: dict[str, Any] = {
        "how": "simulated",
        "traces": {TRACE.stem: {"sha256": sha256(TRACE)}},
        "tokens": len(streams(TRACE)[0]),
        "gap_steps": GAP,
        "rows": rows,
        "grouped": ways,
        "best": best_of(ways),
        "chunks": [
            found
            for machine in MACHINES
            for share in SHARES
            for found in chunks(machine, share, eight[machine.name, share])
        ],
    }
    write_result(output, {"provenance": origin} | facts)
    show("simulated", rows, "machine", "way", "slots", "agents", "tokens_per_s", "ceiling", "tokens_per_s_over_fewer")


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[name] == other[name] for name in _POINT[:-1])


def _is_eight(found: dict[str, Any]) -> bool:
    return found["agents"] == 8 and found["way"] == WAYS[0]


if __name__ == "__main__":
    app()
