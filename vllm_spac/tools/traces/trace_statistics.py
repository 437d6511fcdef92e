"""Statistics of a routing trace: skew of expert use, reuse distances, LRU hit rates, accuracy of predictors; and of its
drafts: how deep each is in its tree, and how many of each depth were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.recording.trace_file import ACCEPTED, DRAFT, UNKNOWN, Trace


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


def forwards(trace: Trace) -> list[np.ndarray]:
    """Returns, for each record, its distinct experts as ascending keys (layer * experts + expert)."""
    experts = trace.facts.experts
    record = np.repeat(np.arange(trace.records), np.diff(trace.record_start))
    flat = np.unique(trace.ids + (record * experts)[:, None])
    bounds = np.searchsorted(flat, np.arange(1, trace.records) * experts)
    keys = flat % experts + trace.record_layer.astype(np.int64)[flat // experts] * experts
    return np.split(keys, bounds) if trace.records else []


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
    work = zip(forwards(trace), trace.record_layer.tolist(), trace.record_step.tolist(), strict=True)
    for keys, layer, step in work:
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


def accuracy(trace: Trace, **knobs: Any) -> np.ndarray:
    """Returns how often "score >= 1" before a step agrees with "selected in that step"; see ``agreement``.

    Compare it with its base rates: with few experts per step, predicting that none is selected is mostly right.
    """
    estimator = UtilityEstimator(trace.facts.total, **knobs)

    def hot(counts: np.ndarray) -> np.ndarray:
        estimator.observe_step(counts)
        return estimator.scores >= 1

    return agreement(trace, hot)


def nothing_is_hot(trace: Trace) -> np.ndarray:
    """Returns a base rate for ``accuracy``: how often "no expert is selected" is right."""
    return agreement(trace, lambda counts: np.zeros(len(counts), dtype=bool))


def as_last_step(trace: Trace) -> np.ndarray:
    """Returns a base rate for ``accuracy``: how often "the experts that the layer's last step selected" is right."""
    last = np.zeros(trace.facts.total, dtype=np.int64)

    def repeat(counts: np.ndarray) -> np.ndarray:
        last[counts >= 0] = counts[counts >= 0]
        return last > 0

    return agreement(trace, repeat)


def agreement(trace: Trace, predictor: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Returns how often a predictor is right about each expert's selection in the next step.

    Before the first step, the prediction is that no expert is selected.

    Args:
        predictor: takes in the counts of a step (``Trace.step_counts``, int64 [keys]); returns bool [keys].

    Returns:
        float64 [layers], the share of experts and steps; nan for a layer that never ran.
    """
    layers, total = trace.facts.layers, trace.facts.total
    right, seen, hot = np.zeros(total), np.zeros(total), np.zeros(total, dtype=bool)
    for counts in trace.step_counts():
        if counts is not None:
            right += (counts >= 0) & (hot == (counts > 0))
            seen += counts >= 0
            hot = predictor(counts)
    with np.errstate(invalid="ignore"):
        return right.reshape(layers, -1).sum(axis=1) / seen.reshape(layers, -1).sum(axis=1)


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
