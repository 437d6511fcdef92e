"""MoE-Spec's upper bound (Eq. 6): greedy, with every expert's output at hand. For evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.budgets.base import Budget, LayerContext, least_residual, router_mass

_TIE = 1e-9  # of the router's ranking: it decides between experts that change nothing


@dataclass(kw_only=True, eq=False)
class Oracle(Budget):
    """Starts from nothing and adds argmin_i sum_t ||O*_t - sum_{j in S + i} c_j E_j(h_t)||^2.

    O*_t is the unbudgeted output, sum_j mixing_j E_j(h_t).

    Attributes:
        literal: c_j is g_j(h_t) for every j, as the paper's text has it. By default it is the natural mixing weight,
            0 outside a row's top-k: the error that truncation makes, in the scale of the checkpoint.
    """

    literal: bool = False
    offline: ClassVar[bool] = True

    def rank(self, probs: Tensor, votes: Tensor, budget: int, context: LayerContext | None = None) -> Tensor:
        assert context is not None and context.outputs is not None and context.mixing is not None, (
            "the ranking oracle needs context.outputs and context.mixing"
        )
        return rank(probs, votes, budget, context.outputs, context.mixing, literal=self.literal)


def rank(
    probs: Tensor, votes: Tensor, budget: int, outputs: Tensor, mixing: Tensor, *, literal: bool = False
) -> Tensor:
    """float [rows, N], bool [rows], float [rows, N, d], float [rows, N] -> int64 [budget]; see ``Budget.rank``."""
    mass = router_mass(probs, votes)
    experts, mixing = outputs[votes].to(torch.float64), mixing[votes].to(torch.float64)
    parts = experts * (probs[votes].to(torch.float64) if literal else mixing)[:, :, None]
    vectors = parts.transpose(0, 1).flatten(1)
    whole = (experts * mixing[:, :, None]).sum(1).flatten()
    gram = vectors @ vectors.T
    return least_residual(gram, budget, vectors @ whole, _TIE * mass * gram.diagonal().sum() / mass.sum())
