"""MoE-Spec's ranking (Eq. 5): the router mass of the rows that vote, weighted by their votes.

The paper cuts all experts but the first B of this order, also selected ones where fewer than B are selected. Here, as
by every ranking, those that no row selected come after the others (``Ranking``); they can fill a shortlist up, and
never displace an expert that a row needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, router_mass


@dataclass(kw_only=True, eq=False)
class Router(Ranking):
    """The experts with the highest s_i = sum_t w_t g_i(h_t); in the paper all w_t are 1."""

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        return router_mass(probs)
