"""The routers' own choice, known before it is made: the ceiling of all predictors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch

from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal


class Oracle(Predictor):
    """Scores 1 for the experts that will be selected, 0 for the others; with ``recall``, of some others instead.

    Args:
        reach: layers that it sees ahead, asked in each layer; 0: all of them, at the start of the step.
        recall: share of the experts that it names which will be selected, in the mean over many; from 0 to 1. In place
            of each of the others it names one that will not be. The same ones in each run.

    Raises:
        ValueError: an argument out of range.
    """

    needs = frozenset({Signal.FUTURE})
    offline: ClassVar[str] = "it must know what routers will choose; recorded routing alone can tell it"

    def __init__(self, num_experts: int, reach: int = 0, recall: float = 1.0) -> None:
        if reach < 0 or not 0 <= recall <= 1:
            raise ValueError("use reach >= 0 and recall from 0 to 1")
        self._keys, self.reach, self._recall = num_experts, reach, recall
        self._random = torch.Generator().manual_seed(0)
        self._named: torch.Tensor = torch.zeros(0, 0, 0)  # [layers, rows, N], scores of the step

    def guesses(self, inputs: PredictorInputs) -> Iterable[Guess]:
        if inputs.layer == START:
            assert inputs.future is not None
            self._named = self._scores(inputs.future.long())
        layers = self._named[0 if inputs.layer == START else inputs.layer + 1 :]
        if self.reach:
            layers = layers[: 0 if inputs.layer == START else self.reach]
        if len(layers):
            first = self._keys - self._named[0, 0].numel() * (len(self._named) - inputs.layer - 1)
            yield Guess(first, layers.transpose(0, 1).flatten(1))

    def _scores(self, future: torch.Tensor) -> torch.Tensor:
        """Returns the scores of all layers, [layers, rows, N]; ``future`` as in ``PredictorInputs``."""
        layers, rows, top_k = future.shape
        shape = layers, rows, self._keys // layers
        if self._recall < 1:
            others = torch.rand(shape, generator=self._random).scatter(2, future, -1.0).topk(top_k).indices
            future = torch.where(torch.rand(future.shape, generator=self._random) < self._recall, future, others)
        return torch.zeros(shape).scatter_(2, future, 1.0)
