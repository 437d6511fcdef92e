"""Applies an expert budget to a layer's routing: who votes, who is cut, and what was dropped (MoE-Spec; §2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from vllm_spac import components
from vllm_spac.budgets.base import Budget, LayerContext, check_mass, mass_cut, router_mass, validate
from vllm_spac.calibration import Calibration
from vllm_spac.core import RowKind, Step
from vllm_spac.coverage import substitute, truncate
from vllm_spac.errors import ConfigError, UnsupportedError

_CUT = {
    "verify": (RowKind.VERIFY,),
    "decode": (RowKind.VERIFY, RowKind.DECODE),
    "all": tuple(RowKind),
}


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("use a number")
    return value


class BudgetSettings(BaseModel):
    """What can be changed while the model runs; nothing set means exact. An unknown key is an error.

    Attributes:
        budget: experts a layer may touch in one forward (B), for all layers or by layer name.
        mass: instead of B, the share of the router mass that the shortlist of each layer and forward must hold.
        ranking: name of a ranking in ``vllm_spac.budgets``.
        coverage: what a row does without an expert that is outside.
        when: the kinds of step whose rows vote and are cut.
        window: rank so many consecutive rows of a request at a time, as if each were one verify step. For evaluation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    budget: Annotated[int, BeforeValidator(_number)] | dict[str, int] | None = None
    mass: Annotated[float, BeforeValidator(_number)] | None = None
    ranking: str = "router"
    coverage: Literal["substitution", "truncation"] = "substitution"
    when: Literal["verify", "decode", "all"] = "verify"
    window: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _one_bound(self) -> BudgetSettings:
        if self.budget is not None and self.mass is not None:
            raise ValueError("budget and budget_mass bound the same thing; use one of them")
        return self

    @classmethod
    def parse(cls, raw: Any) -> BudgetSettings:
        """From plain data, e.g. the body of ``POST /spac/budget``; ``ConfigError`` says what is wrong."""
        try:
            return cls(**raw)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'budget'}: {item['msg'].removeprefix('Value error, ')}"
                for item in error.errors()
            )
            raise ConfigError(f"spac: {problems}; known: {', '.join(cls.model_fields)}") from None
        except TypeError:
            raise ConfigError(f'spac: a budget is a mapping such as {{"budget": 16}}, not {raw!r}') from None

    @property
    def active(self) -> bool:
        return self.budget is not None or self.mass is not None

    def describe(self) -> str:
        """A few words for the log and the metrics."""
        if not self.active:
            return "exact"
        bound = f"mass {self.mass}" if self.mass is not None else "by layer" if isinstance(self.budget, dict) else ""
        return f"lossy (budget {bound or self.budget}, {self.ranking}, {self.coverage}, {self.when} rows)"


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


@dataclass
class BudgetCounters:
    """What a budget did since the start, or since ``reset``; layers and forwards are added up.

    Attributes:
        rows: rows that were budgeted, once a layer.
        dropped_mass: sum over those rows of the share of their natural mixing weights that fell outside.
        shortlists: shortlists made; one a layer and forward.
        experts: distinct experts that their rows then used.
    """

    rows: int = 0
    dropped_mass: float = 0.0
    shortlists: int = 0
    experts: int = 0

    def add(self, used, dropped, rows: int) -> None:
        """One shortlist: ids that are used, float [rows] shares that were dropped (None: nothing), rows."""
        self.rows += rows
        self.shortlists += 1
        self.experts += len(np.unique(used.cpu().numpy()))
        if dropped is not None:
            self.dropped_mass += float(dropped.sum())

    def reset(self) -> None:
        """Start from zero."""
        self.__init__()

    def snapshot(self) -> dict:
        """A copy as plain data, with ``dropped_share``: the mean over the rows."""
        return {**asdict(self), "dropped_share": self.dropped_mass / self.rows if self.rows else 0.0}


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
        self._ranking: Budget | None = None
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
        layer = self.layers[index]
        parts = self._rows(step)
        if not parts:
            return weights, ids
        weights, ids = weights.clone(), ids.clone()
        for rows in parts:
            probs, natural = layer.rule.probs(logits[rows]), (weights[rows].clone(), ids[rows].clone())
            shortlist = self._shortlist(index, probs, *natural, rows, outputs)
            if len(shortlist) == layer.experts:
                self.counters.add(natural[1], None, len(probs))
                continue
            covered = self._cover(layer, probs, *natural, shortlist)
            weights[rows], ids[rows] = covered
            inside = torch.zeros(layer.experts, dtype=torch.bool, device=ids.device).index_fill(0, shortlist, True)
            kept = natural[0] * inside[natural[1].long()]
            dropped = 1 - kept.sum(1) / natural[0].sum(1).clamp_min(1e-30)
            self.counters.add(covered[1][covered[0] != 0], dropped, len(probs))
        return weights, ids

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

    def _shortlist(self, index: int, probs: Tensor, weights: Tensor, ids: Tensor, rows, outputs) -> Tensor:
        layer, settings = self.layers[index], self.settings
        bound = settings.budget[layer.name] if isinstance(settings.budget, dict) else settings.budget
        count = layer.experts if bound is None else bound
        votes = torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        context = LayerContext(
            layer=index,
            resident=layer.resident() if layer.resident is not None and settings.ranking == "resident" else None,
            mixing=torch.zeros_like(probs).scatter(1, ids.long(), weights.float()) if self._mixes else None,
            outputs=outputs[rows] if outputs is not None else None,
        )
        order = self._ranking.rank(probs, votes, count, context)
        if settings.mass is None:
            return order
        least = layer.top_k if settings.coverage == "substitution" else 1
        return order[: mass_cut(order, router_mass(probs, votes), settings.mass, least)]

    def _cover(self, layer: BudgetedLayer, probs: Tensor, weights: Tensor, ids: Tensor, shortlist: Tensor):
        if self.settings.coverage == "truncation":
            return truncate(probs, ids, weights, shortlist)
        rule = layer.rule
        chosen_by = None if rule.bias is None else probs + rule.bias
        groups = {"groups": rule.groups, "top_groups": rule.top_groups}
        options = {"selection": chosen_by, "scale": rule.scale, "natural": (weights, ids), **groups}
        return substitute(probs, layer.top_k, shortlist, rule.renormalize, **options)


def _ranking(name: str, calibration: Calibration | None, offline: bool) -> Budget:
    found = components.find("budgets", name)
    if found.offline and not offline:
        serving = [n for n in components.names("budgets") if not components.find("budgets", n).offline]
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
