"""Statistics of a routing trace: skew of expert use, reuse distances, LRU hit rates, overlap of consecutive tokens.

And of its drafts: how deep each is in its tree, and how many of each depth were accepted.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from vllm_spac.recording.trace_file import ACCEPTED, DRAFT, UNKNOWN, Trace
from vllm_spac.tools.traces.trace_text import Text

_CHUNK = 1 << 12  # tokens


def uses(trace: Trace) -> np.ndarray:
    """Returns int64 [layers, experts]: rows that selected each expert."""
    record = np.repeat(trace.record_layer.astype(np.int64), np.diff(trace.record_start))
    flat = (trace.ids + (record * trace.facts.experts)[:, None]).ravel()
    return np.bincount(flat, minlength=trace.facts.total).reshape(trace.facts.layers, -1)


def skew(trace: Trace, share: float = 0.1) -> np.ndarray:
    """Returns float64 [layers]: fraction of uses by the most used ``share`` of the experts; nan for an unused layer."""
    top = max(1, round(share * trace.facts.experts))
    counts = -np.sort(-uses(trace), axis=1)
    with np.errstate(invalid="ignore"):
        return counts[:, :top].sum(axis=1) / counts.sum(axis=1)


def forwards(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the distinct experts of all records, how many rows selected each, and where each record begins.

    int64 [n] keys (layer * experts + expert), ascending in a record; int64 [n]; and int64 [records + 1].
    """
    experts = trace.facts.experts
    record = np.repeat(np.arange(trace.records), np.diff(trace.record_start))
    flat, rows = np.unique(trace.ids + (record * experts)[:, None], return_counts=True)
    bounds = np.searchsorted(flat, np.arange(trace.records + 1) * experts)
    return flat % experts + np.repeat(trace.record_layer.astype(np.int64) * experts, np.diff(bounds)), rows, bounds


def distances(trace: Trace, *, by_layer: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Returns the reuse distances of experts: one for each use in a layer and step, in execution order.

    Args:
        by_layer: count distinct experts of its own layer only, as a cache of that layer sees them.

    Returns:
        (distinct experts of all layers used since its last use, steps since then): int64 [uses] each, -1 for a first
        use.
    """
    experts = trace.facts.experts
    last = np.full(trace.facts.total, -1, dtype=np.int64)
    last_step = np.full(trace.facts.total, -1, dtype=np.int64)
    stack, steps, clock = [], [], 0
    used, _, bounds = forwards(trace)
    work = zip(pairwise(bounds.tolist()), trace.record_layer.tolist(), trace.record_step.tolist(), strict=True)
    for (first, end), layer, step in work:
        keys = used[first:end]
        recent = np.sort(last[layer * experts : (layer + 1) * experts] if by_layer else last)
        seen = last[keys]
        stack.append(np.where(seen < 0, -1, len(recent) - np.searchsorted(recent, seen, side="right")))
        steps.append(np.where(seen < 0, -1, step - last_step[keys]))
        last[keys] = np.arange(clock, clock + len(keys))
        last_step[keys] = step
        clock += len(keys)
    empty = np.zeros(0, dtype=np.int64)
    return (np.concatenate(stack), np.concatenate(steps)) if stack else (empty, empty)


def lru_curve(stack: np.ndarray, total: int) -> np.ndarray:
    """Returns float64 [total + 1]: hit rates of LRU with 0..total initially empty slots, from stack distances.

    Mattson's algorithm. With distances ``by_layer`` and ``total`` experts per layer: one LRU per layer, with 0..total
    slots each. Exact except for ties within one layer and step, as long as no layer needs more experts than slots.
    """
    histogram = np.bincount(stack[stack >= 0], minlength=total)
    return np.concatenate(([0], np.cumsum(histogram)[:total])) / max(1, len(stack))


def overlap(text: Text) -> np.ndarray:
    """Returns float64 [layers], the share of a token's experts that the token before it in its sequence selected."""
    same, pairs = np.zeros(text.layers), 0
    for first in range(0, len(text) - 1, _CHUNK):
        ids, follows = text.ids[first : first + _CHUNK + 1], text.follows[first + 1 : first + _CHUNK + 1]
        now, before = ids[1:][follows], ids[:-1][follows]
        same += (now[:, :, :, None] == before[:, :, None, :]).any(axis=3).sum(axis=(0, 2))
        pairs += len(now)
    return same / (pairs * text.top_k) if pairs else np.full(text.layers, np.nan)


def draft_depths(trace: Trace) -> np.ndarray:
    """Returns int64 [sum rows]: drafts on the path to each draft, itself included; 0 for other rows."""
    depths = [0] * len(trace.row_kind)
    drafts = np.flatnonzero(trace.row_kind == DRAFT)
    back = np.ones_like(drafts) if trace.row_back is None else trace.row_back[drafts]
    for row, distance in zip(drafts.tolist(), back.tolist(), strict=True):
        depths[row] = 1 + (depths[row - distance] if row else 0)  # a trace of chains may begin with a draft
    return np.array(depths, dtype=np.int64)


def accepted_by_depth(trace: Trace) -> list[tuple[int, int]]:
    """Returns (drafts, accepted drafts) at depth 1, 2, ..., of those whose acceptance is recorded."""
    if trace.row_accepted is None:
        return []
    depths = draft_depths(trace)
    known = (depths > 0) & (trace.row_accepted != UNKNOWN)
    drafts = np.bincount(depths[known])[1:]
    accepted = np.bincount(depths[known & (trace.row_accepted == ACCEPTED)], minlength=len(drafts) + 1)[1:]
    return list(zip(drafts.tolist(), accepted.tolist(), strict=True))
