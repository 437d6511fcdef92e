"""Which experts are expected soon, and how soon: guesses about layers that have not run. No slots, no reads, no time.

Order is counted in layers, across the end of a step: after the last layer of a step comes the first one of the next.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_spac.predictors.base import START, Guess


class Expected:
    """The experts that guesses name for the next run of each layer, and those that the running layer uses.

    A guess names ``top_k`` experts for each of its rows. Those that more rows name, and more highly, are likelier.

    Args:
        layers, experts: numbers of layers, and of experts per layer; the keys of a layer are consecutive.
        top_k: experts per row.
    """

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.layers, self._experts, self._top_k = layers, experts, top_k
        self._running = START
        self._left = False  # the running layer has its output
        self._named: dict[int, list[int]] = {}  # layer that has not run -> keys, the likeliest first
        self._soon = np.zeros(layers * experts, dtype=bool)

    def begin(self) -> None:
        """A step begins: forgets what was expected of layers that the last one did not run."""
        self._pass(range(max(0, self._running + self._left), self.layers))
        self._running, self._left = START, False

    def clear(self) -> None:
        """A step begins, about which nothing is guessed."""
        self._named.clear()
        self._soon[:] = False
        self._running, self._left = START, False

    def enter(self, layer: int, used: np.ndarray) -> None:
        """The router of ``layer`` has chosen the experts ``used``, int in any shape, of the layer."""
        first = self._running + self._left
        if layer >= first:
            passed = range(max(0, first), layer + 1)
        else:  # no step began in between
            passed = range(first, self.layers + layer + 1)
        self._pass(passed)
        self._running, self._left = layer, False
        self._soon[layer * self._experts + used.ravel()] = True

    def leave(self) -> None:
        """The running layer has its output: what it used is not expected, and it may be guessed about its next run."""
        if self._running != START:
            self._pass(range(self._running, self._running + 1))
            self._left = True

    def name(self, guess: Guess) -> None:
        """Takes ``guess`` in place of earlier ones about the same layers, except about the running layer."""
        for layer, experts in named(guess, self._experts, self._top_k):
            self.expect(layer, experts)

    def expect(self, layer: int, experts: np.ndarray) -> None:
        """Takes ``experts`` (int, distinct, the likeliest first) of ``layer`` as ``name`` takes those of a guess."""
        if layer != self._running or self._left:
            self._pass(range(layer, layer + 1))
            keys = experts + layer * self._experts
            self._named[layer] = keys.tolist()
            self._soon[keys] = True

    def distance(self, key: int) -> int:
        """Returns how many layers later the layer of ``key`` runs next: 0 for one that runs now, else 1 or more."""
        ahead = key // self._experts - self._running
        return ahead if ahead >= self._left else ahead + self.layers

    def ranked(self) -> Iterator[int]:
        """Yields the keys that guesses name: those of nearer layers first, then the likelier ones."""
        for layer in sorted(self._named, key=lambda layer: self.distance(layer * self._experts)):
            yield from self._named[layer]

    def of(self, layer: int) -> list[int]:
        """Returns the keys that guesses name of ``layer``, the likelier ones first."""
        return self._named.get(layer, [])

    def until(self, key: int) -> Container[int]:
        """Returns the expected keys that are needed in the layer of ``key`` or before it."""
        return _Until(self, self.distance(key))

    def __contains__(self, key: Any) -> bool:
        return bool(self._soon[key])

    def _pass(self, layers: range) -> None:
        """Forgets what is expected of ``layers``, counted on into the next step."""
        for layer in layers:
            layer %= self.layers
            self._named.pop(layer, None)
            self._soon[layer * self._experts : (layer + 1) * self._experts] = False


@dataclass(frozen=True, slots=True)
class _Until:
    """Expected keys whose layers run at most ``distance`` layers later."""

    expected: Expected
    distance: int

    def __contains__(self, key: Any) -> bool:
        return key in self.expected and self.expected.distance(key) <= self.distance


def named(guess: Guess, experts: int, top_k: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields each layer that ``guess`` scores, and the experts that it names of it, the likeliest first: int [n].

    Args:
        experts: experts per layer.
        top_k: experts that a row names.
    """
    scores = guess.scores.numpy().reshape(len(guess.scores), -1, experts)
    best = (-scores).argsort(axis=2, kind="stable")[:, :, :top_k]
    for number in range(scores.shape[1]):
        yield guess.first // experts + number, _ranked(scores[:, number], best[:, number])


def _ranked(scores: np.ndarray, best: np.ndarray) -> np.ndarray:
    """Returns the experts that rows name, the likeliest first.

    Args:
        scores: float [rows, experts].
        best: int [rows, k], the best of a row first.
    """
    if len(best) == 1:  # each call into numpy takes a microsecond or more, in every layer of every token
        likeliest = best[0]
        return likeliest[scores[0][likeliest] > -np.inf]
    names = np.take_along_axis(scores, best, 1) > -np.inf
    votes = np.bincount(best.ravel(), (np.arange(best.shape[1], 0, -1) * names).ravel())
    order = np.argsort(-votes, kind="stable")
    return order[: np.count_nonzero(votes)]
