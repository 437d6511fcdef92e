"""Shared by predictors that CUDA graphs can hold: what they know before a step, and what a layer's launches add."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor

from vllm_spac.decisions.predictors._trained import Trained
from vllm_spac.decisions.predictors.base import Seen


class OnDevice(Trained):
    """A predictor whose scores of the next layer follow from the step's tokens and what a router read and chose.

    ``of_step`` runs before a step, and ``of_next`` in each of its layers but the last: launches of fixed shapes, which
    read nothing on the host.
    """

    on_device: ClassVar[bool] = True

    @abstractmethod
    def of_step(self, tokens: Tensor | None) -> Tensor:
        """Returns what is known before the first layer about each layer behind it.

        Args:
            tokens: int64 [rows], if it ``needs`` them.

        Returns:
            float32 [rows, N * (L - 1)], of a predictor that looks one layer ahead; [1, N * (L - 1)] if it does not
            depend on tokens.
        """

    def foresees(self, layer: int) -> bool:
        """Whether ``of_next`` says of ``layer`` what its router's logits will be; by its tokens alone it does not."""
        return self.reach > 0

    def of_next(self, seen: Seen, known: Tensor) -> Tensor:
        """Returns float32 [rows, N], the scores of the layer behind ``seen``; by default they are ``known``.

        Args:
            seen: a layer, without tokens.
            known: float32 [rows, N], its part of ``of_step``.
        """
        return known

    def weights_of(self, layer: int, scores: Tensor) -> Tensor:
        """Returns float32 [rows, N], how much each expert of ``layer`` counts, as a budget sums it; from ``of_next``.

        By default scores are probabilities.
        """
        return scores
