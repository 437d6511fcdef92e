"""A table from tokens to experts: how each router treated a token in the training texts, whatever stood before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spac.decisions.predictors._on_device import OnDevice
from vllm_spac.decisions.predictors._samples import Samples
from vllm_spac.decisions.predictors._trained import Material, Sizes, Specs, Trained
from vllm_spac.decisions.predictors.base import START, Guess, Seen, Signal

WIDTH = 16  # experts kept for each token and layer
_LEAST = 1e-5  # probability whose logarithm stands for all smaller ones
_SMOOTHING = 4.0  # rows of the mean distribution that each token's own rows are averaged with


class TokenTable(OnDevice):
    """Scores all layers at the start of a step, by token.

    An entry is the mean router distribution of the token's rows, smoothed with that of all rows. Of each entry the
    ``WIDTH`` greatest are stored; the rest of its mass is spread like the mean distribution. A token that the texts did
    not have gets the mean distribution.
    """

    needs = frozenset({Signal.TOKENS})

    def __init__(self, sizes: Sizes, tensors: Mapping[str, Tensor], beside: Mapping[str, Trained]) -> None:
        super().__init__(sizes, tensors, beside)
        self._tokens, self._prior = tensors["tokens"], tensors["prior"]
        if not (self._tokens.diff() > 0).all():
            raise ValueError("tokens are not in ascending order")
        if tensors["ids"].min() < 0 or tensors["ids"].max() >= sizes.experts:
            raise ValueError("an expert that no layer has")
        unknown = self._prior.topk(tensors["ids"].shape[2])  # the last entry is for tokens that are not in the table
        self._ids = torch.cat([tensors["ids"], unknown.indices.short()[:, None]], 1)
        self._probs = torch.cat([tensors["probs"], unknown.values.half()[:, None]], 1)
        self._rest = rest(self._ids.long(), self._probs.float(), self._prior[:, None])

    @classmethod
    def specs(cls, sizes: Sizes) -> Specs:
        entries = sizes.layers, sizes.words, min(WIDTH, sizes.experts)
        return {
            "tokens": (torch.int64, (sizes.words,)),
            "ids": (torch.int16, entries),
            "probs": (torch.float16, entries),
            "prior": (torch.float32, (sizes.layers, sizes.experts)),
        }

    @classmethod
    def train(cls, stage: int, material: Material, beside: Mapping[str, Trained]) -> dict[str, Tensor]:
        ids, probs, priors = [], [], []
        for layer in range(material.sizes.layers):
            means = Means.of(material.samples, layer)
            top = means.smoothed(means.sums, means.counts).topk(min(WIDTH, material.sizes.experts))
            ids.append(top.indices.short())
            probs.append(top.values.half())
            priors.append(means.prior)
        tokens = material.samples.tokens.unique()
        return {"tokens": tokens, "ids": torch.stack(ids), "probs": torch.stack(probs), "prior": torch.stack(priors)}

    def guesses(self, seen: Seen) -> Iterable[Guess]:
        if seen.layer == START:
            assert seen.tokens is not None
            scores = self.scores_of(slice(None), self.places(seen.tokens))
            yield Guess(0, scores.transpose(0, 1).flatten(1))

    def of_step(self, tokens: Tensor | None) -> Tensor:
        assert tokens is not None
        return self.scores_of(slice(1, None), self.places(tokens)).transpose(0, 1).flatten(1)

    def places(self, tokens: Tensor) -> Tensor:
        """Returns int64 [rows], the entries of tokens."""
        found = torch.searchsorted(self._tokens, tokens).clamp_(max=len(self._tokens) - 1)
        return torch.where(self._tokens[found] == tokens, found, len(self._tokens))

    def scores_of(self, layers: int | slice, places: Tensor) -> Tensor:
        """Returns float32 [rows, N], the distributions of one layer in some entries; [L, rows, N] of several layers."""
        spread = self._rest[layers][..., places, :] * self._prior[layers].unsqueeze(-2)
        ids, probs = self._ids[layers][..., places, :].long(), self._probs[layers][..., places, :].float()
        return spread.scatter_(-1, ids, probs)


@dataclass(frozen=True, eq=False)
class Means:
    """Sums of a router's distributions by token.

    Attributes:
        rows: float32 [rows, N], the distribution of each row.
        place: int64 [rows], where its token is in the table.
        sums: float32 [words, N].
        counts: float32 [words, 1], rows of each token.
        prior: float32 [N], mean over all rows.
    """

    rows: Tensor
    place: Tensor
    sums: Tensor
    counts: Tensor
    prior: Tensor

    @classmethod
    def of(cls, samples: Samples, layer: int) -> Means:
        words, place, counts = samples.tokens.unique(return_inverse=True, return_counts=True)
        rows = samples.logits[layer].softmax(-1)
        sums = torch.zeros(len(words), rows.shape[1]).index_add_(0, place, rows)
        return cls(rows, place, sums, counts[:, None].float(), rows.mean(0))

    def smoothed(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Returns means of ``counts`` rows whose sums are ``sums``, with those of all rows."""
        return (sums + _SMOOTHING * self.prior) / (counts + _SMOOTHING)

    def without_the_row(self) -> Tensor:
        """Returns [rows, N]: what the table would have for the token of each row if the row were no part of it.

        Who learns from the table and the rows that it is made of would otherwise trust it too much.
        """
        sums, counts = self.sums[self.place] - self.rows, self.counts[self.place] - 1
        top = self.smoothed(sums, counts).topk(min(WIDTH, len(self.prior)))
        return (rest(top.indices, top.values, self.prior) * self.prior).scatter(1, top.indices, top.values)


def rest(ids: Tensor, probs: Tensor, prior: Tensor) -> Tensor:
    """Returns [..., 1], the factor of ``prior`` [..., N] with which the experts that ``ids`` leave out share the rest.

    The rest is 1 minus the sum of ``probs`` [..., w], which the experts ``ids`` [..., w] have.
    """
    left = (1 - probs.sum(-1, keepdim=True)).clamp(min=0)
    others = 1 - prior.expand(*ids.shape[:-1], -1).gather(-1, ids).sum(-1, keepdim=True)
    return left / others.clamp(min=1e-6)


def logarithm(probs: Tensor) -> Tensor:
    """Returns the logarithm of probabilities, those below a least one as if they were that."""
    return probs.clamp(min=_LEAST).log()
