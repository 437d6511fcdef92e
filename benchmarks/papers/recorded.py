"""Shared by the papers' figures: several traces of one model, and where a result is from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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


def nan_to_none(value: Any) -> Any:
    """Returns ``value`` with null for nan, which JSON lacks."""
    if isinstance(value, dict):
        return {key: nan_to_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nan_to_none(item) for item in value]
    return None if isinstance(value, float) and value != value else value
