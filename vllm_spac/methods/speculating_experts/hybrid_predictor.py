"""For each layer the predictor that was right most often, as measured on texts that no predictor was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._recall import Hits
from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import PredictorInputs, Signal


class Hybrid(Trained):
    """Scores each layer by one of the file's other predictors (Speculating Experts' hybrid, over more than two).

    Only guesses one layer ahead are compared: the last ones before a layer runs.
    """

    needs = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING})  # of all that it may choose
    chooses: ClassVar[bool] = True

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        names, choice = sorted(beside), tensors["choice"]
        if choice.min() < 0 or choice.max() >= len(names):
            raise ValueError("a choice of no predictor")
        self.chosen = [names[index] for index in choice.tolist()]  # of each layer; of the first one it means nothing
        self._used = {name: beside[name] for name in sorted(set(self.chosen))}

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        return {"choice": (torch.int64, (sizes.layers,))}

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        guessed = [Hits.of(beside[name], material.others).result()["by_layer"] for name in sorted(beside)]
        recalls = [[-1.0 if layer is None else layer["recall_at_k"] for layer in layers] for layers in guessed]
        return {"choice": torch.tensor(recalls).argmax(0)}

    def of_next(self, inputs: PredictorInputs) -> Tensor:
        return self._used[self.chosen[inputs.layer + 1]].of_next(inputs)
