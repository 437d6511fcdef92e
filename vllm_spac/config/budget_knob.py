"""The knob ``budget``: a bound on the experts of a step, and how it is applied: ``BOUND@argument=value@...``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_spac import components
from vllm_spac.components import Argument, ComponentName
from vllm_spac.errors import brief

OFF = "off"
PATH = "path"  # of votes: rows are weighted
ALPHA = 0.5  # of weighted votes, by default
_HELP = (
    "use a number of experts (16), a share of the routing mass above 0 and at most 1 (0.98, or 0.98@of=scores), or off"
)
_RANKING = ComponentName("rankings", "ranking")
_ARGUMENTS = {
    "of": Argument("selected", ("selected", "scores")),
    "coverage": Argument("substitution", ("substitution", "truncation")),
    "when": Argument("verify", ("verify", "decode", "all")),
    "votes": Argument("uniform", ("uniform", PATH)),
    "alpha": Argument(ALPHA, (0.0, 1.0)),
}


@dataclass(frozen=True)
class BudgetKnob:
    """What ``budget`` says: at most one of ``experts`` and ``mass`` is set, none if it is off.

    A whole number is one of experts (``1``: B = 1), a number with a point is a share (``1.0``: all of the mass). The
    arguments of ``off`` are for budgets that are set while a server runs.

    Attributes:
        mass_of, ranking, coverage, when, votes: as in ``BudgetSettings``.
    """

    text: str = OFF  # the bound as it was given, without arguments
    explicit: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the arguments that were given
    experts: int | None = None  # experts per layer (B)
    mass: float | None = None  # share of the routing mass, above 0 and at most 1
    mass_of: str = "selected"
    ranking: str = "selected"
    coverage: str = "substitution"
    when: str = "verify"
    votes: str = "uniform"
    alpha: float | None = None  # the power of the probability by which draft rows count; None: all rows count the same

    @classmethod
    def parse(cls, text: str) -> BudgetKnob:
        """Parses a value of the knob; ``ValueError`` says what is wrong with any other text."""
        bound, given = components.parse(text.strip())
        kind = _kind(bound.strip())
        votes = given.get("votes", _ARGUMENTS["votes"].default)
        known = [*_ARGUMENTS, "ranking"]
        known = [name for name in known if {"of": "mass" in kind, "alpha": votes == PATH}.get(name, True)]
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{bound} has no argument {brief(name)}; it has {', '.join(known)}")
            if name in _ARGUMENTS:
                _ARGUMENTS[name].check(name, value)
        every = {name: each.default for name, each in _ARGUMENTS.items()} | given
        return cls(
            bound,
            given,
            **kind,
            mass_of=every["of"],
            ranking=_RANKING.check_name(every.get("ranking", cls.ranking)),
            coverage=every["coverage"],
            when=every["when"],
            votes=votes,
            alpha=float(every["alpha"]) if votes == PATH else None,
        )

    @property
    def bounds(self) -> bool:
        """Whether a budget is in force from the start."""
        return self.text != OFF

    def but(self, bound: object = None, **changed: Any) -> str:
        """Returns the knob's text with another bound, and with arguments changed; None leaves one out."""
        arguments = {name: value for name, value in (dict(self.explicit) | changed).items() if value is not None}
        return components.written(self.text if bound is None else str(bound), arguments)


def _kind(bound: str) -> dict[str, Any]:
    """The attribute that a bound sets; none for ``off``."""
    if bound == OFF:
        return {}
    try:
        share = float(bound)
    except ValueError:
        raise ValueError(_HELP) from None
    if re.fullmatch(r"[0-9]{1,7}", bound) and share > 0:
        return {"experts": int(bound)}
    if re.fullmatch(r"[0-9]+", bound) or not 0 < share <= 1:
        raise ValueError(_HELP)
    return {"mass": share}


class BudgetText:
    """The type of the knob, as metadata of ``str``; pydantic validates it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, int | float | str | Path):
            raise ValueError(_HELP)
        try:
            BudgetKnob.parse(text := str(value))
        except ValueError as error:
            raise ValueError(str(error).removeprefix("spac: ")) from error
        return text

    def values(self) -> list[str]:
        """The forms of the knob's values."""
        own = [f"@{name}=..." for name in (*_ARGUMENTS, "ranking") if name != "of"]
        return [OFF, "N", f"SHARE@of=..., with {''.join(own)}"]
