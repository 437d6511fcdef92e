"""Coverage: how a row is routed when some of its experts are outside the shortlist (MoE-Spec §3.3, Eq. 7 and 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from vllm_spac.budget.limits import validate
from vllm_spac.budget.routing_rule import RoutingRule
from vllm_spac.kernels.reference.cover import substituted, truncated, where, within_groups


def members(found: Tensor, experts: int) -> Tensor:
    """bool [N]: whether each expert is among those ``found``, int [n], any number of times."""
    return torch.zeros(experts, dtype=torch.bool, device=found.device).index_fill_(0, found.long(), True)


def kept(inside: Tensor, ids: Tensor) -> Tensor:
    """bool [rows, k]: which of ``ids`` are ``members`` of the shortlist."""
    return inside.index_select(0, ids.flatten()).view(ids.shape)


def selectable(rule: RoutingRule, probs: Tensor, inside: Tensor, needed: int) -> tuple[Tensor, Tensor]:
    """What experts are chosen by, and which a row may choose.

    Args:
        rule: of the layer.
        probs: float [rows, N], its scores.
        inside: bool [N] or [rows, N], the experts that are left.
        needed: experts that a row chooses; where its groups hold fewer of ``inside``, the limit to groups is lifted.

    Returns:
        float [rows, N], and bool [N] or [rows, N].
    """
    chosen_by = probs if rule.bias is None else probs + rule.bias
    if rule.groups is None or rule.top_groups is None:
        return chosen_by, inside
    summed = 1 if rule.bias is None else 2
    return chosen_by, within_groups(inside, chosen_by, needed, rule.groups, rule.top_groups, summed)


def truncate(probs: Tensor, topk_ids: Tensor, topk_weights: Tensor, shortlist: Tensor) -> tuple[Tensor, Tensor]:
    """The natural top-k without the experts outside the shortlist; the remaining weights are not recomputed (Eq. 7).

    Args:
        probs: float [rows, N], router scores over all experts.
        topk_ids: int [rows, k], the natural choice.
        topk_weights: float32 [rows, k], the mixing weights of ``topk_ids``.
        shortlist: int64 [B], distinct.

    Returns:
        (weights, ids), with the shapes and dtypes of ``topk_weights`` and ``topk_ids``. A dropped expert has weight 0;
        its id is replaced by the best expert that the row keeps (ties: the lowest id), or in a row that keeps none by
        the first of the shortlist, so that no expert outside is ever loaded. A row that keeps all is bitwise unchanged.
    """
    inside = kept(members(shortlist, probs.shape[1]), topk_ids)
    return truncated(probs, topk_weights, topk_ids, inside, shortlist[0])


def substitute(
    probs: Tensor,
    top_k: int,
    shortlist: Tensor,
    renormalize: bool,
    *,
    selection: Tensor | None = None,
    scale: float = 1.0,
    groups: int | None = None,
    top_groups: int | None = None,
    natural: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The top-k within the shortlist, weighted as the checkpoint weights its experts (Eq. 8).

    Scores are masked, never logits: a bias cannot lift an expert that is outside. Groups are chosen by the scores of
    all their experts, as without a budget; where a row's groups hold fewer than ``top_k`` experts of the shortlist,
    the limit to groups is lifted for that row.

    Args:
        probs: float [rows, N], router scores over all experts; the weights are taken from them.
        top_k: experts per row.
        shortlist: int64 [B], distinct; its order does not matter.
        renormalize: whether the checkpoint divides the weights of a row by their sum. Scores that underflowed to 0
            altogether stay 0.
        selection: float [rows, N], what experts are chosen by, e.g. ``probs`` plus a correction bias.
        scale: ``routed_scaling_factor``.
        groups, top_groups: DeepSeek's limit: only the experts of the ``top_groups`` best of ``groups`` equal groups.
            A group's score is that of its best expert, or with ``selection`` the sum of its best two.
        natural: (weights, ids) [rows, k] of the unbudgeted router. Rows whose whole choice is in the shortlist keep
            it bitwise, ties and rounding included; the dtype of ids is taken from it.

    Returns:
        (float32 [rows, top_k], int64 [rows, top_k]): weights and ids, the best first, ties by the lowest id.

    Raises:
        ConfigError: the shortlist has fewer than ``top_k`` experts.
    """
    validate(len(shortlist), probs.shape[1], top_k, "substitution")
    inside = members(shortlist, probs.shape[1])
    assert (groups is None) == (top_groups is None), "groups and top_groups come together"
    chosen_by, open_to = probs if selection is None else selection, inside
    if groups is not None and top_groups is not None:
        open_to = within_groups(inside, chosen_by, top_k, groups, top_groups, 1 if selection is None else 2)
    covered = substituted(probs, chosen_by, open_to, top_k, renormalize, scale)
    return covered if natural is None else where(kept(inside, natural[1]).all(1), natural, covered)
