"""Shortlist, coverage and counts of a layer in one compiled call, for routing that is in host memory.

A verify step has a few rows of a few dozen experts. The torch operations of ``kernels.reference`` take longer to
dispatch than to compute there: 35 of them in a layer cost more than the layer's attention. This is the same arithmetic
as a loop that Numba compiles; the ids are equal, and the weights too, except that the sum that renormalises a row is
taken from left to right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.budget.host_loops import NO_MASS, SCORES, SELECTED, cut_rows
from vllm_spac.budget.routing_rule import RoutingRule

_ONES = np.empty(0)  # votes of rows that all count 1
_MASS_OF = {None: NO_MASS, "selected": SELECTED, "scores": SCORES}


class Effect(NamedTuple):
    """What a shortlist did to the rows that vote, as ``BudgetCounters`` counts it.

    Attributes:
        cut: whether a row chose an expert outside the shortlist.
        dropped: sum over rows of the share of the routing weights outside the shortlist.
        experts: distinct experts that the rows use.
        emptied: rows none of whose experts was in the shortlist.
    """

    cut: bool
    dropped: float
    experts: int
    emptied: int


def cut(
    probs: Tensor,
    order: Tensor,
    natural: tuple[Tensor, Tensor],
    votes: Tensor | None,
    rule: RoutingRule,
    *,
    mass: float | None = None,
    mass_of: str = "selected",
    least: int = 1,
    substitute: bool = True,
    rescue: bool = False,
) -> tuple[Tensor, Tensor, Effect]:
    """Cuts rows that vote together to one shortlist.

    Args:
        probs: float32 [rows, N], ``rule.probs`` of the router's logits.
        order: int64 [B], the ranked experts that the layer may use at most, the best first; with a mass, all experts.
        natural: float [rows, k] and int [rows, k], weights and ids without a budget.
        votes: float64 [rows]; None: all are 1.
        rule: of the layer.
        mass, mass_of, least: the shortlist is the first part of ``order``, of at least ``least`` experts, that holds
            this share of the mass; None: all of ``order``.
        substitute: coverage by substitution (Eq. 8), else by truncation (Eq. 7).
        rescue: under truncation, whether a row that keeps no expert gets its best one.

    Returns:
        float32 [rows, k] weights, ids of the dtype of ``natural``, and their effect. Rows that keep all their experts
        are bitwise unchanged; if all do, the tensors are those of ``natural``.
    """
    weights, ids = natural
    scores = probs.contiguous().numpy()
    chosen_by = scores if rule.bias is None else (probs + rule.bias.float()).contiguous().numpy()
    grouped = rule.groups is not None and rule.top_groups is not None
    taken, chosen = np.empty(ids.shape, dtype=np.float32), np.empty(ids.shape, dtype=np.int64)
    effect = Effect(
        *cut_rows(
            scores,
            chosen_by,
            order.contiguous().numpy(),
            weights.float().contiguous().numpy(),
            np.ascontiguousarray(ids.numpy(), dtype=np.int64),
            _ONES if votes is None else votes.numpy(),
            1.0 if mass is None else mass,
            _MASS_OF[None if mass is None else mass_of],
            least,
            substitute,
            rescue,
            rule.renormalize,
            rule.scale,
            rule.groups if grouped else 0,
            rule.top_groups if grouped else 0,
            1 if rule.bias is None else 2,
            taken,
            chosen,
        )
    )
    if not effect.cut:
        return weights, ids, effect
    return torch.from_numpy(taken), torch.from_numpy(chosen).to(ids.dtype), effect
