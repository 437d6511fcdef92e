"""Measures predictors on samples: the share of the experts a router chose that a predictor named before."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.knobs.types import Slots
from vllm_spac.predictors._samples import Samples
from vllm_spac.predictors._trained import Trained
from vllm_spac.predictors.base import START, Predictor, Signal

STEP = "step"  # horizon of guesses at the start of a step
RECALLS = ("recall_at_k", "recall_at_2k", "recall_on_misses")
_TIMED = 64  # rows


class Hits:
    """Counts of one predictor's right guesses, by layer and horizon.

    A horizon is ``STEP``, or the number of layers between a guess and its layer.

    Args:
        samples: judged on.
        missed: bool [L, rows, k], the chosen experts that a cache would not have had.
    """

    def __init__(self, samples: Samples, missed: Tensor) -> None:
        self._samples, self._missed = samples, missed
        self._sums: dict[tuple[str, int], Tensor] = {}  # right in k, right in 2k, right in k of missed, all, missed

    def add(self, asked: int, layer: int, rows: slice, scores: Tensor) -> None:
        """Adds a guess made in layer ``asked`` (or ``START``) about ``layer``: scores [rows, N] or [1, N]."""
        samples = self._samples
        true, missed = samples.ids[layer, rows].long(), self._missed[layer, rows]
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : 2 * samples.top_k]
        right = best.expand(len(true), -1)[:, :, None] == true[:, None]  # [rows, 2k, k]
        in_k, in_2k = right[:, : samples.top_k].any(1), right.any(1)
        found = torch.tensor([in_k.sum(), in_2k.sum(), (in_k & missed).sum(), true.numel(), missed.sum()])
        horizon = STEP if asked == START else str(layer - asked)
        self._sums[horizon, layer] = self._sums.get((horizon, layer), torch.zeros(5)) + found

    def result(self) -> dict:
        """Returns the recalls of each layer's last guess, their means, and all of them by layer and by horizon."""
        horizons = sorted(
            {horizon for horizon, _ in self._sums}, key=lambda name: math.inf if name == STEP else int(name)
        )
        layers = range(self._samples.layers)
        last = [next((self._sums[h, layer] for h in horizons if (h, layer) in self._sums), None) for layer in layers]
        by_horizon = {
            h: _mean([self._sums[h, layer] for layer in layers if (h, layer) in self._sums]) for h in horizons
        }
        by_layer = [None if sums is None else _recalls(sums) for sums in last]
        return _mean([sums for sums in last if sums is not None]) | {"by_layer": by_layer, "by_horizon": by_horizon}


def measure(predictor: Predictor, samples: Samples, missed: Tensor) -> dict:
    """Returns what ``vllm-spac predictors`` reports of one predictor: recalls, and microseconds per layer and bytes.

    Args:
        predictor: as built; one that needs counts has seen no step.
        samples: of texts that it was not fitted to.
        missed: as in ``Hits``.
    """
    hits = Hits(samples, missed)
    for asked, rows, guess in samples.asked(predictor):
        for layer, scores in enumerate(guess.scores.split(samples.experts, 1), guess.first // samples.experts):
            hits.add(asked, layer, rows, scores)
    nbytes = predictor.nbytes if isinstance(predictor, Trained) else predictor.scores.nbytes
    costs = {"us_per_layer": microseconds(predictor, samples), "bytes": nbytes}
    return hits.result() | costs | {"reach": predictor.reach, "needs": sorted(predictor.needs)}


def microseconds(predictor: Predictor, samples: Samples) -> float:
    """Returns the median time per layer of all guesses about one row, with the threads that torch has here."""
    layers = range(START, samples.layers if predictor.reach else START + 1)
    spent = []
    for row in range(min(_TIMED, samples.rows)):
        seen = [samples.seen(layer, slice(row, row + 1), predictor.needs) for layer in layers]
        start = time.perf_counter()
        for one in seen:
            list(predictor.guesses(one))
        spent.append((time.perf_counter() - start) / samples.layers)
    return 1e6 * median(spent)


def history(samples: Samples) -> dict[str, Predictor]:
    """Returns the predictors that look at counts alone and are not trained, by name."""
    found: dict[str, Predictor] = {}
    for name in components.names("predictors"):
        kind = components.find("predictors", name)
        if not issubclass(kind, Trained) and kind.needs == {Signal.COUNTS}:
            found[name] = kind(num_experts=samples.layers * samples.experts)
    return found


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


def cache_of(slots: Slots, experts: int) -> int:
    """Returns the experts that the cache of one layer holds: those per layer, or the share of a layer, rounded up."""
    if slots.per_layer is not None:
        return min(slots.per_layer, experts)
    assert slots.share is not None, "auto is no size"
    return math.ceil(slots.share * experts)


def _recalls(sums: Tensor) -> dict[str, float | None]:
    in_k, in_2k, in_missed, every, missed = sums.tolist()
    return dict(zip(RECALLS, (in_k / every, in_2k / every, in_missed / missed if missed else None), strict=True))


def _mean(found: Iterable[Tensor]) -> dict[str, float | None]:
    """Returns the recalls over all layers together: a layer counts by its rows, or by its misses."""
    return _recalls(torch.stack(list(found)).sum(0))
