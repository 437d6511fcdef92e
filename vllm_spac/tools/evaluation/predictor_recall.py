"""The recall of predictors on samples: of the experts that a router chose, those named before. Their table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from statistics import median

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from vllm_spac import components
from vllm_spac.config.types import SlotCount
from vllm_spac.decisions.predictors._recall import RECALLS, Hits
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import START, Predictor, Signal
from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib

_TIMED = 64  # rows


def measure(predictor: Predictor, samples: Samples, missed: Tensor) -> dict:
    """Returns what ``vllm-spac predictors measure`` reports of a predictor: recalls, microseconds per layer, bytes.

    Args:
        predictor: as built; one that needs counts has seen no step.
        samples: of texts that it was not fitted to.
        missed: as in ``Hits``.
    """
    hits = Hits.of(predictor, samples, missed)
    nbytes = predictor.nbytes if isinstance(predictor, Trained) else predictor.scores.nbytes
    costs = {"us_per_layer": microseconds(predictor, samples), "bytes": nbytes}
    return hits.result() | costs | {"reach": predictor.reach, "needs": sorted(predictor.needs)}


def microseconds(predictor: Predictor, samples: Samples) -> float:
    """Returns the median time per layer of all guesses about one row, with the threads that torch has here."""
    layers = range(START, samples.layers if predictor.reach else START + 1)
    spent = []
    for row in range(min(_TIMED, samples.rows)):
        seen = [samples.inputs(layer, slice(row, row + 1), predictor.needs) for layer in layers]
        start = time.perf_counter()
        for one in seen:
            list(predictor.guesses(one))
        spent.append((time.perf_counter() - start) / samples.layers)
    return 1e6 * median(spent)


def history(samples: Samples) -> dict[str, Predictor]:
    """Returns the predictors that look at counts alone and are not trained, by name."""
    predictors: dict[str, Predictor] = {}
    for name in components.names("predictors"):
        kind = components.find("predictors", name)
        if not issubclass(kind, Trained) and kind.needs == {Signal.COUNTS}:
            predictors[name] = kind(num_experts=samples.layers * samples.experts)
    return predictors


def misses(samples: Samples, slots: int) -> Tensor:
    """Returns bool [L, rows, k]: chosen experts that one LRU cache per layer would not have had; it starts empty.

    Args:
        slots: experts that a layer's cache holds between rows.
    """
    missed = torch.empty(samples.ids.shape, dtype=torch.bool)
    for layer in range(samples.layers):
        cached: dict[int, None] = {}
        for row, ids in enumerate(samples.ids[layer].tolist()):
            for place, expert in enumerate(ids):
                missed[layer, row, place] = expert not in cached
            for expert in ids:
                cached.pop(expert, None)
                cached[expert] = None
            while len(cached) > slots:
                del cached[next(iter(cached))]
    return missed


def cache_of(slots: SlotCount, experts: int) -> int:
    """Returns the experts that the cache of one layer holds: those per layer, or the share of a layer, rounded up."""
    if slots.per_layer is not None:
        return min(slots.per_layer, experts)
    if slots.share is None:
        raise ConfigError("the cache of a layer is a number (32) or a percentage (25%)")
    return math.ceil(slots.share * experts)


def table(measured: Mapping[str, dict], title: str, caption: str) -> Table:
    """Returns a table of all predictors, and under each its recall by horizon if it has several."""
    columns = ("predictor", "horizon", "R@k", "R@2k", "R@k on misses", "layers", "us per layer", "bytes")
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=SIMPLE_HEAD)
    for column in columns:
        made.add_column(column, justify="left" if column in ("predictor", "horizon") else "right")
    for name, one in ranked(measured):
        horizons = list(one["by_horizon"])
        known = sum(layer is not None for layer in one["by_layer"])
        costs = (f"{known} of {len(one['by_layer'])}", f"{one['us_per_layer']:.0f}", gib(one["bytes"]))
        made.add_row(name, horizons[0] if len(horizons) == 1 else "last", *cells(one), *costs)
        for horizon in horizons if len(horizons) > 1 else ():
            made.add_row("", horizon, *cells(one["by_horizon"][horizon]), "", "", "")
    return made


def ranked(measured: Mapping[str, dict]) -> list[tuple[str, dict]]:
    """Returns the predictors in the order of their recall, the lowest first."""
    return sorted(measured.items(), key=lambda item: item[1]["recall_at_k"])


def cells(recalls: Mapping) -> list[str]:
    """Returns the three recalls as text."""
    return ["-" if recalls[name] is None else f"{recalls[name]:.3f}" for name in RECALLS]
