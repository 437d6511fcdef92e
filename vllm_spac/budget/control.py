"""Applies an expert budget to a layer's routing: who votes, who is cut, and what was dropped (MoE-Spec; §2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vllm_spac import components
from vllm_spac.budget.calibration import Calibration
from vllm_spac.budget.counters import BudgetCounters
from vllm_spac.budget.coverage import Known, kept, members, substitute, truncate
from vllm_spac.budget.limits import check_mass, mass_cut, validate
from vllm_spac.budget.rankings.base import LayerContext, Ranking, router_mass, selected_mass
from vllm_spac.budget.routing_rule import RoutingRule
from vllm_spac.budget.settings import BudgetSettings
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import ConfigError, UnsupportedError

_CUT = {
    "verify": (RowKind.VERIFY,),
    "decode": (RowKind.VERIFY, RowKind.DECODE),
    "all": tuple(RowKind),
}


@dataclass(frozen=True)
class BudgetedLayer:
    """A MoE layer as the control sees it: its name, experts (N), top-k, rule, and bool [N] of what is resident."""

    name: str
    experts: int
    top_k: int
    rule: RoutingRule
    resident: Callable[[], Tensor] | None = field(default=None, compare=False)


class BudgetControl:
    """The budget of one model; ``change`` may be called between any two steps.

    Args:
        layers: in the order of execution.
        calibration: for the rankings that need one.
        offline: allow rankings that run all experts.
        device: where the routers' scores are.
    """

    def __init__(
        self,
        layers: Sequence[BudgetedLayer],
        calibration: Calibration | None = None,
        offline: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = list(layers)
        self.counters = BudgetCounters()
        self.settings = BudgetSettings()
        self._calibration = calibration
        self._offline = offline
        self._device = device
        self._ranking: Ranking | None = None
        self._mixes = False  # whether the ranking looks at the natural weights
        self._parts: tuple[Step | None, list[slice | Tensor]] = (None, [])

    @property
    def active(self) -> bool:
        return self.settings.active

    def change(self, settings: BudgetSettings) -> None:
        """Use ``settings`` from the next step on, or change nothing.

        Raises:
            ConfigError: the budget does not fit a layer, or the ranking cannot serve or lacks its calibration.
            UnsupportedError: substitution for a model whose routing function is its own.
        """
        ranking = None
        if settings.active:
            ranking = _ranking(settings.ranking, self._calibration, self._offline).to(self._device)
            if settings.mass is not None:
                check_mass(settings.mass)
            for layer in self.layers:
                _check_layer(layer, settings)
        self.settings, self._ranking, self._parts = settings, ranking, (None, [])
        self._mixes = settings.ranking not in ("router", "static", "resident")

    def apply(
        self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, step: Step, outputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids [rows, k] of layer ``index`` within the budget; rows that are not cut keep theirs.

        Args:
            logits: [rows, N].
            outputs: float [rows, N, d] for the oracle.
        """
        natural = weights
        for rows in self._rows(step):
            part = weights[rows], ids[rows]
            covered = self._cut(index, logits[rows], *part, outputs if outputs is None else outputs[rows])
            if covered is None:
                continue
            if len(part[0]) == len(weights):
                return covered
            if weights is natural:
                weights, ids = weights.clone(), ids.clone()
            weights[rows], ids[rows] = covered
        return weights, ids

    def _cut(self, index: int, logits: Tensor, weights: Tensor, ids: Tensor, outputs: Tensor | None):
        """(weights, ids) of rows that vote together, within their shortlist; None where they are so already."""
        layer, settings = self.layers[index], self.settings
        bound = settings.budget[layer.name] if isinstance(settings.budget, dict) else settings.budget
        if layer.experts == bound or settings.mass == 1.0:
            self.counters.add(weights, torch.ones_like(ids, dtype=torch.bool), weights, ids)
            return None
        probs = layer.rule.probs(logits)
        shortlist = self._shortlist(index, probs, weights, ids, bound or layer.experts, outputs)
        inside = members(shortlist, layer.experts)
        known = inside, kept(inside, ids)
        if not ids.is_cuda and bool(known[1].all()):  # nothing to do; a GPU would have to be waited for
            self.counters.add(weights, known[1], weights, ids)
            return None
        covered = self._cover(layer, probs, weights, ids, shortlist, known)
        self.counters.add(weights, known[1], *covered)
        return covered

    def _rows(self, step: Step) -> list[slice | Tensor]:
        """Rows that vote together (a slice, or their numbers), worked out once a step."""
        if self._parts[0] is not step:
            kinds, window = _CUT[self.settings.when], self.settings.window
            asked = [r for r in step.requests if r.kind in kinds]
            if window is not None:
                starts = [(start, r.stop) for r in asked for start in range(r.start, r.stop, window)]
                parts: list[slice | Tensor] = [slice(start, min(start + window, stop)) for start, stop in starts]
            elif asked and asked[-1].stop - asked[0].start == sum(r.stop - r.start for r in asked):
                parts = [slice(asked[0].start, asked[-1].stop)]
            else:
                parts = [torch.cat([torch.arange(r.start, r.stop) for r in asked])] if asked else []
            self._parts = step, parts
        return self._parts[1]

    def _shortlist(
        self, index: int, probs: Tensor, weights: Tensor, ids: Tensor, count: int, outputs: Tensor | None
    ) -> Tensor:
        layer, settings = self.layers[index], self.settings
        context = LayerContext(
            layer=index,
            resident=layer.resident() if layer.resident is not None and settings.ranking == "resident" else None,
            mixing=torch.zeros_like(probs).scatter(1, ids.long(), weights.float()) if self._mixes else None,
            outputs=outputs,
        )
        order = self._ranking.rank(probs, None, count, context)
        if settings.mass is None:
            return order
        least = layer.top_k if settings.coverage == "substitution" else 1
        if settings.mass_of == "scores":
            return order[: mass_cut(order, router_mass(probs), settings.mass, least)]
        held = selected_mass(weights, ids, layer.experts)
        order = order[(held[order] == 0).sort(stable=True).indices]
        return order[: mass_cut(order, held, settings.mass, least)]

    def _cover(
        self, layer: BudgetedLayer, probs: Tensor, weights: Tensor, ids: Tensor, shortlist: Tensor, known: Known
    ) -> tuple[Tensor, Tensor]:
        if self.settings.coverage == "truncation":
            return truncate(probs, ids, weights, shortlist, known=known)
        rule = layer.rule
        chosen_by = None if rule.bias is None else probs + rule.bias
        groups = {"groups": rule.groups, "top_groups": rule.top_groups}
        options = {"selection": chosen_by, "scale": rule.scale, "natural": (weights, ids), "known": known, **groups}
        return substitute(probs, layer.top_k, shortlist, rule.renormalize, **options)


def _ranking(name: str, calibration: Calibration | None, offline: bool) -> Ranking:
    found = components.find("budget.rankings", name)
    if found.offline and not offline:
        serving = [n for n in components.names("budget.rankings") if not components.find("budget.rankings", n).offline]
        raise ConfigError(
            f"spac: budget_ranking={name} (--spac-budget-ranking) runs every expert and is for evaluation only "
            f"(vllm-spac quality); use one of {', '.join(serving)}"
        )
    return found.of(calibration)


def _check_layer(layer: BudgetedLayer, settings: BudgetSettings) -> None:
    if settings.coverage == "substitution" and layer.rule.custom:
        raise UnsupportedError(
            f"spac: {layer.name} routes by a function of its own, which substitution cannot repeat; "
            "use --spac-budget-coverage truncation"
        )
    if isinstance(settings.budget, dict) and layer.name not in settings.budget:
        raise ConfigError(f"spac: the budget names no experts for {layer.name}; name every MoE layer")
    bound = settings.budget[layer.name] if isinstance(settings.budget, dict) else settings.budget
    if bound is not None:
        validate(bound, layer.experts, layer.top_k, settings.coverage)
