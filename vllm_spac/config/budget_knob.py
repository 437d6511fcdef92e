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
from vllm_spac.system.untrusted import path_of

OFF = "off"
PATH = "path"  # of votes: rows are weighted
ALPHA = 0.5  # of weighted votes, by default
_HELP = (
    "use a number of experts (16), a share of the routing mass above 0 and at most 1 (0.98, or 0.98@of=scores), the "
    "file of vllm-spac quality budgets, or off"
)
_RANKING = ComponentName("rankings", "ranking")
_ARGUMENTS = {
    "of": Argument("selected", ("selected", "scores")),
    "coverage": Argument("substitution", ("substitution", "truncation")),
    "when": Argument("verify", ("verify", "decode", "all")),
    "votes": Argument("uniform", ("uniform", PATH)),
    "alpha": Argument(ALPHA, (0.0, 1.0)),
}
_TEXTS = ("ranking", "calibration")  # arguments that are text, whatever it looks like
_NEXT = re.compile(rf"@(?=(?:{'|'.join([*_ARGUMENTS, *_TEXTS])})=)")  # paths may have other "@"


@dataclass(frozen=True)
class BudgetKnob:
    """What ``budget`` says: at most one of ``experts``, ``mass`` and ``file`` is set, none if it is off.

    A whole number is one of experts (``1``: B = 1), a number with a point is a share (``1.0``: all of the mass), and
    all else but ``off`` is a path. The arguments of ``off`` are for budgets that are set while a server runs.

    Attributes:
        mass_of, ranking, coverage, when, votes: as in ``BudgetSettings``.
    """

    text: str = OFF  # the bound as it was given, without arguments
    explicit: Mapping[str, Any] = field(default_factory=dict, hash=False)  # the arguments that were given
    experts: int | None = None  # experts per layer (B)
    mass: float | None = None  # share of the routing mass, above 0 and at most 1
    file: Path | None = None  # of budgets by layer
    mass_of: str = "selected"
    ranking: str = "selected"
    coverage: str = "substitution"
    when: str = "verify"
    votes: str = "uniform"
    alpha: float | None = None  # the power of the probability by which draft rows count; None: all rows count the same
    calibration: Path | None = None  # the file of a calibration

    @classmethod
    def parse(cls, text: str) -> BudgetKnob:
        """Parses a value of the knob; ``ValueError`` says what is wrong with any other text."""
        bound, *settings = _NEXT.split(text.strip())
        given: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            given |= {name: value} if name in _TEXTS else components.parse(f"budget@{setting}")[1]
        kind = _kind(bound.partition("@")[0].strip())
        if kind is None:
            kind = {"file": path_of(bound)}
        else:
            bound, unknown = components.parse(bound)
            given |= unknown
        votes = given.get("votes", _ARGUMENTS["votes"].default)
        known = [*_ARGUMENTS, *_TEXTS]
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
            calibration=path_of(given["calibration"]) if "calibration" in given else None,
        )

    @property
    def bounds(self) -> bool:
        """Whether a budget is in force from the start."""
        return self.text != OFF

    def but(self, bound: object = None, **changed: Any) -> str:
        """Returns the knob's text with another bound, and with arguments changed; None leaves one out."""
        arguments = {name: value for name, value in (dict(self.explicit) | changed).items() if value is not None}
        return components.written(self.text if bound is None else str(bound), arguments)


def _kind(bound: str) -> dict[str, Any] | None:
    """The attribute that a bound sets; none for ``off``, and None for a path."""
    if bound == OFF:
        return {}
    try:
        share = float(bound)
    except ValueError:
        return None
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
        own = [f"@{name}=..." for name in (*_ARGUMENTS, *_TEXTS) if name != "of"]
        return [OFF, "N", "SHARE@of=...", f"FILE, with {''.join(own)}"]
