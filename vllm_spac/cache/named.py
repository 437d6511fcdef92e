"""Which experts a guess names: the first k of each row and layer.

Names take a few bytes per row, so that a guess made on a device reaches the host in the copy that brings the routing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.predictors.base import Guess


def named(guess: Guess, experts: int, top_k: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each layer that ``guess``, which is on the host, scores, and the experts that it names: int [n].

    Those that more rows name, and more highly, come first.

    Args:
        experts: experts per layer.
        top_k: experts that a row names.
    """
    scores = guess.scores.numpy().reshape(len(guess.scores), -1, experts)
    best = (-scores).argsort(axis=2, kind="stable")[:, :, :top_k]
    for number in range(scores.shape[1]):
        layer = guess.first // experts + number
        if len(best) == 1:  # each call into numpy takes a microsecond or more, in every layer of every token
            likeliest = best[0, number]
            yield layer, likeliest[scores[0, number][likeliest] > -np.inf]
        else:
            places = np.take_along_axis(scores[:, number], best[:, number], 1) > -np.inf
            yield layer, _ranked(best[:, number], places)


@dataclass(frozen=True, eq=False)
class Named:
    """The experts that the rows of a guess name.

    Attributes:
        first: number of the first layer.
        ids: int64 [rows, layers, k], experts, the likeliest first, on any device; -1: the row names no more.
    """

    first: int
    ids: Tensor

    @classmethod
    def of(cls, guess: Guess, experts: int, top_k: int) -> Self:
        """As ``named``, launched on the device of ``guess``; of equal scores any may come first."""
        scores, ids = guess.scores.unflatten(1, (-1, experts)).topk(top_k)
        return cls(guess.first // experts, ids.masked_fill_(scores == -torch.inf, -1))

    def by_layer(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields what ``named`` does; ``ids`` are on the host."""
        ids = self.ids.numpy()
        for number in range(ids.shape[1]):
            best = ids[:, number]
            yield self.first + number, _ranked(np.maximum(best, 0), best >= 0)


def _ranked(best: np.ndarray, names: np.ndarray) -> np.ndarray:
    """Returns the experts that rows name, the likeliest first.

    Args:
        best: int [rows, k], the best of a row first.
        names: bool [rows, k], which of them the row names.
    """
    votes = np.bincount(best.ravel(), (np.arange(best.shape[1], 0, -1) * names).ravel())
    order = np.argsort(-votes, kind="stable")
    return order[: np.count_nonzero(votes)]
