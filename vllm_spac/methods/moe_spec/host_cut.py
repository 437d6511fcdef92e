"""Shortlist and coverage of a layer as NumPy operations, for routing that is in host memory (MoE-Spec §3.3, Eq. 7, 8).

A verify step has a few rows of a few dozen experts. The torch operations of ``kernels.reference`` take longer to
dispatch than to compute there: 35 of them in a layer cost more than the layer's attention. NumPy's dispatch is several
times cheaper. The ids are equal, and the weights too, except that the sum that renormalises a row may be taken in
another order. For routing in a GPU's memory see ``launches``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking
from vllm_spac.methods.moe_spec.replay import BudgetCounters
from vllm_spac.methods.moe_spec.settings import BudgetedLayer, BudgetSettings, RoutingRule

_Floats = NDArray[np.float32]
_Ids = NDArray[np.int64]
_Bools = NDArray[np.bool_]
_SMALLEST = np.finfo(np.float32).smallest_subnormal


class HostCut:
    """The budget in force where routing is in host memory; ``counters`` count what it cuts."""

    def __init__(self, layers: Sequence[BudgetedLayer], counters: BudgetCounters) -> None:
        self._layers, self._counters = layers, counters
        self._settings = BudgetSettings()
        self._ranking: Ranking | None = None

    def apply(self, settings: BudgetSettings, ranking: Ranking | None) -> None:
        """Cuts by ``settings`` from now on."""
        self._settings, self._ranking = settings, ranking

    def cut(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, votes: Tensor | None
    ) -> tuple[Tensor, Tensor] | None:
        """Cuts rows that vote together to one shortlist.

        Args:
            index: number of the layer.
            logits: [rows, N], of the router.
            weights, ids: [rows, k], the natural choice.
            votes: float64 [rows]; None: all are 1.

        Returns:
            float32 [rows, k] weights, ids of the dtype of ``ids``. Rows that keep all their experts are bitwise
            unchanged; None if all do.
        """
        layer, settings, ranking = self._layers[index], self._settings, self._ranking
        if self._spares_all(layer, ids):
            self._counters.add(weights, torch.ones_like(ids, dtype=torch.bool), weights, ids)
            return None
        assert ranking is not None, "no budget is in force"
        probs = layer.rule.probs(logits)
        order = ranking.rank(probs, votes, LayerContext(index, ids.long())).numpy()
        scores, weighed, chosen = probs.numpy(), weights.float().numpy(), ids.numpy()
        wanted = selected(chosen, layer.experts)[order]
        ranked = np.concatenate([order[wanted], order[~wanted]])
        leaders = ranked[: settings.budget]
        if settings.mass is not None:
            held = _held(scores, weighed, chosen, votes, settings.mass_of)
            leaders = leading(ranked, held, settings.mass, settings.least(layer))
        inside = np.zeros(layer.experts, dtype=np.bool_)
        inside[leaders] = True
        keeps = inside[chosen]
        if keeps.all():
            self._counters.add(weights, torch.from_numpy(keeps), weights, ids)
            return None
        if settings.coverage == "substitution":
            taken, others = _substituted(scores, ids.shape[1], layer.rule, inside)
            whole = keeps.all(axis=1, keepdims=True)
            taken, others = np.where(whole, weighed, taken), np.where(whole, chosen, others)
        else:
            taken, others = _truncated(scores, weighed, chosen, keeps, leaders[0])
        covered = torch.from_numpy(taken), torch.from_numpy(others.astype(chosen.dtype, copy=False))
        self._counters.add(weights, torch.from_numpy(keeps), *covered)
        return covered

    def _spares_all(self, layer: BudgetedLayer, ids: Tensor) -> bool:
        """Whether all that rows selected may run."""
        bound = self._settings.budget
        if bound == layer.experts or self._settings.mass == 1.0:
            return True
        return bound is not None and int(selected(ids.numpy(), layer.experts).sum()) <= bound


def selected(ids: NDArray[np.integer], experts: int) -> _Bools:
    """bool [N]: the experts that rows with this choice, int [rows, k], selected."""
    mask = np.zeros(experts, dtype=np.bool_)
    mask[ids] = True
    return mask


def leading(order: _Ids, held: NDArray[np.float64], share: float, least: int) -> _Ids:
    """Returns the first experts of ``order``, at least ``least``, that hold ``share`` of the mass.

    Args:
        order: int64 [N], all experts, the best first.
        held: float64 [N], the mass of each expert.
    """
    if share >= 1:
        return order
    mass = held[order].cumsum()
    return order[: max(least, 1 + int((mass < share * mass[-1]).sum()))]


def _held(scores: _Floats, weights: _Floats, ids: _Ids, votes: Tensor | None, mass_of: str) -> NDArray[np.float64]:
    """float64 [N]: each expert's part of the mass that the budget keeps a share of."""
    if mass_of == "scores":
        if votes is None:
            return scores.sum(axis=0, dtype=np.float64)
        counts = votes.numpy()
        return (scores[counts != 0] * counts[counts != 0, None]).sum(axis=0)
    parts = weights.astype(np.float64)
    if votes is not None:
        counts = votes.numpy()
        ids, parts = ids[counts != 0], parts[counts != 0] * counts[counts != 0, None]
    return np.bincount(ids.ravel(), parts.ravel(), scores.shape[1]).astype(np.float64, copy=False)


def _best(scores: _Floats, rule: RoutingRule, inside: _Bools, count: int) -> _Ids:
    """int64 [rows, count]: the experts of ``inside`` that the router would choose, ties by the lowest id."""
    chosen_by, open_to = scores, inside
    if rule.bias is not None:
        chosen_by = scores + rule.bias.float().numpy()
    if rule.groups is not None and rule.top_groups is not None:
        open_to = _within_groups(inside, chosen_by, count, rule.groups, rule.top_groups, 1 if rule.bias is None else 2)
    return np.where(open_to, -chosen_by, np.float32(np.inf)).argsort(axis=1, kind="stable")[:, :count]


def _within_groups(inside: _Bools, scores: _Floats, needed: int, groups: int, top_groups: int, summed: int) -> _Bools:
    """bool [rows, N]: see ``kernels.reference.cover.within_groups``."""
    rows, experts = scores.shape
    worth = np.sort(scores.reshape(rows, groups, experts // groups), axis=2)[:, :, -summed:].sum(axis=2)
    first = np.argsort(-worth, axis=1, kind="stable")[:, :top_groups]
    chosen = np.zeros((rows, groups), dtype=np.bool_)
    np.put_along_axis(chosen, first, True, axis=1)
    best = inside & chosen.repeat(experts // groups, axis=1)
    return best | (inside & (best.sum(axis=1, keepdims=True) < needed))


def _substituted(scores: _Floats, top_k: int, rule: RoutingRule, inside: _Bools) -> tuple[_Floats, _Ids]:
    """See ``kernels.reference.cover.substituted``."""
    chosen = _best(scores, rule, inside, top_k)
    taken = _of(scores, chosen)
    return _scaled(taken, taken, rule), chosen


def _truncated(scores: _Floats, weights: _Floats, ids: _Ids, keeps: _Bools, best: np.int64) -> tuple[_Floats, _Ids]:
    """See ``kernels.reference.cover.truncated``."""
    own = np.where(keeps, _of(scores, ids), np.float32(-np.inf))
    leading_ids = np.where(keeps & (own == own.max(axis=1, keepdims=True)), ids, scores.shape[1])
    stand_in = leading_ids.min(axis=1, keepdims=True)
    stand_in = np.where(stand_in < scores.shape[1], stand_in, best)
    return np.where(keeps, weights, np.float32(0)), np.where(keeps, ids, stand_in)


def _scaled(taken: _Floats, whole: _Floats, rule: RoutingRule) -> _Floats:
    """``taken`` divided by the rows' sums of ``whole`` if the checkpoint renormalises, times its factor."""
    if rule.renormalize:
        taken = taken / np.maximum(whole.sum(axis=1, keepdims=True), _SMALLEST)  # where a sum is 0, so is ``taken``
    return taken if rule.scale == 1.0 else taken * np.float32(rule.scale)


def _of(scores: _Floats, ids: _Ids) -> _Floats:
    """float32 [rows, k]: ``np.take_along_axis``, which takes four times as long."""
    return scores[np.arange(len(ids))[:, None], ids]
