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
    "file of vllm-spac budgets, or off"
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
        text: the bound as it was given, without arguments.
        experts: experts per layer (B).
        mass: share of the routing mass, above 0 and at most 1.
        file: of budgets by layer.
        given: the arguments that were given.
    """

    text: str = OFF
    experts: int | None = None
    mass: float | None = None
    file: Path | None = None
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> BudgetKnob:
        """Parses a value of the knob; ``ValueError`` says what is wrong with any other text."""
        bound, *settings = _NEXT.split(text.strip())
        given: dict[str, Any] = {}
        for setting in settings:
            name, _, value = setting.partition("=")
            given |= {name: value} if name in _TEXTS else components.parse(f"budget@{setting}")[1]
        made = cls._bound(bound, given)
        made._check()
        return made

    @classmethod
    def _bound(cls, bound: str, given: dict[str, Any]) -> BudgetKnob:
        number = bound.partition("@")[0].strip()
        try:
            share = None if number == OFF else float(number)
        except ValueError:
            return cls(bound, file=path_of(bound), given=given)
        given = components.parse(bound)[1] | given  # the first are unknown
        if share is None:
            return cls(given=given)
        if re.fullmatch(r"[0-9]{1,7}", number) and share > 0:
            return cls(number, experts=int(number), given=given)
        if re.fullmatch(r"[0-9]+", number) or not 0 < share <= 1:
            raise ValueError(_HELP)
        return cls(number, mass=share, given=given)

    def _check(self) -> None:
        known = [*_ARGUMENTS, *_TEXTS]
        if self.mass is None:
            known.remove("of")
        if self.votes != PATH:
            known.remove("alpha")
        for name, value in self.given.items():
            if name not in known:
                raise ValueError(f"{self.text} has no argument {brief(name)}; it has {', '.join(known)}")
            if name in _ARGUMENTS:
                _ARGUMENTS[name].check(name, value)
        _RANKING.check_name(self.ranking)
        _ = self.calibration  # a path

    def _argument(self, name: str) -> Any:
        return self.given.get(name, _ARGUMENTS[name].default)

    @property
    def bounds(self) -> bool:
        """Whether a budget is in force from the start."""
        return self.text != OFF or self.file is not None

    @property
    def mass_of(self) -> str:
        """The mass of a share: ``selected``, the weights of the selected experts, or ``scores``, those of all."""
        return str(self._argument("of"))

    @property
    def ranking(self) -> str:
        """The ranking's name."""
        return str(self.given.get("ranking", "selected"))

    @property
    def coverage(self) -> str:
        """What a row runs instead of an expert that was cut."""
        return str(self._argument("coverage"))

    @property
    def when(self) -> str:
        """Which rows vote and are cut."""
        return str(self._argument("when"))

    @property
    def votes(self) -> str:
        """How much each of these rows counts."""
        return str(self._argument("votes"))

    @property
    def alpha(self) -> float | None:
        """The power of the probability by which draft rows count; None: all rows count the same."""
        return float(self._argument("alpha")) if self.votes == PATH else None

    @property
    def calibration(self) -> Path | None:
        """The file of a calibration."""
        found = self.given.get("calibration")
        return None if found is None else path_of(found)

    def but(self, bound: object = None, **changed: Any) -> str:
        """Returns the knob's text with another bound, and with arguments changed; None leaves one out."""
        arguments = {name: value for name, value in (dict(self.given) | changed).items() if value is not None}
        return components.written(self.text if bound is None else str(bound), arguments)


@dataclass(frozen=True)
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
