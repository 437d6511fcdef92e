"""Applies an expert budget to a layer's routing: who votes, who is cut, and what was dropped (MoE-Spec; §2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from torch import Tensor

from vllm_spac import components
from vllm_spac.budget.calibration import Calibration
from vllm_spac.budget.coverage import Known, kept, members, substitute, truncate
from vllm_spac.budget.limits import check_mass, mass_cut, validate
from vllm_spac.budget.rankings.base import LayerContext, Ranking, router_mass, selected_mass
from vllm_spac.core import RowKind, Step
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.system.printable import brief, shortened

_MOST_PROBLEMS = 3  # named in one refusal
_PENDING = 64  # shortlists that are counted at once
_CUT = {
    "verify": (RowKind.VERIFY,),
    "decode": (RowKind.VERIFY, RowKind.DECODE),
    "all": tuple(RowKind),
}


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("use a number")
    return value


_Experts = Annotated[int, Field(ge=0, le=1 << 20), BeforeValidator(_number)]
_Bound = Annotated[
    Annotated[_Experts, Tag("number")] | Annotated[dict[str, _Experts], Tag("layers")],
    Discriminator(lambda value: "layers" if isinstance(value, dict) else "number"),
]


class BudgetSettings(BaseModel):
    """What can be changed while the model runs; nothing set means exact. An unknown key is an error.

    Attributes:
        budget: experts a layer may touch in one forward (B), for all layers or by layer name.
        mass: instead of B, the share of the mass that the shortlist of each layer and forward must hold.
        mass_of: which mass: ``selected``, the routing weights that the rows which vote give to the experts selected for
            them, where experts that no row selected are ranked last; ``scores``, the routers' scores of all experts
            (MoE-Spec's s_i).
        ranking: name of a ranking in ``vllm_spac.budget.rankings``.
        coverage: what a row does without an expert that is outside.
        when: the kinds of step whose rows vote and are cut.
        window: rank so many consecutive rows of a request at a time, as if each were one verify step. For evaluation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    budget: _Bound | None = None
    mass: Annotated[float, BeforeValidator(_number)] | None = None
    mass_of: Literal["selected", "scores"] = "selected"
    ranking: str = "router"
    coverage: Literal["substitution", "truncation"] = "substitution"
    when: Literal["verify", "decode", "all"] = "verify"
    window: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(_number)] | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> BudgetSettings:
        if self.budget is not None and self.mass is not None:
            raise ValueError("budget and budget_mass bound the same thing; use one of them")
        if self.mass is None and self.mass_of != "selected":
            raise ValueError(f"mass_of={self.mass_of} says what a share is of; give mass as well")
        return self

    @classmethod
    def parse(cls, raw: Any) -> BudgetSettings:
        """From plain data, e.g. the body of ``POST /spac/budget``; ``ConfigError`` says what is wrong."""
        try:
            return cls(**raw)
        except ValidationError as error:
            found = error.errors(include_url=False, include_context=False, include_input=False)
            problems = "; ".join(
                f"{shortened('.'.join(map(str, item['loc']))) or 'budget'}: {item['msg'].removeprefix('Value error, ')}"
                for item in found[:_MOST_PROBLEMS]
            )
            if len(found) > _MOST_PROBLEMS:
                problems += f"; and {len(found) - _MOST_PROBLEMS} more"
            raise ConfigError(f"spac: {problems}; known: {', '.join(cls.model_fields)}") from None
        except TypeError:
            raise ConfigError(f'spac: a budget is a mapping such as {{"budget": 16}}, not {brief(raw)}') from None

    @property
    def active(self) -> bool:
        return self.budget is not None or self.mass is not None

    def describe(self) -> str:
        """A few words for the log and the metrics."""
        if not self.active:
            return "exact"
        bound = "by layer" if isinstance(self.budget, dict) else self.budget
        if self.mass is not None:
            bound = f"{self.mass:g} of the mass {self.mass_of}"
        return f"lossy (budget {bound}, {self.ranking}, {self.coverage}, {self.when} rows)"


@dataclass(frozen=True, eq=False)
class RoutingRule:
    """How a checkpoint turns router logits into weights, as vLLM configured it.

    Attributes:
        scoring: ``softmax`` or ``sigmoid``.
        renormalize: whether the weights of a row are divided by their sum.
        bias: float [N] added to the scores to choose by, not to weigh by.
        groups, top_groups: limit to the best groups of experts.
        custom: a routing function of the model's own, which substitution cannot repeat.
    """

    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    bias: Tensor | None = None
    groups: int | None = None
    top_groups: int | None = None
    custom: bool = False

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [rows, N], the scores of all experts."""
        logits = logits.float()
        return logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)


@dataclass(frozen=True)
class BudgetedLayer:
    """A MoE layer as the control sees it: its name, experts (N), top-k, rule, and bool [N] of what is resident."""

    name: str
    experts: int
    top_k: int
    rule: RoutingRule
    resident: Callable[[], Tensor] | None = field(default=None, compare=False)


class BudgetCounters:
    """What a budget did since the start, or since ``reset``; layers and forwards are added up.

    What ``add`` is given is counted later, that of many layers at once: a layer waits for no count.
    """

    def __init__(self) -> None:
        self._counted = {"rows": 0, "dropped_weight": 0.0, "shortlists": 0, "experts": 0}
        self._pending: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, natural: Tensor, kept: Tensor, weights: Tensor, ids: Tensor) -> None:
        """One shortlist.

        Args:
            natural: float [rows, k], the routing weights without a budget.
            kept: bool [rows, k], which of them the shortlist holds.
            weights, ids: [rows, k], what the rows run instead.
        """
        if len(self._pending) == _PENDING or (self._pending and self._pending[0][0].shape[1] != natural.shape[1]):
            self._count()
        self._pending.append((natural.clone(), kept, weights.clone(), ids.clone()))  # they may be overwritten

    def reset(self) -> None:
        """Start from zero."""
        self.__init__()

    def snapshot(self) -> dict:
        """As plain data.

        Returns:
            ``rows`` that were budgeted, once a layer; ``dropped_weight``: the sum over them of the share of their
            routing weights, of the experts selected for them, that fell outside; ``shortlists`` made, one a layer and
            forward; distinct ``experts`` that their rows then used; ``dropped_share``: the mean over the rows.
        """
        self._count()
        found = self._counted
        return {**found, "dropped_share": found["dropped_weight"] / found["rows"] if found["rows"] else 0.0}

    def _count(self) -> None:
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        natural, kept, weights, ids = (torch.cat(parts) for parts in zip(*pending, strict=True))
        lost = natural.masked_fill(kept, 0).sum(1) / natural.sum(1).clamp_min(1e-30)
        used, ids = (weights != 0).cpu().numpy(), ids.cpu().numpy()
        shortlist = np.repeat(np.arange(len(pending)), [len(part[0]) for part in pending])
        seen = np.zeros((len(pending), int(ids.max()) + 1), dtype=bool)
        seen[np.broadcast_to(shortlist[:, None], ids.shape)[used], ids[used]] = True
        counted = self._counted
        counted["rows"] += len(natural)
        counted["dropped_weight"] += float(lost.sum(dtype=torch.float64))
        counted["shortlists"] += len(pending)
        counted["experts"] += int(seen.sum())


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
