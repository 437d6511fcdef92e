"""Replays a routing trace on a virtual clock. Subclasses model how a layer reaches its experts.

Layers are split into parts of rows that fit the slots; the experts that are resident at the start are listed here too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Generic, TypeVar

import numpy as np

from vllm_spac.core import settled_experts
from vllm_spac.decisions.costs import Costs
from vllm_spac.execution.waves import filled_experts, row_waves
from vllm_spac.recording.trace_file import DRAFT, PREFILL, STEP_KINDS, Trace
from vllm_spac.tools.traces.trace_statistics import draft_depths, forwards


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one layer in one step that run together.

    ``keys`` are ascending; ``rows`` is the number of rows that selected each key.
    """

    keys: list[int]
    rows: list[int]


def parts(trace: Trace, slots: int) -> list[list[Part]]:
    """Returns the parts of each record, in execution order; see ``row_waves``."""
    keys, rows, bounds = forwards(trace)
    return [
        [Part(keys[a:b].tolist(), rows[a:b].tolist())] if b - a <= slots else list(_split(trace, number, slots))
        for number, (a, b) in enumerate(pairwise(bounds.tolist()))
    ]


def rows_of_records(trace: Trace) -> list[np.ndarray]:
    """Returns the experts of each record's rows, [rows, top_k], in the trace's dtype."""
    return [trace.ids[a:b] for a, b in pairwise(trace.record_start.tolist())]


def uses(trace: Trace, slots: int) -> Iterator[int]:
    """Yields the keys in the order in which layers use them without a balancer."""
    return (key for record in parts(trace, slots) for part in record for key in part.keys)


def filling(trace: Trace, slots: int, settled: int = 0) -> list[int]:
    """Returns the keys that are loaded before the first step; the first ``settled`` of them have slots for good."""
    layers, experts = trace.facts.layers, trace.facts.experts
    first = settled_experts(layers, experts, settled)
    return first + list(chain.from_iterable(filled_experts(layers, experts, slots, first)))


def _split(trace: Trace, record: int, slots: int) -> Iterator[Part]:
    experts = trace.facts.experts
    rows = trace.ids[trace.record_start[record] : trace.record_start[record + 1]]
    first = int(trace.record_layer[record]) * experts
    for wave in row_waves(rows, slots, experts):
        keys, counts = np.unique(rows[wave].astype(np.int64), return_counts=True)
        yield Part((keys + first).tolist(), counts.tolist())


_PREFILL = STEP_KINDS.index("prefill")

Work = TypeVar("Work")


@dataclass
class Outcome:
    """The result of a replay; experts are counted once per layer and step, as in ``metrics.Counters``."""

    policy: str
    balancer: str
    slots: int
    share: float
    execution: str = "slots"  # or ``pointers``
    prefetch: str = "off"  # or the prefetcher, with its knobs
    steps: int = 0
    hits: int = 0  # experts that were resident in fast memory
    misses: int = 0  # missing or on their way
    cpu: int = 0  # computed on the CPU
    loads: int = 0  # copied into slots, on demand: more than misses where parts of a step evict each other's experts
    host_loads: int = 0  # loads that host memory beside the store served
    disk_loads: int = 0  # with pointers, read from a disk into host memory
    prefetches: int = 0  # with slots, copied ahead of need
    prefetch_hits: int = 0  # of these, used before they were evicted
    prefetch_late: int = 0  # a layer had to wait; they count as misses
    prefetch_wasted: int = 0  # evicted before they were used
    prefetch_harmful: int = 0  # loads of experts that an unused prefetch had evicted
    bytes: int = 0  # of the experts copied into slots
    streamed_bytes: int = 0  # that layers read from host memory over the bus, without a slot (pointers)
    parts: int = 0
    seconds: float = 0.0  # virtual time of all steps
    stall_seconds: float = 0.0  # the part in which fast memory computed no expert although a layer waited for some
    bound_seconds: float = 0.0  # the least that all steps can take
    # tpot, bound_tpot: seconds per token over the steps that emit tokens; None if the trace lacks their number
    tpot: float | None = None
    bound_tpot: float | None = None
    hit_rate: float = field(init=False, default=0.0)
    ratio: float = field(init=False, default=1.0)


class Replay(ABC, Generic[Work]):
    """Base class: replays a trace against one way to execute its layers, whose input per record is a ``Work``.

    Args:
        nbytes: bytes of an expert.
    """

    def __init__(self, trace: Trace, costs: Costs, nbytes: int, outcome: Outcome) -> None:
        self.trace, self.costs, self.nbytes, self.outcome = trace, costs, nbytes, outcome
        most = np.arange(int(trace.step_rows.max(initial=0)) + 1)
        self._depths = draft_depths(trace)
        self.fast = np.asarray(costs.fast.seconds(nbytes, most)).tolist()  # seconds of a hit, by its rows

    @abstractmethod
    def fill(self, keys: Sequence[int]) -> None:
        """Puts these experts into slots; called before the first step."""

    @abstractmethod
    def begin_step(self, step: int, drafting: float, layers: int) -> None:
        """Starts a step of ``layers`` layers; ``drafting`` seconds have passed since the last one."""

    @abstractmethod
    def run_layer(self, layer: int, work: Work) -> None:
        """Runs one layer of the step and adds its time and counts to ``outcome``."""

    @abstractmethod
    def end_step(self) -> None:
        """Ends the step; its layers have finished."""

    def run(self, work: Sequence[Work]) -> Outcome:
        """Replays the whole trace; ``work``: that of each record."""
        trace, outcome = self.trace, self.outcome
        outcome.steps = trace.steps
        bounds = np.searchsorted(trace.record_step, np.arange(trace.steps + 1)).tolist()
        layers = trace.record_layer.tolist()
        emitted, seconds, least = 0, 0.0, 0.0
        known = True
        for step in range(trace.steps):
            before, before_bound = outcome.seconds, outcome.bound_seconds
            records, drafting = range(bounds[step], bounds[step + 1]), self._drafting(step)
            outcome.seconds += self.costs.other + drafting
            outcome.bound_seconds += self.costs.other + drafting
            self.begin_step(step, drafting, len(records))
            for number in records:
                self.run_layer(layers[number], work[number])
            self.end_step()
            if trace.step_kind[step] != _PREFILL:
                tokens = int(trace.step_tokens[step])
                known, emitted = known and tokens > 0, emitted + tokens
                seconds, least = seconds + outcome.seconds - before, least + outcome.bound_seconds - before_bound
        if known and emitted:
            outcome.tpot, outcome.bound_tpot = seconds / emitted, least / emitted
        asked = outcome.hits + outcome.misses + outcome.cpu
        outcome.hit_rate = outcome.hits / asked if asked else 1.0
        outcome.ratio = outcome.seconds / outcome.bound_seconds if outcome.bound_seconds else 1.0
        return outcome

    def has_prompts(self, step: int) -> bool:
        """Returns whether any row of a step belongs to a prompt."""
        rows = slice(self.trace.row_start[step], self.trace.row_start[step + 1])
        return bool((self.trace.row_kind[rows] == PREFILL).any())

    def drafts(self, step: int) -> np.ndarray:
        """Returns the number of drafts of each request that a step verifies, int64 [requests]."""
        kinds = self.trace.row_kind[self.trace.row_start[step] : self.trace.row_start[step + 1]]
        return np.bincount(np.cumsum(kinds != DRAFT)[kinds == DRAFT] - 1, minlength=int((kinds != DRAFT).sum()))

    def leading(self, step: int) -> int:
        """As ``Step.leading``."""
        prompts = self.trace.row_kind[self.trace.row_start[step] : self.trace.row_start[step + 1]] == PREFILL
        return int(prompts.argmax()) if prompts.any() else len(prompts)

    def _drafting(self, step: int) -> float:
        """Returns the seconds that drafting a step's tokens took: requests draft concurrently, a tree by levels."""
        depths = self._depths[self.trace.row_start[step] : self.trace.row_start[step + 1]]
        return int(depths.max(initial=0)) * self.costs.draft
