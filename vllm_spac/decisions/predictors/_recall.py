"""Counts how often predictors are right: the share of the experts a router chose that a predictor named before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors.base import START, Predictor

STEP = "step"  # horizon of guesses at the start of a step
RECALLS = ("recall_at_k", "recall_at_2k", "recall_on_misses")


class Hits:
    """Counts of one predictor's right guesses, by layer and horizon.

    A horizon is ``STEP``, or the number of layers between a guess and its layer.

    Args:
        missed: bool [L, rows, k], the chosen experts that a cache would not have had; None: none of them.
    """

    def __init__(self, samples: Samples, missed: Tensor | None = None) -> None:
        self._samples = samples
        self._missed = torch.zeros(samples.ids.shape, dtype=torch.bool) if missed is None else missed
        self._sums: dict[tuple[str, int], Tensor] = {}  # right in k, right in 2k, right in k of missed, all, missed

    @classmethod
    def of(cls, predictor: Predictor, samples: Samples, missed: Tensor | None = None) -> Hits:
        """Returns the counts of all guesses of ``predictor``; one that needs counts has seen no step."""
        hits = cls(samples, missed)
        for asked, rows, guess in samples.guesses_of(predictor):
            for layer, scores in enumerate(guess.scores.split(samples.experts, 1), guess.first // samples.experts):
                hits.add(asked, layer, rows, scores)
        return hits

    def add(self, asked: int, layer: int, rows: slice, scores: Tensor) -> None:
        """Adds a guess made in layer ``asked`` (or ``START``) about ``layer``: scores [rows, N] or [1, N]."""
        samples = self._samples
        true, missed = samples.ids[layer, rows].long(), self._missed[layer, rows]
        values, best = (each[:, : 2 * samples.top_k] for each in scores.sort(dim=1, descending=True, stable=True))
        best = best.where(values > -torch.inf, -1)  # -inf: not named
        right = best.expand(len(true), -1)[:, :, None] == true[:, None]  # [rows, 2k, k]
        in_k, in_2k = right[:, : samples.top_k].any(1), right.any(1)
        found = torch.tensor([in_k.sum(), in_2k.sum(), (in_k & missed).sum(), true.numel(), missed.sum()])
        horizon = STEP if asked == START else str(layer - asked)
        self._sums[horizon, layer] = self._sums.get((horizon, layer), torch.zeros(5)) + found

    @property
    def horizons(self) -> list[str]:
        """Horizons of the guesses, the nearest first."""
        return sorted({horizon for horizon, _ in self._sums}, key=distance)

    def result(self) -> dict:
        """Returns the recalls of each layer's last guess, their means, and all of them by layer and by horizon."""
        horizons, layers = self.horizons, range(self._samples.layers)
        last = [next((self._sums[h, layer] for h in horizons if (h, layer) in self._sums), None) for layer in layers]
        by_horizon = {
            h: _mean([self._sums[h, layer] for layer in layers if (h, layer) in self._sums]) for h in horizons
        }
        by_layer = [None if sums is None else _recalls(sums) for sums in last]
        return _mean([sums for sums in last if sums is not None]) | {"by_layer": by_layer, "by_horizon": by_horizon}


def distance(horizon: str) -> float:
    """Returns the order of a horizon: its layers, and ``STEP`` after all others."""
    return math.inf if horizon == STEP else int(horizon)


def _recalls(sums: Tensor) -> dict[str, float | None]:
    in_k, in_2k, in_missed, every, missed = sums.tolist()
    return dict(zip(RECALLS, (in_k / every, in_2k / every, in_missed / missed if missed else None), strict=True))


def _mean(counts: list[Tensor]) -> dict[str, float | None]:
    """Returns the recalls over all layers together: a layer counts by its rows, or by its misses."""
    return _recalls(torch.stack(counts).sum(0))
