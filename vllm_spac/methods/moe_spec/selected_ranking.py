"""Ranking by the scores of the rows that selected an expert (ours); the default."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, router_mass, selected_mass


@dataclass(kw_only=True, eq=False)
class Selected(Ranking):
    """The experts with the highest sum of w_t g_i(h_t) over the rows t that selected i.

    Experts with equal sums, such as all that no row selected, are in the order of ``router``, the sum over all rows.
    That sum alone lets an expert that many rows score a little, and none selects, displace one that a row needs.
    """

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        assert context.ids is not None, "the ranking selected needs context.ids"
        own = selected_mass(probs.gather(1, context.ids), context.ids, probs.shape[1])
        return torch.stack((own, router_mass(probs)))
