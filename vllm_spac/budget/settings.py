"""Settings of a budget, parsed from plain data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator

from vllm_spac.core import RowKind
from vllm_spac.errors import ConfigError
from vllm_spac.knobs.types import ALPHA
from vllm_spac.system.printable import brief, shortened

_KINDS = {
    "verify": (RowKind.VERIFY,),
    "decode": (RowKind.VERIFY, RowKind.DECODE),
    "all": tuple(RowKind),
}
_MOST_PROBLEMS = 3  # named in one refusal


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
    """Budget settings that can be changed while the model runs; nothing set means exact. An unknown key is an error.

    Attributes:
        budget: experts per layer that one forward may use (B), for all layers or by layer name.
        mass: instead of B, the share of the mass that the shortlist of each layer and forward must hold.
        mass_of: which mass. ``selected``: the routing weights of the experts selected by the voting rows; experts that
            no row selected are ranked last. ``scores``: the routers' scores of all experts (MoE-Spec's s_i).
        ranking: name of a ranking in ``vllm_spac.budget.rankings``. Whichever it is, the experts that voting rows
            selected come first: where these are no more than the shortlist holds, nothing is cut.
        coverage: how a row is routed without an expert that is outside the shortlist.
        rescue: with truncation, a row whose experts are all outside gets the best expert of the shortlist, at that
            expert's natural weight.
        when: which rows vote and are cut.
        votes: how much each of these rows counts. ``uniform``: all the same; ``path``: P ** votes_alpha, where P is the
            probability that the row is reached (``budget.votes``).
        votes_alpha: from 0, which equals ``uniform``, to 1.
        window: number of consecutive rows of a request that are ranked at a time, as if they were one verify step. For
            evaluation.
        speculate: instead of a bound, experts are run by prediction (``budget.speculated``). Then ``when=verify``
            means all decoding rows too; with ``all``, experts in fast memory do not count as admitted, because while
            a prompt is read a layer finds all or none of its experts there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    budget: _Bound | None = None
    mass: Annotated[float, BeforeValidator(_number)] | None = None
    mass_of: Literal["selected", "scores"] = "selected"
    ranking: str = "selected"
    coverage: Literal["substitution", "truncation"] = "substitution"
    rescue: bool = False
    when: Literal["verify", "decode", "all"] = "verify"
    votes: Literal["uniform", "path"] = "uniform"
    votes_alpha: Annotated[float, Field(ge=0, le=1), BeforeValidator(_number)] = ALPHA
    window: Annotated[int, Field(ge=1, le=1 << 20), BeforeValidator(_number)] | None = None
    speculate: Literal["off", "restricted", "predicted"] = "off"

    @model_validator(mode="after")
    def _one_bound(self) -> BudgetSettings:
        if self.budget is not None and self.mass is not None:
            raise ValueError("budget and budget_mass bound the same thing; use one of them")
        if self.speculate != "off" and (self.budget is not None or self.mass is not None):
            raise ValueError("speculate and a budget both choose a layer's experts; use one of them")
        if self.mass is None and self.mass_of != "selected":
            raise ValueError(f"mass_of={self.mass_of} has no effect without a share; give mass as well")
        if self.votes == "uniform" and self.votes_alpha != ALPHA:
            raise ValueError(f"votes_alpha={self.votes_alpha} has no effect on uniform votes; give votes=path as well")
        if self.rescue and self.coverage != "truncation":
            raise ValueError("rescue has no effect with substitution, which gives every row experts; use truncation")
        return self

    @classmethod
    def parse(cls, raw: Any) -> BudgetSettings:
        """Parses plain data, e.g. the body of ``POST /spac/budget``; ``ConfigError`` names what is wrong."""
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
        bound = "by layer" if isinstance(self.budget, dict) else self.budget
        if self.mass is not None:
            bound = f"{self.mass:g} of the mass {self.mass_of}"
        rescue = " with rescue" if self.rescue else ""
        votes = "" if self.alpha is None else f", path votes ** {self.alpha:g}"
        return f"lossy (budget {bound}, {self.ranking}, {self.coverage}{rescue}, {self.when} rows{votes})"
