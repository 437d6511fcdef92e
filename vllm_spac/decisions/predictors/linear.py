"""One learned matrix per layer: a later router's scores from this layer's input and choice, and the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._features import LayerFeatures, distil, ridge
from vllm_spac.decisions.predictors._maps import Maps
from vllm_spac.decisions.predictors._trained import Material, Sizes, Trained, mixing
from vllm_spac.decisions.predictors.base import Seen, Signal
from vllm_spac.decisions.predictors.token_table import Means, TokenTable, logarithm

_STEPS, _RATE = 300, 2e-3


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
        self._table, self._features = table, LayerFeatures(sizes.width, sizes.experts)
        jumps = [jump for layer in self._maps for jump in sizes.jumps_from(layer)]
        self._targets = torch.tensor([target for _, target in jumps], dtype=torch.int64)
        self._widths = [bias.shape[0] for bias in self._bias.values()]
        # Of a map, the rows of the token table are used once per step, for all layers together.
        parts = [matrix[-sizes.experts :] for matrix in self._maps.values()]
        self._of_table = torch.cat([torch.empty(sizes.experts, 0), *parts], 1).unflatten(1, (-1, sizes.experts))
        self._of_table = self._of_table.transpose(0, 1).contiguous()  # [jumps, N, N]
        self._biases = torch.cat([torch.empty(0), *self._bias.values()]).view(-1, 1, sizes.experts)
        self._bias = {}
        self._maps = {layer: matrix[: -sizes.experts].clone() for layer, matrix in self._maps.items()}
        self._tokens: Tensor | None = None  # of the step that ``_by_token`` is of
        self._by_token: tuple[Tensor, ...] = ()  # per layer, the part of its scores that follows from the tokens

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
        return self._features.of(seen)

    def scores_of(self, seen: Seen) -> Tensor:
        assert seen.tokens is not None
        if seen.tokens is not self._tokens and not self._has(seen.tokens):
            self._tokens, self._by_token = seen.tokens, self.of_step(seen.tokens).split(self._widths, 1)
        return torch.addmm(self._by_token[seen.layer], self.features(seen), self._maps[seen.layer])

    def _has(self, tokens: Tensor) -> bool:
        """Whether ``tokens`` are those of ``_by_token``; on a GPU a comparison would wait."""
        return self._tokens is not None and not tokens.is_cuda and torch.equal(tokens, self._tokens)

    def of_step(self, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        table = logarithm(self._table.scores_of(slice(None), self._table.places(tokens)))
        found = table.new_empty(len(tokens), len(self._of_table), self.sizes.experts)
        torch.baddbmm(self._biases, table[self._targets], self._of_table, out=found.transpose(0, 1))
        return found.flatten(1)
