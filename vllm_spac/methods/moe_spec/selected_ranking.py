"""Ranking by the scores of the rows that selected an expert (ours); the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, best, router_mass, selected_mass, weighted


@dataclass(kw_only=True, eq=False)
class Selected(Ranking):
    """The experts with the highest sum of w_t g_i(h_t) over the rows t that selected i.

    Experts with equal sums, such as all that no row selected, are in the order of ``router``, the sum over all rows.
    That sum alone lets an expert that many rows score a little, and none selects, displace one that a row needs.
    """

    needs_ids: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def rank(self, probs: Tensor, votes: Tensor | None, budget: int, context: LayerContext | None = None) -> Tensor:
        assert context is not None and context.ids is not None, "the ranking selected needs context.ids"
        return rank(probs, votes, budget, context.ids)

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        assert context.ids is not None, "the ranking selected needs context.ids"
        own = selected_mass(probs.gather(1, context.ids), context.ids, probs.shape[1])
        return torch.stack((own, router_mass(probs)))


def rank(probs: Tensor, votes: Tensor | None, budget: int, ids: Tensor) -> Tensor:
    """float [rows, N], float64 [rows], int64 [rows, k] -> int64 [budget]; see ``Ranking.rank``."""
    mass, taken = router_mass(probs, votes), probs.gather(1, ids)
    own = selected_mass(taken if votes is None else weighted(taken, votes), ids, probs.shape[1])
    return best(torch.stack((own, mass)), budget)
