"""The routers' own choice, known before it is made: the ceiling of all predictors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from vllm_spac.predictors.base import START, Guess, Predictor, Seen, Signal


class Oracle(Predictor):
    """Scores all layers at the start of a step: 1 for the experts that will be selected, 0 for the others.

    Args:
        num_experts: number of keys.
    """

    needs = frozenset({Signal.FUTURE})
    offline: ClassVar[str] = "it must know what routers will choose; recorded routing alone can tell it"

    def __init__(self, num_experts: int) -> None:
        self._keys = num_experts

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        if seen.layer == START:
            assert seen.future is not None
            layers, rows, _ = seen.future.shape
            scores = torch.zeros(layers, rows, self._keys // layers).scatter_(2, seen.future.long(), 1.0)
            yield Guess(0, scores.transpose(0, 1).reshape(rows, -1))
