"""How often predictors of hot experts are right on a routing trace, and base rates of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator
from vllm_spac.recording.trace_file import Trace


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
