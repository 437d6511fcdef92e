"""The experts that were selected most, whatever the token: what any other predictor must beat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._on_device import OnDevice
from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import START, Guess, Seen


class Frequency(OnDevice):
    """Scores all layers at the start of a step by the share of rows that selected an expert.

    The counts are those of the training texts; ``Calibration.counts`` are such counts too.
    """

    needs = frozenset()

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        counts = tensors["counts"]
        if counts.min() < 0:
            raise ValueError("a count below 0")
        self._shares = (counts / counts.sum(1, keepdim=True).clamp(min=1)).float()

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        return {"counts": (torch.int64, (sizes.layers, sizes.experts))}

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        sizes = material.sizes
        counts = [torch.bincount(ids.flatten(), minlength=sizes.experts) for ids in material.samples.ids]
        return {"counts": torch.stack(counts)}

    def of_step(self, tokens: Tensor | None) -> Tensor:
        return self._shares[1:].view(1, -1)

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        if seen.layer == START:
            yield Guess(0, self._shares.view(1, -1))
