"""Scores of all routers from the drafter's hidden states, before the step that verifies the drafts (SP-MoE)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._features import distil, ridge
from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import START, Guess, Seen, Signal
from vllm_spac.decisions.predictors.token_table import Means, TokenTable, logarithm

_STEPS, _RATE = 300, 2e-3


class DraftLinear(Trained):
    """Scores of layer l for a row are [s | log table_l(token) | 1] @ A_l.

    s is the drafter's state after it has read the row's token, table_l the token table of layer l. SP-MoE puts the
    states of draft layer l through the gate of target layer l, which needs a draft model of the target's width and
    depth; EAGLE-3 has one layer, so the map is learned instead: A starts as the ridge regression to the router's logits
    and is then trained by the KL divergence to its distribution. A row without a state, such as the last draft, is
    scored as one with the mean state: by its token.
    """

    needs = frozenset({Signal.TOKENS, Signal.DRAFT})
    uses: ClassVar[tuple[str, ...] | None] = ("token_table",)

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        if not sizes.draft_width:
            raise ValueError("it maps the states of no drafter")
        table, layers = beside["token_table"], range(sizes.layers)
        assert isinstance(table, TokenTable)
        maps = torch.stack([tensors[f"map.{layer}"].float() for layer in layers])  # [L, D + N, N]
        self._table = table
        self._of_state = maps[:, : sizes.draft_width].transpose(0, 1).flatten(1).contiguous()  # [D, L * N]
        self._of_table = maps[:, sizes.draft_width :].contiguous()  # [L, N, N]
        self._bias = torch.cat([tensors[f"bias.{layer}"] for layer in layers])
        self._mean = torch.cat([tensors[f"mean.{layer}"] for layer in layers])

    @classmethod
    def unfit(cls, material: Material) -> str:
        if material.samples.draft is not None:
            return ""
        return "the texts were read without a drafter; add --engine with the speculative_config that you serve with"

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        found: Specs = {}
        for layer in range(sizes.layers):
            found[f"map.{layer}"] = torch.bfloat16, (sizes.draft_width + sizes.experts, sizes.experts)
            found[f"bias.{layer}"] = torch.float32, (sizes.experts,)  # of rows with a state
            found[f"mean.{layer}"] = torch.float32, (sizes.experts,)  # in place of it, of rows without
        return found

    @classmethod
    def stages(cls, sizes: Sizes) -> int:
        return sizes.layers

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        samples, width = material.samples, material.sizes.draft_width
        assert samples.draft is not None, "not trained without a drafter"
        states, known = samples.draft.float(), read(samples.draft)
        mean, deviation = states[known].mean(0), states[known].std(0, unbiased=False) + 1e-5
        states = torch.where(known[:, None], (states - mean) / deviation, 0.0)
        table = logarithm(Means.of(samples, stage).without_the_row())
        inputs, logits = torch.cat([states, table, torch.ones(samples.rows, 1)], 1), samples.logits[stage]
        matrix = ridge(inputs, logits)
        distil([matrix], lambda rows: rows @ matrix, inputs, logits, steps=_STEPS, rate=_RATE, seed=stage)
        matrix[:width] /= deviation[:, None]  # the states of ``guesses`` are not normalised
        of_mean, weight = matrix[-1].clone(), matrix[:-1].bfloat16()
        return {
            f"map.{stage}": weight,
            f"bias.{stage}": of_mean - mean @ weight[:width].float(),
            f"mean.{stage}": of_mean,
        }

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        if seen.layer == START:
            assert seen.tokens is not None and seen.draft is not None
            known, experts = read(seen.draft)[:, None], self.sizes.experts
            states = torch.where(known, seen.draft.float(), 0.0)
            scores = torch.where(known, self._bias, self._mean).addmm_(states, self._of_state)
            table = logarithm(self._table.scores_of(slice(None), self._table.places(seen.tokens)))
            layers = scores.view(len(scores), -1, experts).transpose(0, 1)
            layers.baddbmm_(table, self._of_table)
            yield Guess(0, scores, logits=True)


def read(states: Tensor) -> Tensor:
    """Returns bool [rows]: whether the drafter has read a row's token, so that its ``states`` [rows, D] are known."""
    return ~states[:, 0].isnan()
