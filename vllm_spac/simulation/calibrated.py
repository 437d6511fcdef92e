"""What policies that depend on a calibration are built from in a replay: the experts' uses of other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from vllm_spac.errors import ConfigError
from vllm_spac.traces.format import Trace, TraceFacts
from vllm_spac.traces.statistics import uses


def take_counts(policy: str, knobs: dict[str, Any], facts: TraceFacts) -> np.ndarray:
    """Takes ``trace`` or ``calibration`` out of a policy's knobs and returns its counts, int64 [layers, experts].

    Either is a file or, as a Python tuple, several files whose counts are added.

    Raises:
        ConfigError: neither or both are given, or a file is of a model of another size.
    """
    given = {kind: knobs.pop(kind) for kind in ("trace", "calibration") if kind in knobs}
    if len(given) != 1:
        raise ConfigError(
            f"policy {policy} needs to know how often each expert is used: name a trace, {policy}@trace=FILE, or a "
            f"calibration, {policy}@calibration=FILE"
        )
    [(kind, paths)] = given.items()
    total = np.zeros((facts.layers, facts.experts), dtype=np.int64)
    for path in paths if isinstance(paths, tuple) else (paths,):
        counts = _counts(kind, str(path))
        if counts.shape != total.shape:
            layers, experts = counts.shape
            raise ConfigError(
                f"policy {policy}: {path} is of {layers} layers of {experts} experts, and the replayed trace of "
                f"{facts.layers} of {facts.experts}; use one of the same model"
            )
        total += counts
    return total


def _counts(kind: str, path: str) -> np.ndarray:
    if kind == "trace":
        return uses(Trace.load(path))
    from vllm_spac.budget.calibration import Calibration  # torch, which takes a second

    return Calibration.read(Path(path)).counts.numpy()
