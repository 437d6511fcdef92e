"""For each layer the predictor that was right most often, as measured on texts that no predictor was fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._on_device import OnDevice
from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import START, Guess, Seen, Signal


class Hybrid(OnDevice):
    """Scores each layer by one of the file's other predictors (Speculating Experts' hybrid, over more than two).

    Only guesses at the start of a step and one layer ahead are compared: the last ones before a layer runs.
    """

    uses: ClassVar[tuple[str, ...] | None] = None

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self._names = sorted(beside)
        self._choice = tensors["choice"]
        if self._choice.min() < 0 or self._choice.max() >= len(self._names):
            raise ValueError("a choice of no predictor")
        self.chosen = [self._names[index] for index in self._choice.tolist()]
        self._used = {name: beside[name] for name in sorted(set(self.chosen))}
        self.needs = frozenset().union(*(predictor.needs for predictor in self._used.values()))
        self.reach = max(min(predictor.reach, 1) for predictor in self._used.values())

    @classmethod
    def looks_ahead(cls) -> bool:
        return True  # if one of those that it uses does

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        return {"choice": (torch.int64, (sizes.layers,))}

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        found = torch.stack([recall(beside[name], material) for name in sorted(beside)])
        return {"choice": found.argmax(0)}

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        if seen.layer == START:
            for name, predictor in self._used.items():
                for guess in predictor.guesses(seen):
                    for layer, scores in self._layers(guess):
                        if self.chosen[layer] == name:
                            yield Guess(layer * self.sizes.experts, scores, guess.logits)
        elif (target := seen.layer + 1) < self.sizes.layers:
            for guess in self._used[self.chosen[target]].guesses(seen):
                if guess.first == target * self.sizes.experts:
                    alone = guess.scores.shape[1] == self.sizes.experts
                    yield guess if alone else replace(guess, scores=guess.scores[:, : self.sizes.experts])

    def of_step(self, tokens: Tensor | None) -> Tensor:
        known = {name: self._known(each, tokens) for name, each in self._used.items()}
        found = [known[name][:, layer] for layer, name in enumerate(self.chosen[1:])]
        rows = max((len(each) for each in found), default=1)
        return torch.cat([each.expand(rows, -1) for each in found], 1)

    def _known(self, predictor: Trained, tokens: Tensor | None) -> Tensor:
        """Returns [rows or 1, L - 1, N], what a predictor knows before a step; those of the file are on the device."""
        assert isinstance(predictor, OnDevice)
        found = predictor.of_step(tokens if Signal.TOKENS in predictor.needs else None)
        return found.unflatten(1, (-1, self.sizes.experts))

    def of_next(self, seen: Seen, known: Tensor) -> Tensor:
        predictor = self._used[self.chosen[seen.layer + 1]]
        assert isinstance(predictor, OnDevice)
        return predictor.of_next(seen, known)

    def foresees(self, layer: int) -> bool:
        return self._used[self.chosen[layer]].reach > 0

    def weights_of(self, layer: int, scores: Tensor) -> Tensor:
        predictor = self._used[self.chosen[layer]]
        assert isinstance(predictor, OnDevice)
        return predictor.weights_of(layer, scores)

    def _layers(self, guess: Guess) -> Iterable[tuple[int, Tensor]]:
        return enumerate(guess.scores.split(self.sizes.experts, 1), guess.first // self.sizes.experts)


def recall(predictor: Trained, material: Material) -> Tensor:
    """Returns float [layers]: recall of the last guess about each layer, on texts not fitted to; -1 without guess."""
    (samples, _), experts = material.others.halves(), material.sizes.experts
    found, rows_of = torch.zeros(samples.layers), torch.zeros(samples.layers)
    for asked, rows, guess in samples.asked(predictor):
        for layer, scores in enumerate(guess.scores.split(experts, 1), guess.first // experts):
            if asked == START or layer == asked + 1:
                true = samples.ids[layer, rows].long()
                best = scores.expand(len(true), -1).topk(samples.top_k).indices
                found[layer] += (best[:, :, None] == true[:, None]).any(1).float().mean(1).sum()
                rows_of[layer] += len(true)
    return torch.where(rows_of > 0, found / rows_of.clamp(min=1), -1.0)
