"""Shared by predictors that score a later layer with one matrix: features of a layer times a map."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import Seen, Signal


class Maps(Trained):
    """Scores of layer l + a = features of layer l @ map(a, l + a) + bias(a, l + a), for a = 1 .. reach.

    Maps are stored in bfloat16, and computed with in float32: those of a layer side by side, so that one product gives
    the scores of all layers that it sees.
    """

    needs = frozenset({Signal.ROUTER_INPUT})

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self.reach = sizes.reach
        self._maps: dict[int, Tensor] = {}  # layer l -> [features, N * layers ahead], from layer l + 1 on
        self._bias: dict[int, Tensor] = {}
        for layer in range(sizes.layers - 1):
            names = ["{}.{}".format(*jump) for jump in sizes.jumps_from(layer)]
            self._maps[layer] = torch.cat([tensors[f"map.{name}"].float() for name in names], 1)
            self._bias[layer] = torch.cat([tensors[f"bias.{name}"] for name in names])

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        shape = cls.features_of(sizes), sizes.experts
        found: Specs = {f"map.{ahead}.{target}": (torch.bfloat16, shape) for ahead, target in sizes.jumps()}
        return found | {f"bias.{ahead}.{target}": (torch.float32, shape[1:]) for ahead, target in sizes.jumps()}

    @classmethod
    def stages(cls, sizes: Sizes) -> int:
        return len(sizes.jumps())

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        ahead, target = material.sizes.jumps()[stage]
        return cls.stored({(ahead, target): cls.fit(ahead, target, material)})

    @staticmethod
    def stored(maps: Mapping[tuple[int, int], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        """Returns the tensors of a file for maps and biases by (layers ahead, layer that is predicted)."""
        found: dict[str, Tensor] = {}
        for (ahead, target), (weight, bias) in maps.items():
            found |= {f"map.{ahead}.{target}": weight.bfloat16(), f"bias.{ahead}.{target}": bias.float().clone()}
        return found

    def of_next(self, seen: Seen) -> Tensor:
        return torch.addmm(self._bias[seen.layer], self.features(seen), self._maps[seen.layer])

    @classmethod
    @abstractmethod
    def features_of(cls, sizes: Sizes) -> int:
        """Returns the number of features."""

    @classmethod
    @abstractmethod
    def fit(cls, ahead: int, target: int, material: Material) -> tuple[Tensor, Tensor]:
        """Returns map [features, N] and bias [N] for scores of layer ``target``, ``ahead`` layers earlier."""

    @abstractmethod
    def features(self, seen: Seen) -> Tensor:
        """Returns float32 [rows, features] of a layer, valid until the next call."""
