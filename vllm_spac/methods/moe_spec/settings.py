"""Settings of a budget, parsed from plain data, with their limits; the layers under it; and how much each row counts.

A ``RoutingRule`` is how a checkpoint turns router logits into routing weights.

**Votes (ours).** MoE-Spec's Eq. 5 gives every row of a verify step the same vote, so a draft token that is reached once
in a thousand steps counts as much as the row that is certain. Weighted,

    s_i = sum_t w_t g_i(h_t),    w_t = P(t is reached) ** alpha,

where P is the product of the draft's probabilities along the path to t. alpha = 0 is Eq. 5, alpha = 1 the expected
mass. Votes are multiples of 2**-12, from 2**-12 to 1. So the product of a vote and a float32 score is exact in float64,
and so are sums of such products whose terms are within a factor of 2**17 / rows: their order does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from vllm_spac.config.budget_knob import ALPHA, BudgetKnob
from vllm_spac.config.types import SPECULATE, no_bool
from vllm_spac.core import RequestRows, RowKind, Step, weights_of
from vllm_spac.errors import ConfigError, Remedy, UnsupportedError, brief, shortened, use

if TYPE_CHECKING:
    from vllm_spac.config.config import SpacConfig

MASSES = ("selected", "scores")  # the mass that a share refers to: ``selected_mass`` or ``router_mass``


def check_mass(mass: float) -> None:
    """Raises ``ConfigError`` unless ``mass`` is above 0 and at most 1."""
    if not 0 < mass <= 1:
        raise ConfigError(
            f"spac: mass={mass} (--spac-budget): use a share of the mass above 0 and at most 1, e.g. 0.98"
        )


def check_mass_of(mass_of: str) -> None:
    """Raises ``ConfigError`` unless ``mass_of`` is one of ``MASSES``."""
    if mass_of not in MASSES:
        raise ConfigError(f"spac: mass_of={mass_of!r} (--spac-budget): use {' or '.join(MASSES)}")


def check_budget(budget: int, experts: int, top_k: int, coverage: str, knob: BudgetKnob | None = None) -> None:
    """Raises ``ConfigError`` unless a layer of ``experts`` experts can run with ``budget`` of them; ``knob`` is its."""
    knob = knob or BudgetKnob(str(budget))
    least = top_k if coverage == "substitution" else 1
    problem = f"spac: budget={budget} (--spac-budget): "
    if 1 <= budget < least:
        raise ConfigError.refused(
            f"{problem}substitution gives every token {top_k} experts",
            Remedy(f"use {least} to {experts}", {"budget": knob.but(least)}),
            use(budget=knob.but(coverage="truncation")),
        )
    if not least <= budget <= experts:
        fits = Remedy(f"use {least} to {experts}", {"budget": knob.but(max(least, min(budget, experts)))})
        raise ConfigError.refused(f"{problem}a layer has {experts} experts", fits)


@dataclass(frozen=True, eq=False)
class RoutingRule:
    """How a checkpoint turns router logits into weights, as vLLM configured it."""

    scoring: str = "softmax"  # ``softmax`` or ``sigmoid``
    renormalize: bool = True  # whether the weights of a row are divided by their sum
    scale: float = 1.0  # factor of the weights (``routed_scaling_factor``)
    bias: Tensor | None = None  # float [N], added to the scores for the choice of experts, not for their weights
    # groups, top_groups: experts are chosen from the ``top_groups`` best of ``groups`` equal groups; None: from all
    groups: int | None = None
    top_groups: int | None = None
    custom: bool = False  # the model has its own routing function, which substitution cannot reproduce

    def probs(self, logits: Tensor) -> Tensor:
        """float32 [rows, N], the scores of all experts."""
        logits = logits.float()
        return logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)

    @property
    def weighing(self) -> dict[str, Any]:
        """Arguments of ``kernels.cover`` that say how the checkpoint chooses and weighs experts."""
        bias = None if self.bias is None else self.bias.float()
        groups = {"groups": self.groups, "top_groups": self.top_groups}
        return {"renormalize": self.renormalize, "bias": bias, "scale": self.scale, **groups}


_KINDS = {"verify": (RowKind.VERIFY,), "decode": (RowKind.VERIFY, RowKind.DECODE), "all": tuple(RowKind)}
_MOST_PROBLEMS = 3  # named in one refusal


_Experts = Annotated[int, Field(ge=0, le=1 << 20), BeforeValidator(no_bool)]


class BudgetSettings(BaseModel):
    """Budget settings that can be changed while the model runs; nothing set means exact. An unknown key is an error.

    Attributes:
        mass: instead of B, the share of the mass that the shortlist of each layer and forward must hold.
        mass_of: which mass. ``selected``: the routing weights of the experts selected by the voting rows; experts that
            no row selected are ranked last. ``scores``: the routers' scores of all experts (MoE-Spec's s_i).
        ranking: name of a ranking (``components``). Whichever it is, the experts that voting rows
            selected come first: where these are no more than the shortlist holds, nothing is cut.
        coverage: what a row runs instead of an expert that is outside the shortlist: ``substitution``, another one;
            ``truncation``, none.
        votes: how much each of these rows counts. ``uniform``: all the same; ``path``: P ** votes_alpha, where P is the
            probability that the row is reached (``vote``).
        votes_alpha: from 0, which equals ``uniform``, to 1.
        window: number of consecutive rows of a request that are ranked at a time, as if they were one verify step. For
            evaluation.
        speculate: instead of a bound, experts are run by prediction (``speculating_experts``). Then ``when=verify``
            means all decoding rows too; with ``all``, experts in fast memory do not count as admitted, because while
            a prompt is read a layer finds all or none of its experts there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    budget: _Experts | None = None  # experts per layer that one forward may use (B)
    mass: Annotated[float, BeforeValidator(no_bool)] | None = None
    mass_of: Literal["selected", "scores"] = "selected"
    ranking: str = "selected"
    coverage: Literal["substitution", "truncation"] = "substitution"
    when: Literal["verify", "decode", "all"] = "verify"  # which rows vote and are cut
    votes: Literal["uniform", "path"] = "uniform"
    votes_alpha: Annotated[float, Field(ge=0, le=1), BeforeValidator(no_bool)] = ALPHA
    window: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(no_bool)] | None = None
    speculate: Literal["off", "restricted", "predicted"] = "off"

    @model_validator(mode="after")
    def _one_bound(self) -> BudgetSettings:
        if self.budget is not None and self.mass is not None:
            raise ValueError("budget and mass bound the same thing; use one of them")
        if self.speculate != "off" and (self.budget is not None or self.mass is not None):
            raise ValueError("speculate and a budget both choose a layer's experts; use one of them")
        if self.mass is None and self.mass_of != "selected":
            raise ValueError(f"mass_of={self.mass_of} has no effect without a share; give mass as well")
        if self.votes == "uniform" and self.votes_alpha != ALPHA:
            raise ValueError(f"votes_alpha={self.votes_alpha} has no effect on uniform votes; give votes=path as well")
        return self

    @classmethod
    def at_start(cls, config: SpacConfig) -> BudgetSettings:
        """Returns those of the knobs.

        Of the knob ``budget``, 16 is ``budget`` here, 0.98@of=scores is ``mass`` and ``mass_of``; ``alpha`` is
        ``votes_alpha``.
        """
        knob = config.parsed_budget
        speculate, its = SPECULATE.split(config.speculate)
        return cls(
            budget=knob.experts,
            mass=knob.mass,
            mass_of=knob.mass_of,
            ranking=knob.ranking,
            coverage=knob.coverage,
            when=its.get("when", knob.when),
            votes=knob.votes,
            votes_alpha=ALPHA if knob.alpha is None else knob.alpha,
            speculate=speculate,
        )

    @classmethod
    def parse(cls, raw: Any) -> BudgetSettings:
        """Parses plain data, e.g. the body of ``POST /spac/budget``; ``ConfigError`` names what is wrong."""
        try:
            return cls(**raw)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            problems = "; ".join(
                f"{shortened('.'.join(map(str, item['loc']))) or 'budget'}: {item['msg'].removeprefix('Value error, ')}"
                for item in errors[:_MOST_PROBLEMS]
            )
            if len(errors) > _MOST_PROBLEMS:
                problems += f"; and {len(errors) - _MOST_PROBLEMS} more"
            raise ConfigError(f"spac: {problems}; known: {', '.join(cls.model_fields)}") from None
        except TypeError:
            raise ConfigError(f'spac: a budget is a mapping such as {{"budget": 16}}, not {brief(raw)}') from None

    def least(self, layer: BudgetedLayer) -> int:
        """The smallest shortlist that a layer can run with."""
        return layer.top_k if self.coverage == "substitution" else 1

    def bounds(self, layers: Sequence[BudgetedLayer], step: Step) -> tuple[int, ...] | None:
        """How many experts of each layer all rows of ``step`` together may run, if a number bounds them all."""
        if self.budget is None or self.window is not None:
            return None
        if any(request.kind not in self.kinds for request in step.requests):
            return None
        return tuple(self.budget or layer.experts for layer in layers)

    def holds_all(self, layers: Sequence[BudgetedLayer]) -> bool:
        """Whether nothing is cut, because each layer may run all of its experts, or all of the mass is held."""
        if self.mass is not None:  # of weighted votes, a row that counts nothing has no mass
            return self.mass == 1.0 and self.alpha is None
        return self.budget is not None and all(self.budget >= layer.experts for layer in layers)

    @property
    def kinds(self) -> tuple[RowKind, ...]:
        """Kinds of rows that vote and are cut, or whose experts are speculated."""
        return _KINDS["decode" if self.speculate != "off" and self.when == "verify" else self.when]

    @property
    def alpha(self) -> float | None:
        """Exponent of the rows' votes; None for uniform ones."""
        return self.votes_alpha if self.votes == "path" else None

    @property
    def active(self) -> bool:
        return self.budget is not None or self.mass is not None or self.speculate != "off"

    def describe(self) -> str:
        """A short description for the log and the metrics."""
        if not self.active:
            return "exact"
        if self.speculate != "off":
            return f"lossy (speculated execution, {self.speculate}, {'all' if self.when == 'all' else 'decoding'} rows)"
        bound = self.budget if self.mass is None else f"{self.mass:g} of the mass {self.mass_of}"
        votes = "" if self.alpha is None else f", path votes ** {self.alpha:g}"
        return f"lossy (budget {bound}, {self.ranking}, {self.coverage}, {self.when} rows{votes})"


@dataclass(frozen=True)
class BudgetedLayer:
    """A MoE layer under a budget."""

    name: str
    experts: int
    top_k: int
    rule: RoutingRule
    # returns bool [N], which experts are in fast memory; None if no ranking uses it
    resident: Callable[[], Tensor] | None = field(default=None, compare=False)


def check_layer(layer: BudgetedLayer, settings: BudgetSettings) -> None:
    """Refuses a budget that ``layer`` cannot run with.

    Raises:
        ConfigError: the bound does not fit it.
        UnsupportedError: it routes by a function of its own, which the coverage would have to repeat.
    """
    if settings.coverage == "substitution" and layer.rule.custom:
        raise UnsupportedError(
            f"spac: {layer.name} routes by a function of its own, which substitution cannot repeat; "
            "use coverage=truncation (--spac-budget)"
        )
    if settings.budget is not None:
        check_budget(settings.budget, layer.experts, layer.top_k, settings.coverage)


STEPS = 1 << 12  # votes are multiples of 1 / STEPS


def vote(probability: float, alpha: float) -> float:
    """Returns ``probability ** alpha`` as a multiple of 1 / ``STEPS``; at least one, since 0 is no vote."""
    return min(max(1, round(probability**alpha * STEPS)), STEPS) / STEPS


def voted(step: Step, alpha: float | None) -> Step:
    """Returns ``step`` with the rows' votes as their weights, which were the probabilities that they are reached.

    A request whose votes are all 1 has no weights, and with ``alpha`` None (uniform votes) none has.
    """
    if all(request.weights is None for request in step.requests):
        return step
    requests = []
    for request in step.requests:
        votes = () if alpha is None else tuple(vote(weight, alpha) for weight in request.weights or ())
        requests.append(replace(request, weights=votes if any(each != 1 for each in votes) else None))
    return replace(step, requests=tuple(requests))


class Group(NamedTuple):
    """Rows that are ranked together."""

    rows: slice | Tensor  # a slice, or int64 row numbers
    votes: Tensor | None  # float64 [rows]; None: all are 1


def groups(step: Step, kinds: Sequence[RowKind], window: int | None, device: torch.device | str) -> list[Group]:
    """Returns the rows of ``step`` that are ranked together, with its weights as votes.

    Args:
        window: number of consecutive rows of a request that are ranked at a time; None: all rows of the step.
    """
    voting = [request for request in step.requests if request.kind in kinds]
    parts = [voting] if window is None else [[part] for request in voting for part in request.windows(window)]
    return [_group(part, device) for part in parts if part]


def _group(requests: Sequence[RequestRows], device: torch.device | str) -> Group:
    weights, first, last = weights_of(requests), requests[0].start, requests[-1].stop
    rows: slice | Tensor = slice(first, last)
    if last - first != sum(request.stop - request.start for request in requests):
        rows = torch.cat([torch.arange(request.start, request.stop) for request in requests])
    return Group(rows, None if weights is None else torch.tensor(weights, dtype=torch.float64, device=device))


def unknown(step: Step) -> int:
    """Returns the number of requests that verify drafts whose probabilities are not known."""
    return sum(request.kind == RowKind.VERIFY and request.weights is None for request in step.requests)
