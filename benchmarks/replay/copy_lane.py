"""Calculates what a copy lane beside the layers would gain: experts are read ahead of need while the link would idle.

Which experts hit is replayed from recorded routing, by the code that serves. What is read ahead is what ``gate`` names
of the next layer (``guesses.py``), or what the policy expects. Times are those of plans: data sheets, and what is
assumed of them. Three ways to read ahead, beside none:

- ``now``: when a layer begins, a fetch of the next layer's experts shares the link with its own misses. The next
  layer waits for both. What is fetched takes slots that are on offer.
- ``lane``: reads that go when no layer reads: after the kernel of a layer that missed experts, else from its beginning.
  The likeliest come first. When the next layer begins they stop; it waits for what is in flight, and reads the rest of
  what it misses. The lane has memory of its own, so that hits do not change.
- ``lane_and_step``: and when all names are read, what the next steps of all layers are likeliest to use.

Bounds: ``right_names``, the lane with what the next layer will really miss; ``never_idle``: a step takes as long as the
slower of its loads and its other work. The lane's launches and the predictor's take no time here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tqdm import tqdm
from vllm_spac.kernels.reference.admit import admit
from vllm_spac.kernels.types import ADMITTED, HIT, STREAMED

from benchmarks.common import RESULTS, ROOT, TRACES, Script, provenance, sha256, show, write_result
from benchmarks.one_pool import machine, models
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import STEP_KINDS, Trace, TraceFacts
from vllm_spac.tools.planning.planned_machine import PlannedMachine
from vllm_spac.tools.planning.planned_model import ServedModel
from vllm_spac.tools.planning.planned_routing import HIGH, LOW, Routing, routed
from vllm_spac.tools.traces.replayed import Outcome, Part, filling, parts
from vllm_spac.tools.traces.simulated_pointers import LAUNCHES, PointersReplay
from vllm_spac.tools.traces.simulation import build_policy

PIECES = 8 * 8192  # bytes in flight when a layer begins, which it waits for
START = 3e-6  # seconds from the end of a layer's kernel to the first read of a lane that is launched after it
ENTRIES = 4  # experts that the lane reads of a layer, at most
RING = 16  # that it may hold if it reads for later layers, too
LIKELIEST = 64  # experts without a slot that a step starts with, to be read when nothing else is
RECALL = 0.75  # of guesses about synthetic routing, on misses as on hits: the carved model's is that of its trace
REQUESTS = (20, 25)  # of the trace, those behind the warm-up: one of each kind of text
DECODE = STEP_KINDS.index("decode")

app = Script(__doc__)


@dataclass
class LayerRun:
    """What a layer of a step did: numbers of hits and of reads that began ahead, and the experts that it missed.

    Attributes:
        missed: key -> whether it got a slot.
        named: keys without a slot that ``gate`` named of it, the likeliest first.
        fetched: experts of the next layer that were given slots when it began (``now``).
    """

    hits: int
    missed: dict[int, bool]
    named: list[int] = field(default_factory=list)
    fetched: int = 0


@dataclass
class StepRun:
    """A decode step; ``likely``: keys without a slot that the policy expected most, when it began."""

    layers: list[LayerRun] = field(default_factory=list)
    likely: list[int] = field(default_factory=list)


class Recorded(PointersReplay):
    """Replays a trace and keeps what the layers of decode steps did.

    Args:
        guesses: ids like the trace's, of the same records.
        ahead: guesses are given slots one layer ahead, as serving did before it had the lane; nothing limits them.
    """

    def __init__(self, trace: Trace, guesses: np.ndarray, slots: int, *, ahead: bool) -> None:
        outcome, costs = Outcome("reuse", "none", slots, slots / trace.facts.total), Costs.read("h200")
        super().__init__(trace, costs, 1, outcome, build_policy("reuse", trace, slots))
        self._guesses, self._ahead, self.steps = guesses, ahead, list[StepRun]()
        self._of_guesses = torch.zeros(trace.facts.total, dtype=torch.int32)

    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        super().begin_step(step, drafting, layers)
        outside = self.experts.slot_of.numpy() < 0
        expected = np.where(outside, -self._offers.formula.kept.numpy(), np.inf)  # steps until the next use
        likely = np.argsort(expected, kind="stable")[:LIKELIEST]
        self.steps.append(StepRun(likely=[int(key) for key in likely if outside[key]]))

    def run_layer(self, layer: int, work: list[Part]) -> None:
        number, size = self._number, self.trace.facts.experts
        rows = slice(self.trace.record_start[number], self.trace.record_start[number + 1])
        slot_of = self.experts.slot_of
        names = dict.fromkeys((self._guesses[rows].astype(int) + layer * size).ravel().tolist())
        named = [key for key in names if slot_of[key] < 0] if layer and self._decodes else []
        super().run_layer(layer, work)
        sources = {key: int(source) for key, source in zip(work[0].keys, self._read_from()[work[0].keys], strict=True)}
        missed = {key: source == ADMITTED for key, source in sources.items() if source in (ADMITTED, STREAMED)}
        hits = sum(source == HIT for source in sources.values())
        fetched = self._fetch(layer + 1) if self._ahead and self._decodes and layer + 1 < self.trace.facts.layers else 0
        self.steps[-1].layers.append(LayerRun(hits, missed, named, fetched))

    @property
    def _decodes(self) -> bool:
        return bool(self.trace.step_kind[self._step] == DECODE)

    def _fetch(self, layer: int) -> int:
        """Gives slots on offer to what is named of ``layer``; returns how many experts get one."""
        size = self.trace.facts.experts
        rows = slice(self.trace.record_start[self._number], self.trace.record_start[self._number + 1])
        named = torch.zeros(1, size)
        named[0, torch.from_numpy(self._guesses[rows].astype(np.int64)).flatten()] = 1
        ids = torch.arange(size, dtype=torch.int32)[None]
        state = self.experts, self._offers.offers, self._decided, self._of_guesses, self._copies
        admit(ids, named, layer * size, *state)
        return int(self._copies[0])

    def decode(self) -> list[StepRun]:
        """Replays all steps; returns those that only decode."""
        self.fill(filling(self.trace, self.outcome.slots))
        self.run(parts(self.trace, self.trace.facts.total))
        return [run for run, kind in zip(self.steps, self.trace.step_kind, strict=True) if kind == DECODE]


@dataclass(frozen=True)
class Times:
    """Seconds of a model on a machine: a load, a hit, what surrounds a layer, and the head."""

    load: float
    hit: float
    link: float  # bytes per second
    around: float
    head: float
    layers: int
    host: float  # of the host in a step, beside the GPU

    @classmethod
    def of(cls, model: ServedModel, on: PlannedMachine) -> Times:
        costs, shape = on.costs_of("host", model), model.architecture
        load, hit = float(costs.load.ideal(model.expert_bytes)), float(costs.fast.seconds(model.expert_bytes))
        head = 2 * shape.vocabulary * shape.hidden / on.costs.fast.bytes_per_second
        around = (costs.other - head) / model.layers + LAUNCHES
        return cls(load, hit, model.expert_bytes / load, around, head, model.layers, on.host_step("host", model))

    def tokens_per_s(self, seconds: float, layers: int) -> float:
        """Tokens/s where ``layers`` layers take so many seconds."""
        return 1 / max(self.host, self.head + seconds * self.layers / layers)

    def without(self, step: StepRun) -> float:
        """Seconds of a step's layers with nothing read ahead."""
        return sum(self.around + self._computing(run.hits, run.missed.values(), 0.0) for run in step.layers)

    def now(self, step: StepRun) -> float:
        """The same, with the next layer's fetched beside a layer's own misses, at equal shares of the link."""
        at = arrived = 0.0
        for run in step.layers:
            at = max(at + self.around, arrived)
            own, ahead = len(run.missed) * self.load, run.fetched * self.load
            arrived = at + ahead + min(own, ahead)
            at += self._computing(run.hits, run.missed.values(), min(own, ahead))
        return max(at, arrived)

    def never_idle(self, step: StepRun) -> float:
        """The slower of the link and of all else."""
        loads = sum(len(run.missed) for run in step.layers) * self.load
        hits = sum(run.hits + len(run.missed) for run in step.layers) * self.hit
        return max(loads, len(step.layers) * self.around + hits)

    def _computing(self, hits: int, missed: Any, late: float) -> float:
        """Seconds of a layer: hits beside misses, ``late`` of which the link does something else."""
        filled = sum(missed) * self.hit
        return max(hits * self.hit, len(missed) * self.load + late + filled if missed else 0.0)


class Lane:
    """A lane that reads ahead of need while no layer reads; see the module's docstring."""

    def __init__(self, times: Times, *, right: bool = False, next_step: bool = False) -> None:
        self._times, self._right, self._next_step = times, right, next_step
        self._held: dict[int, float] = {}  # key -> seconds of its load that are left; 0: it is there
        self.read = self.used = 0.0  # seconds of the link

    def step(self, step: StepRun, size: int) -> float:
        """Returns the seconds of a step's layers; ``size``: experts of a layer."""
        times, at, free = self._times, 0.0, 0.0
        waiting = list(step.likely) if self._next_step else []
        for number, run in enumerate(step.layers):
            at += times.around
            names = (list(run.missed) if self._right else run.named)[:ENTRIES] if number else []
            if self._fill(at - free, names, waiting) and run.missed:
                at += PIECES / times.link
            there = range(number * size, (number + 1) * size)
            left = {key: self._held.pop(key, times.load) for key in run.missed}
            for key in [key for key in self._held if key in there]:
                del self._held[key]
            self.used += sum(times.load - seconds for seconds in left.values())
            loads, ready = sum(left.values()), sum(seconds == 0 for seconds in left.values())
            filled = sum(gets for key, gets in run.missed.items() if left[key]) * times.hit
            free, kernel = at + START, at
            at = kernel + max((run.hits + ready) * times.hit, loads + filled if loads else 0.0)
            if loads:
                free = at + START
        self._fill(at + times.head - free, [], waiting)
        return at

    def _fill(self, seconds: float, names: Sequence[int], waiting: list[int]) -> bool:
        """Reads for so many seconds; returns whether it would go on."""
        for key in names:
            if seconds <= 0:
                return True
            seconds = self._read(key, seconds)
        begun = [key for key, left in self._held.items() if left]
        while seconds > 0 and (begun or (waiting and len(self._held) < RING)):
            seconds = self._read(begun.pop() if begun else waiting.pop(0), seconds)
        return seconds <= 0

    def _read(self, key: int, seconds: float) -> float:
        """Goes on with a read; returns the seconds that are left."""
        left = self._held.get(key, self._times.load)
        took = min(left, seconds)
        self._held[key] = left - took if took < left else 0.0
        self.read += took
        return seconds - took


WAYS = ("none", "now", "lane", "lane_and_step", "right_names", "never_idle")


def judged(times: Times, plain: Sequence[StepRun], fetched: Sequence[StepRun], size: int) -> dict[str, Any]:
    """Returns tokens/s by ``WAYS``, and what was made of the lane's reads; ``size``: experts of a layer."""
    lanes = {"lane": Lane(times), "lane_and_step": Lane(times, next_step=True), "right_names": Lane(times, right=True)}
    seconds = {
        "none": [times.without(step) for step in plain],
        "now": [times.now(step) for step in fetched],
        **{name: [lane.step(step, size) for step in plain] for name, lane in lanes.items()},
        "never_idle": [times.never_idle(step) for step in plain],
    }
    layers, asked = len(plain[0].layers), sum(run.hits + len(run.missed) for step in plain for run in step.layers)
    idle = 1 - sum(len(run.missed) for step in plain for run in step.layers) * times.load / sum(seconds["none"])
    return {
        "hit_rate": sum(run.hits for step in plain for run in step.layers) / asked,
        "hit_rate_now": sum(run.hits for step in fetched for run in step.layers) / asked,
        "link_idles": idle,
        "tokens_per_s": {name: times.tokens_per_s(float(np.mean(seconds[name])), layers) for name in WAYS},
        "reads_used": {name: lane.used / max(1e-9, lane.read) for name, lane in lanes.items()},
    }


def narrowed(trace: Trace, top_k: int) -> Trace:
    """Returns the trace of a model that keeps the first ``top_k`` choices of each token, those of the most weight."""
    facts = replace(trace.facts, top_k=top_k)
    return replace(trace, facts=facts, ids=np.ascontiguousarray(trace.ids[:, :top_k]), weights=None)


def requests(trace: Trace, first: int, last: int) -> Trace:
    """Returns the steps of requests ``first`` to ``last``, which ran one after the other."""
    begins = np.append(np.flatnonzero(trace.step_kind == STEP_KINDS.index("prefill")), trace.steps)
    steps = slice(begins[first], begins[last])
    records = slice(*np.searchsorted(trace.record_step, (steps.start, steps.stop)))
    rows, ids = (slice(start[each.start], start[each.stop]) for start, each in
                 ((trace.row_start, steps), (trace.record_start, records)))  # fmt: skip
    columns = {name: getattr(trace, name)[steps] for name in ("step_kind", "step_rows", "step_tokens")}
    columns |= {name: getattr(trace, name)[rows] for name in ("row_kind", "row_back", "row_accepted")}
    columns |= {
        "record_step": trace.record_step[records] - np.uint32(steps.start),
        "record_layer": trace.record_layer[records],
    }
    return Trace.of(trace.facts, ids=trace.ids[ids], **columns)


def drawn(trace: Trace) -> np.ndarray:
    """Returns guesses about synthetic routing: a choice is named with probability ``RECALL``, else another."""
    rng, guesses = np.random.default_rng(0), trace.ids.astype(np.int64)
    for row, wrong in zip(guesses, rng.random(guesses.shape) >= RECALL, strict=True):
        others = np.setdiff1d(np.arange(trace.facts.experts), row)
        row[wrong] = rng.choice(others, int(wrong.sum()), replace=False)
    return guesses


class Replays:
    """What layers do, by routing and share of slots; each is replayed once."""

    def __init__(self, recorded: Trace, guesses: Trace) -> None:
        self._recorded, self._guesses = recorded, guesses
        self._known: dict[tuple, list[StepRun]] = {}

    def of(self, routing: Routing | None, facts: TraceFacts, share: float, *, ahead: bool) -> tuple[list[StepRun], int]:
        """Returns decode steps, and the experts of a layer; ``routing``: None for the recorded one."""
        if routing is None:
            trace = narrowed(self._recorded, facts.top_k)
            guesses: np.ndarray = self._guesses.ids[:, : facts.top_k]
        else:
            trace = routed(routing, facts, 1, 0)
            guesses = drawn(trace)
        slots = max(trace.facts.top_k, int(share * trace.facts.total))
        key = routing and routing.name, trace.facts.top_k, trace.facts.experts, slots, ahead
        if key not in self._known:
            self._known[key] = Recorded(trace, guesses, slots, ahead=ahead).decode()
        return self._known[key], trace.facts.experts


def rows(replays: Replays) -> Iterator[dict[str, Any]]:
    """Yields a row for each model, card and routing."""
    pool = json.loads((RESULTS / "one_pool.json").read_text(encoding="utf-8"))["rows"]
    pool = [row for row in pool if row["plane"] == "pointers" and "Next" not in row["model"]]
    with models() as named:
        for row in tqdm(pool, unit="recipe"):
            on = machine(row["model"], row["memory_gib"])
            model = ServedModel.of(named[row["model"]], "pointers", capability=on.capability)
            checkpoint, share = model.checkpoint, row["slots"] / row["experts"]
            facts = TraceFacts(model.layers, checkpoint.experts, checkpoint.top_k, model.expert_bytes)
            times = Times.of(model, on)
            for routing in (None, LOW, HIGH):
                (plain, size), (fetched, _) = (replays.of(routing, facts, share, ahead=each) for each in (False, True))
                yield {
                    "model": row["model"],
                    "format": row["format"],
                    "machine": f"{row['machine']}, {row['memory_gib']} GiB",
                    "slots": row["slots"],
                    "routing": "carved" if routing is None else routing.name,
                } | judged(times, plain, fetched, size)


@app.main
def main(
    trace: Annotated[Path, typer.Option(help="Recorded with one request at a time.")] = TRACES / "real/none1.trace",
    guesses: Annotated[Path, typer.Option(help="Of ``guesses.py``.")] = TRACES / "real/none1_gate.trace",
    output: Annotated[Path, typer.Option(help="JSON to write.")] = RESULTS / "copy_lane.json",
) -> None:
    origin = provenance()
    found = list(rows(Replays(*(requests(Trace.load(path), *REQUESTS) for path in (trace, guesses)))))
    about = {"entries": ENTRIES, "ring": RING, "requests": REQUESTS, "recall_of_synthetic": RECALL}
    files = {path.stem: {"file": os.path.relpath(path, ROOT), "sha256": sha256(path)} for path in (trace, guesses)}
    write_result(output, {"provenance": origin, "calculated": True, "traces": files, **about, "rows": found})
    shown = [
        row | {"over": {way: row["tokens_per_s"][way] / row["tokens_per_s"]["none"] for way in WAYS}} for row in found
    ]
    show("over no reads ahead, calculated", shown, "model", "machine", "routing", "hit_rate", "link_idles",
         "tokens_per_s.none", *(f"over.{way}" for way in WAYS[1:]))  # fmt: skip


if __name__ == "__main__":
    app()
