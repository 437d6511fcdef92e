"""One learned matrix per layer: a later router's scores from this layer's input and choice, and the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.predictors._fitting import distil, ridge
from vllm_spac.predictors._maps import Maps
from vllm_spac.predictors._trained import Material, Sizes, Trained, mixing
from vllm_spac.predictors.base import Seen, Signal
from vllm_spac.predictors.token_table import Means, TokenTable

_STEPS, _RATE = 300, 2e-3
_LEAST = 1e-5  # probability whose logarithm stands for all smaller ones


class Linear(Maps):
    """Scores of layer t on layer l are [h_l | m_l | log table_t(token) | 1] @ A.

    h_l is the router input, m_l [rows, N] the routing weights, table_t the token table of layer t. A starts as the
    ridge regression to the router's logits and is then trained by the KL divergence to its distribution.
    """

    needs = frozenset({Signal.ROUTER_INPUT, Signal.ROUTING, Signal.TOKENS})
    uses: ClassVar[tuple[str, ...] | None] = ("token_table",)

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        table = beside["token_table"]
        assert isinstance(table, TokenTable)
        self._table = table

    @classmethod
    def features_of(cls, sizes: Sizes) -> int:
        return sizes.width + 2 * sizes.experts

    @classmethod
    def fit(cls, ahead: int, target: int, material: Material, beside: Mapping[str, Trained]) -> tuple[Tensor, Tensor]:
        samples, layer = material.samples, target - ahead
        chosen = mixing(samples.ids[layer], samples.weights[layer], samples.experts)
        table = logarithm(Means.of(samples, target).without_the_row())
        inputs = torch.cat([samples.hidden[layer].float(), chosen, table, torch.ones(samples.rows, 1)], 1)
        logits = samples.logits[target]
        matrix = ridge(inputs, logits)
        jump = material.sizes.jumps().index((ahead, target))
        distil([matrix], lambda rows: rows @ matrix, inputs, logits, steps=_STEPS, rate=_RATE, seed=jump)
        return matrix[:-1], matrix[-1]

    def features(self, seen: Seen) -> Tensor:
        assert seen.hidden is not None and seen.ids is not None and seen.weights is not None
        return torch.cat([seen.hidden.float(), mixing(seen.ids, seen.weights, self.sizes.experts)], 1)

    def scores_of(self, jump: tuple[int, int], features: Tensor, seen: Seen) -> Tensor:
        assert seen.tokens is not None
        first, table = self._maps[jump].split([features.shape[1], self.sizes.experts])
        scores = torch.addmm(self._bias[jump], features, first)
        return scores.addmm_(logarithm(self._table.scores_of(jump[1], self._table.places(seen.tokens))), table)


def logarithm(probs: Tensor) -> Tensor:
    """Returns the logarithm of probabilities, those below a least one as if they were that."""
    return probs.clamp(min=_LEAST).log()
