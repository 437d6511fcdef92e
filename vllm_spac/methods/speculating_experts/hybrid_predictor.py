"""For each layer the predictor that was right most often, as measured on texts that no predictor was fitted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import Seen, Signal


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
        found = torch.stack([recall(beside[name], material) for name in sorted(beside)])
        return {"choice": found.argmax(0)}

    def of_next(self, seen: Seen) -> Tensor:
        return self._used[self.chosen[seen.layer + 1]].of_next(seen)


def recall(predictor: Trained, material: Material) -> Tensor:
    """Returns float [layers]: recall of the guesses one layer ahead, on texts not fitted to; -1 without guess."""
    (samples, _), top_k = material.others.halves(), material.sizes.top_k
    found, rows_of = torch.zeros(samples.layers), torch.zeros(samples.layers)
    for asked, rows, guess in samples.asked(predictor):
        true = samples.ids[asked + 1, rows].long()
        best = guess.scores.topk(top_k).indices
        found[asked + 1] += (best[:, :, None] == true[:, None]).any(1).float().mean(1).sum()
        rows_of[asked + 1] += len(true)
    return torch.where(rows_of > 0, found / rows_of.clamp(min=1), -1.0)
