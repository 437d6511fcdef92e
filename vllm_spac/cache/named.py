"""Which experts a guess names: the first k of each row and layer.

Names take a few bytes per row, so that a guess made on a device reaches the host in the copy that brings the routing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.predictors.base import Guess


class BudgetHint(NamedTuple):
    """What a budget of experts per layer leaves of the names of a step."""

    bounds: Sequence[int] | None = None  # most experts of each layer; None: all that are named
    votes: np.ndarray | None = None  # float [rows], how much each row counts; None: as much as any other

    def of(self, layer: int, experts: np.ndarray) -> np.ndarray:
        """Returns the first of ``experts`` of ``layer``, the likeliest first, as many as it may run."""
        return experts if self.bounds is None else experts[: self.bounds[layer]]


UNBOUNDED = BudgetHint()


def named(guess: Guess, experts: int, top_k: int, hint: BudgetHint = UNBOUNDED) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each layer that ``guess``, which is on the host, scores, and the experts that it names: int [n].

    Those that more rows name, and more highly, come first. Under a budget the names of a row count as much as their
    weights, which the budget sums too, where the scores say what these are; else, and without one, by their place.
    """
    scores = guess.scores.numpy().reshape(len(guess.scores), -1, experts)
    best = (-scores).argsort(axis=2, kind="stable")[:, :, :top_k]
    for number in range(scores.shape[1]):
        layer = guess.first // experts + number
        if len(best) == 1:  # each call into numpy takes a microsecond or more, in every layer of every token
            likeliest = best[0, number]
            yield layer, hint.of(layer, likeliest[scores[0, number][likeliest] > -np.inf])
        else:
            own = np.take_along_axis(scores[:, number], best[:, number], 1)
            weights = _softmax(scores[:, number], own) if guess.logits and hint.bounds is not None else None
            yield layer, hint.of(layer, _ranked(best[:, number], own > -np.inf, hint.votes, weights))


@dataclass(frozen=True, eq=False)
class PredictedExperts:
    """The experts that the rows of a guess name."""

    first: int
    ids: Tensor  # int64 [rows, layers, k], experts, the likeliest first, on any device; -1: the row names no more
    weights: Tensor | None = None  # float32 [rows, layers, k], of the names, for a budget's hint; None: by their place

    @classmethod
    def of(cls, guess: Guess, experts: int, top_k: int, hint: BudgetHint = UNBOUNDED) -> Self:
        """As ``named``, launched on the device of ``guess``; of equal scores any may come first."""
        scores = guess.scores.unflatten(1, (-1, experts))
        best, ids = scores.topk(top_k)
        weights = scores.softmax(-1).gather(-1, ids) if guess.logits and hint.bounds is not None else None
        return cls(guess.first // experts, ids.masked_fill_(best == -torch.inf, -1), weights)

    @property
    def tensors(self) -> list[Tensor]:
        """What has to arrive on the host."""
        return [self.ids] if self.weights is None else [self.ids, self.weights]

    def arrived(self, tensors: Iterator[Tensor]) -> PredictedExperts:
        """Returns the same names on the host; takes the copies of ``tensors`` from an iterator."""
        return PredictedExperts(self.first, next(tensors), None if self.weights is None else next(tensors))

    def by_layer(self, hint: BudgetHint = UNBOUNDED) -> Iterator[tuple[int, np.ndarray]]:
        """Yields what ``named`` does; ``ids`` are on the host."""
        ids, given = self.ids.numpy(), None if self.weights is None else self.weights.numpy()
        for number in range(ids.shape[1]):
            best, layer = ids[:, number], self.first + number
            weights = None if given is None else given[:, number]
            yield layer, hint.of(layer, _ranked(np.maximum(best, 0), best >= 0, hint.votes, weights))


def _ranked(best: np.ndarray, names: np.ndarray, rows: np.ndarray | None, weights: np.ndarray | None) -> np.ndarray:
    """Returns the experts that rows name, the likeliest first.

    Args:
        best: int [rows, k], the best of a row first.
        names: bool [rows, k], which of them the row names.
        rows: float [rows], votes of the rows; None, and where all rows have one guess: 1 each.
        weights: float [rows, k], how much each name counts; None: by its place, k for the first one.
    """
    each = (np.arange(best.shape[1], 0, -1) if weights is None else weights) * names
    if rows is not None and len(rows) == len(each):
        each = each * rows[:, None]
    votes = np.bincount(best.ravel(), each.ravel())
    order = np.argsort(-votes, kind="stable")
    return order[: np.count_nonzero(votes)]


def _softmax(scores: np.ndarray, of: np.ndarray) -> np.ndarray:
    """Returns the softmax of ``scores`` [rows, experts] at those that are ``of`` [rows, k]."""
    most = scores.max(1, keepdims=True)
    return np.exp(of - most) / np.exp(scores - most).sum(1, keepdims=True)
