"""Splits the layers of a trace into parts of rows that fit the slots, and lists the experts resident at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from vllm_spac.execution._waves import filled_experts, row_waves
from vllm_spac.traces.format import Trace


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one layer in one step that run together.

    ``keys`` are ascending; ``rows`` is the number of rows that selected each key.
    """

    keys: list[int]
    rows: list[int]


def parts(trace: Trace, slots: int) -> list[list[Part]]:
    """Returns the parts of each record, in execution order; see ``row_waves``."""
    experts = trace.facts.experts
    record = np.repeat(np.arange(trace.records), np.diff(trace.record_start))
    flat, counts = np.unique(trace.ids + (record * experts)[:, None], return_counts=True)
    bounds = np.searchsorted(flat, np.arange(trace.records + 1) * experts)
    base = trace.record_layer.astype(np.int64) * experts
    keys = flat % experts + np.repeat(base, np.diff(bounds))
    whole = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    return [
        [Part(keys[a:b].tolist(), counts[a:b].tolist())] if b - a <= slots else list(_split(trace, number, slots))
        for number, (a, b) in enumerate(whole)
    ]


def rows_of_records(trace: Trace) -> list[np.ndarray]:
    """Returns the experts of each record's rows, [rows, top_k], in the trace's dtype."""
    return [trace.ids[a:b] for a, b in pairwise(trace.record_start.tolist())]


def uses(trace: Trace, slots: int) -> Iterator[int]:
    """Yields the keys in the order in which layers use them without a balancer."""
    return (key for record in parts(trace, slots) for part in record for key in part.keys)


def filling(trace: Trace, slots: int, first: Sequence[int] = ()) -> list[int]:
    """Returns the keys that are loaded before the first step, the policy's ``first`` before the others."""
    return list(chain.from_iterable(filled_experts(trace.facts.layers, trace.facts.experts, slots, first)))


def _split(trace: Trace, record: int, slots: int) -> Iterator[Part]:
    experts = trace.facts.experts
    rows = trace.ids[trace.record_start[record] : trace.record_start[record + 1]]
    first = int(trace.record_layer[record]) * experts
    for wave in row_waves(rows, slots, experts):
        keys, counts = np.unique(rows[wave].astype(np.int64), return_counts=True)
        yield Part((keys + first).tolist(), counts.tolist())
