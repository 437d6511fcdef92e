"""Shortlist and coverage of a layer as torch operations, for routing that is in a GPU's memory; see ``host_cut``.

Nothing is read on the host, so no operation waits.
"""

from __future__ import annotations

from torch import Tensor

from vllm_spac.budget.coverage import kept, members, selectable
from vllm_spac.budget.rankings.base import router_mass, selected_mass, weighted
from vllm_spac.budget.routing_rule import RoutingRule
from vllm_spac.kernels.reference.cover import rescued, substituted, truncated, where
from vllm_spac.kernels.reference.shortlist import first_members, mass_count, selected_first


def cut(
    probs: Tensor,
    order: Tensor,
    natural: tuple[Tensor, Tensor],
    votes: Tensor | None,
    rule: RoutingRule,
    *,
    bound: int | None = None,
    mass: Tensor | None = None,
    mass_of: str = "selected",
    least: int = 1,
    substitute: bool = True,
    rescue: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cuts rows that vote together to one shortlist.

    Args:
        mass: float64 [], on the device.
        others: as for ``host_cut.cut``.

    Returns:
        [rows, k] weights and ids, and bool [rows, k]: which of the natural ids are in the shortlist.
    """
    weights, ids = natural
    order = selected_first(order, members(ids.flatten(), probs.shape[1]))
    if mass is None:
        inside = members(order[:bound], probs.shape[1])
    else:
        count = mass_count(order, _held(probs, natural, votes, mass_of), mass, least)
        inside = first_members(order, count)
    keeps, needed = kept(inside, ids), ids.shape[1]
    if not substitute:
        covered, needed = truncated(probs, weights, ids, keeps, order[0]), 1
        if not rescue:
            return *covered, keeps
    chosen_by, open_to = selectable(rule, probs, inside, needed)
    if substitute:
        covered = substituted(probs, chosen_by, open_to, needed, rule.renormalize, rule.scale)
        return *where(keeps.all(1), natural, covered), keeps
    return *rescued(probs, chosen_by, open_to, ids, keeps, covered, rule.renormalize, rule.scale), keeps


def _held(probs: Tensor, natural: tuple[Tensor, Tensor], votes: Tensor | None, mass_of: str) -> Tensor:
    """float64 [N]: each expert's part of the mass that the budget keeps a share of."""
    if mass_of == "scores":
        return router_mass(probs, votes)
    weights, ids = natural
    return selected_mass(weights if votes is None else weighted(weights, votes), ids, probs.shape[1])
