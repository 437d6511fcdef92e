"""A predictor without a file, that looks at layers: each of the next two needs what it needed last."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal


class Recent(Predictor):
    needs = frozenset({Signal.ROUTING})
    reach = 2

    def __init__(self, num_experts: int, experts: int = 8) -> None:
        self._layers, self._experts = num_experts // experts, experts
        self._last: dict[int, torch.Tensor] = {}

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        if seen.layer != START and seen.ids is not None:
            scores = torch.zeros(len(seen.ids), self._experts)
            self._last[seen.layer] = scores.scatter_(1, seen.ids.long(), 1.0)
        for ahead in range(1, self.reach + 1):
            layer = (seen.layer + ahead) % self._layers
            if layer in self._last and layer != seen.layer:
                yield Guess(layer * self._experts, self._last[layer])
