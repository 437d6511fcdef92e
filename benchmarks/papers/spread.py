"""Shared by the papers' figures: several traces of one model, and the spread of a curve over them.

Those of benchmarks/traces are of the same prompts: their spread is that of drafts and batches, not of texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import ROOT, TRACES, is_toy, provenance, sha256, trace_files
from vllm_spac.errors import ConfigError
from vllm_spac.recording.trace_file import Trace


class Recorded(NamedTuple):
    """A trace and the checksum of its file."""

    trace: Trace
    sha256: str


def load(paths: Iterable[Path] | None) -> dict[str, Recorded]:
    """Returns the traces of files and folders by name; default: those of benchmarks/traces.

    Raises:
        ConfigError: there is none, two have one name, or they are of models of different sizes.
    """
    given = list(paths or [TRACES])
    files = trace_files(given)
    found = {file.stem: Recorded(Trace.load(file), sha256(file)) for file in files}
    if not files or len(found) < len(files):
        raise ConfigError(f"{', '.join(map(str, given))}: name traces, or folders of them, each with a name of its own")
    known = [one.trace.facts for one in found.values()]
    if len({(model.layers, model.experts, model.top_k) for model in known}) > 1:
        raise ConfigError("the traces are of different models; measure each model by itself")
    return found


def known(loaded: Mapping[str, Recorded]) -> dict[str, Any]:
    """Returns where a result is from: provenance, model and traces."""
    one = next(iter(loaded.values())).trace.facts
    models = sorted({recorded.trace.facts.model for recorded in loaded.values()})
    return {
        "provenance": provenance(),
        "model": models,
        "toy_model": any(is_toy(ROOT / model) for model in models),
        "layers": one.layers,
        "experts": one.experts,
        "top_k": one.top_k,
        "traces": {name: {"sha256": recorded.sha256} for name, recorded in loaded.items()},
    }


def result(loaded: Mapping[str, Recorded], found: Mapping[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Returns the result of a figure: where it is from, its curves by trace, and their spread.

    Args:
        found: name of the trace -> curves by name; traces that are missing were left out.
    """
    names = next(iter(found.values()))
    return known({name: loaded[name] for name in found}) | {
        "left_out": sorted(set(loaded) - set(found)),
        "traces": {name: {"sha256": loaded[name].sha256, **curves} for name, curves in found.items()},
        "spread": {name: of([curves[name] for curves in found.values()]) for name in names},
    }


def nan_to_none(value: Any) -> Any:
    """Returns ``value`` with null for nan, which JSON lacks."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and value != value else value


def of(curves: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """Returns mean, least and most of each point over the curves; a point that is nan in all of them is left nan."""
    stacked = np.array(curves, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        missing = np.isnan(stacked).all(axis=0)
        filled = np.where(missing, 0.0, stacked)
        points = {
            "mean": np.nanmean(filled, axis=0),
            "low": np.nanmin(filled, axis=0),
            "high": np.nanmax(filled, axis=0),
        }
    return {name: [round(float(x), 5) for x in np.where(missing, np.nan, values)] for name, values in points.items()}
