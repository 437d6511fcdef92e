"""The contract of a ranking, and functions that rankings share (MoE-Spec §3.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.kernels.reference.shortlist import sorted_by


@dataclass(frozen=True, eq=False)
class LayerContext:
    """Inputs of a ranking in addition to the router's scores; each ranking uses some of them and ignores the rest."""

    layer: int = 0  # number of the MoE layer in the order of execution
    ids: Tensor | None = None  # int64 [rows, k], the natural choice; of rows that do not vote, any experts


class Ranking(ABC):
    """Orders the experts of a layer by a score; deterministic, ties by the lowest id.

    A shortlist is the beginning of that order with the experts that voting rows selected before all others, whatever
    the ranking (``kernels.reference.shortlist.selected_first``): where no more are selected than may run, none is cut.
    """

    offline: ClassVar[str] = ""  # why no engine can serve with it

    @abstractmethod
    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        """The scores of a layer's experts in one forward, the greatest first.

        Consists of operations of fixed shapes, which a CUDA graph can capture; no result is read on the host.

        Args:
            probs: float64 [rows, N], router scores over all experts, before any top-k, bias or renormalisation, times
                the rows' votes (``weighted``): 0 in rows that do not vote; all may be 0.
            context: the layer, and the other inputs that this ranking needs.

        Returns:
            float64 [N]; or [2, N], of which the second decide where the first are equal.
        """

    def rank(self, probs: Tensor, votes: Tensor | None, context: LayerContext) -> Tensor:
        """int64 [N]: the experts of a layer for one forward, the most important first, ties by the lowest id.

        Args:
            probs: float [rows, N], as for ``scores``, not yet multiplied by the votes.
            votes: float64 [rows], at least one above 0; None: all are 1. Rows with 0 are ignored, even NaN.
        """
        assert votes is None or bool(votes.any()), "no row votes: such a step has no shortlist"
        return sorted_by(self.scores(probs.double() if votes is None else weighted(probs, votes), context))


def router_mass(probs: Tensor) -> Tensor:
    """float64 [N]: s_i, the sum over rows of the scores, float [rows, N], times the rows' votes (MoE-Spec Eq. 5)."""
    return probs.sum(0, dtype=torch.float64)


def weighted(values: Tensor, votes: Tensor) -> Tensor:
    """float64 [rows, n]: ``values`` (float [rows, n]) times the rows' votes; 0 in rows that do not vote, even for NaN.

    Exact for float32 values: votes are multiples of a power of two, see ``settings.vote``.
    """
    assert values.ndim == 2 and votes.shape == values.shape[:1] and votes.dtype in (torch.float64, torch.bool)
    return values.masked_fill(votes[:, None] == 0, 0) * votes[:, None].double()


def selected_mass(weights: Tensor, ids: Tensor, experts: int) -> Tensor:
    """float64 [N]: the sum over rows of the routing weights of the experts selected for them.

    Args:
        weights: float [rows, k], as the router returns them, times the rows' votes.
        ids: int [rows, k], the natural choice.
    """
    zeros = torch.zeros(experts, dtype=torch.float64, device=ids.device)
    return zeros.index_add_(0, ids.flatten().long(), weights.flatten().double())
