"""One learned matrix per layer: a later router's scores from this layer's input and choice, and the token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.predictors._fitting import distil, ridge
from vllm_spac.predictors._maps import Maps
from vllm_spac.predictors._trained import Material, Sizes, Trained, mixing
from vllm_spac.predictors.base import Guess, Seen, Signal
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
        self._table, self._jumps = table, {jump: number for number, jump in enumerate(sizes.jumps())}
        self._targets = [target for _, target in self._jumps]
        # Of a map, the rows of the token table are used once per step, for all layers together.
        self._of_table = torch.stack([self._maps[jump][-sizes.experts :] for jump in self._jumps])
        self._biases = torch.stack([self._bias[jump] for jump in self._jumps])[:, None]
        self._bias = {}
        self._maps = {jump: self._maps[jump][: -sizes.experts].clone() for jump in self._jumps}
        self._tokens = torch.empty(0, dtype=torch.int64)  # of the step that ``_by_token`` is of
        self._by_token = torch.empty(0)  # [jumps, rows, N], the part of the scores that follows from the tokens
        self._features = torch.empty(0)  # [rows, d + N], written anew in each layer

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
        rows, width = seen.hidden.shape
        if rows > len(self._features):
            with torch.inference_mode(False):  # a buffer for calls inside and outside of it
                self._features = torch.empty(rows, width + self.sizes.experts)
        features = self._features[:rows]
        features[:, :width] = seen.hidden
        features[:, width:].zero_().scatter_(1, seen.ids.long(), seen.weights.float())
        return features

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        assert seen.tokens is not None
        if seen.tokens is not self._tokens and not torch.equal(seen.tokens, self._tokens):
            self._tokens, self._by_token = seen.tokens, self._scores_by_token(seen.tokens)
        return list(super().guesses(seen))  # now: the features are written anew in the next layer

    def scores_of(self, jump: tuple[int, int], features: Tensor, seen: Seen) -> Tensor:
        return torch.addmm(self._by_token[self._jumps[jump]], features, self._maps[jump])

    def _scores_by_token(self, tokens: Tensor) -> Tensor:
        table = logarithm(self._table.scores_of(slice(None), self._table.places(tokens)))
        return torch.baddbmm(self._biases, table[self._targets], self._of_table)


def logarithm(probs: Tensor) -> Tensor:
    """Returns the logarithm of probabilities, those below a least one as if they were that."""
    return probs.clamp(min=_LEAST).log()
