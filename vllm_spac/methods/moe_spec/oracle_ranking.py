"""MoE-Spec's upper bound (Eq. 6): a greedy ranking that uses every expert's output. For evaluation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, least_residual, router_mass

_TIE = 1e-9  # weight of the router's ranking, which decides between experts that change nothing


@dataclass(kw_only=True, eq=False)
class OracleRanking(Ranking):
    """Starts from the empty set and repeatedly adds argmin_i sum_t w_t ||O*_t - sum_{j in S + i} c_j E_j(h_t)||^2.

    O*_t is the unbudgeted output, sum_j mixing_j E_j(h_t). c_j is the natural mixing weight, 0 outside a row's top-k,
    where the paper has g_j(h_t) for every j. The sum is then the error of truncation, in the checkpoint's scale. The
    votes w_t are 1 in the paper.
    """

    offline: ClassVar[str] = "it needs the output of every expert"
    needs_mixing: ClassVar[bool] = True

    def rank(self, probs: Tensor, votes: Tensor | None, budget: int, context: LayerContext | None = None) -> Tensor:
        assert context is not None and context.outputs is not None and context.mixing is not None, (
            "the ranking oracle needs context.outputs and context.mixing"
        )
        mass = router_mass(probs, votes)
        rows = slice(None) if votes is None else votes != 0
        experts, mixing = context.outputs[rows].to(torch.float64), context.mixing[rows].to(torch.float64)
        parts = experts * mixing[:, :, None]
        if votes is not None:
            parts *= votes[rows].double().sqrt()[:, None, None]  # squared norms are weighted
        vectors = parts.transpose(0, 1).flatten(1)
        whole = parts.sum(1).flatten()
        gram = vectors @ vectors.T
        return least_residual(gram, budget, vectors @ whole, _TIE * mass * gram.diagonal().sum() / mass.sum())
