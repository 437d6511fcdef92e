"""Types of knobs: how their values and the arguments of these are written, and the number of slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field

from vllm_spac import components
from vllm_spac.components import FILE, Argument, filled
from vllm_spac.config.presets import PRESETS
from vllm_spac.errors import brief
from vllm_spac.errors import flag as flag
from vllm_spac.system.untrusted import path_of


def _path(value: Any) -> Any:
    return value if value is None else path_of(value)


AUTO = "auto"  # of cpu_experts: while steps are shorter with them
ROUNDED = "exact up to rounding"  # the mode of engines whose experts another kernel than vLLM's computes
# What an engine on a GPU is by default: the words of the log, of ``vllm-spac check`` and of the documents.
ROUNDED_ON_A_GPU = f"{ROUNDED} (on a GPU our kernel reads experts in place; --spac-plane slots gives stock's bits)"
ONLY_OURS_ON_A_GPU = f"{ROUNDED} (on a GPU our kernel reads experts in place; vLLM's reads no slots of this format)"
EXTRA = 0.1  # share of the needed loads that prefetches may add, by default
_LEAST_BYTES = 1 << 16  # of a size that is given without a unit
SomePath = Annotated[Path | None, BeforeValidator(_path)]
_SLOTS_HELP = (
    "use a number of experts per layer (32), a percentage of all experts (25%), a multiple of top-k for all layers "
    "together (2k), or auto"
)


@dataclass(frozen=True)
class SlotCount:
    """Number of experts kept in fast memory: a count per layer, a share of all, or as many as fit.

    At most one attribute is set; none for ``auto``. The share is exact: 7 % of 100 is 7.

    Attributes:
        tokens: of all layers together, as many experts as so many tokens need in one layer (``2k``: 2 x top-k).
    """

    per_layer: int | None = None
    share: Fraction | None = None
    tokens: int | None = None

    @classmethod
    def parse(cls, text: str | int) -> SlotCount:
        """Parses ``32``, ``25%``, ``2k`` or ``auto``; anything else raises ``ValueError``."""
        text = str(text).strip().lower()
        if text == "auto":
            return cls()
        if re.fullmatch(r"\d+", text) and int(text) > 0:
            return cls(per_layer=int(text))
        if (match := re.fullmatch(r"(\d+)k", text)) and int(match[1]) > 0:
            return cls(tokens=int(match[1]))
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
            share = Fraction(match[1]) / 100
            if 0 < share <= 1:
                return cls(share=share)
            raise ValueError(f"{text} is not above 0% and at most 100%; {_SLOTS_HELP}")
        raise ValueError(f"{text!r} is not understood; {_SLOTS_HELP}")


def _slots_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(_SLOTS_HELP)
    SlotCount.parse(value)
    return str(value)


def no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("use a number")
    return value


_A_UNIT = "Give a number with a unit, e.g. 32GiB or 512MiB"


def _check_size(value: Any) -> Any:
    """Refuses a number without a unit that is smaller than any expert: 32 was meant to be 32GiB."""
    value = no_bool(value)
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", str(value)) and 0 < float(value) < _LEAST_BYTES:
        number = str(value).strip()
        raise ValueError(f"that is {number} bytes; did you mean {number}GiB? {_A_UNIT}")
    if isinstance(value, str):
        found = re.fullmatch(r"\s*\d+(?:\.\d*)?\s*([A-Za-z]*)\s*", value)
        if found is None or found[1].lower() not in {"", *ByteSize.byte_sizes}:
            raise ValueError(f"{brief(value)} is no size. {_A_UNIT}")
    return value


@dataclass(frozen=True)
class SomeFile(Argument):
    """An argument that is a path; one with ``@`` in it cannot be written."""

    default: Any = None
    values: tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> None:
        try:
            path_of(str(value))
        except ValueError as error:
            raise ValueError(f"{name}={brief(value)}: {error}") from error


Size = Annotated[ByteSize, BeforeValidator(_check_size)]
SlotsText = Annotated[str, BeforeValidator(_slots_text)]


@dataclass(frozen=True, eq=False)
class WithArguments:
    """The type of a knob with few values, of which some take arguments, as metadata of ``str`` for pydantic."""

    names: Mapping[str, Mapping[str, Argument]]  # value -> its arguments by name

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if value is not None:
            self.split(value)
        return value

    def split(self, spec: Any) -> tuple[str, dict[str, Any]]:
        """Returns the value and all of its arguments, defaults included; ``ValueError`` for any other ``spec``."""
        name, given = components.parse(spec) if isinstance(spec, str) else (spec, {})
        if not isinstance(name, str) or name not in self.names:
            raise ValueError(f"use {' or '.join(self.values())}")
        return name, filled(name, given, self.names[name])

    def values(self) -> list[str]:
        """The knob's values, each with its arguments."""
        return ["@".join([name, *(f"{each}=..." for each in known)]) for name, known in self.names.items()]


LOCAL = "local"  # executor: no expert workers
_GROUPS = {"workers": Argument(None, (1, 256)), "per_layer": Argument(1, (1, 16))}
EXECUTOR = WithArguments({LOCAL: {}, "processes": _GROUPS, "cluster": {"file": SomeFile(), **_GROUPS}})
PREFETCHING = {  # of the prefetcher, beside arguments of the predictor
    "threshold": Argument(1, (1, 1 << 20)),
    "depth": Argument(16, (1, 1 << 20)),
    "background": Argument(None, (1, 64)),
    "extra": Argument(EXTRA, (0.0, 1.0)),
    "k": Argument(None, (1, 1 << 20)),
    "cutoff": Argument(None, (0, 1 << 20)),
    FILE: Argument(None, ()),
}
OF_DRAFTS = ("k", "cutoff")  # of these, of predictors that look at drafts
GUARD = WithArguments(
    {"on": {"cut": Argument("eager", ("eager", "always")), "lookups": Argument("off", ("off", "on"))}, "off": {}}
)
PLANE = WithArguments({AUTO: {}, "slots": {}, "table": {}, "pointers": {}})
SPECULATE = WithArguments(
    {"off": {}, **dict.fromkeys(("restricted", "predicted"), {"when": Argument("decode", ("decode", "all"))})}
)


ALLOWED = ("exact", "rounding")  # of a tuned profile; the latter allows both


def split_tuned(text: str) -> tuple[str, str | None]:
    """Returns the profile that ``tuned`` names, and what it may set, None: as the machine is.

    Raises:
        ValueError: that is none of ``ALLOWED``.
    """
    name, given, allow = text.rpartition("@allow=")
    if not given:
        return text, None
    if allow not in ALLOWED:
        raise ValueError(f"allow={brief(allow)}: use allow={' or '.join(ALLOWED)}")
    return name, allow


def _tuned_text(value: Any) -> str:
    name, allow = split_tuned(str(path_of(value)))
    return value if name in ("off", "auto") else str(path_of(name)) + (f"@allow={allow}" if allow else "")


TunedText = Annotated[
    str,
    BeforeValidator(_tuned_text),
    Field(
        description="A profile of vllm-spac tune, whose knobs are used if you set none of them: auto, with vllm serve "
        "the one beside the packed experts; off; or a file; with @allow=exact it may set exact knobs alone, with "
        "@allow=rounding also those that are exact up to rounding, which is the default on a GPU but with plane=slots."
    ),
]


def _preset_name(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or value not in PRESETS):
        raise ValueError(f"no preset is called {brief(value)}; use one of {', '.join(PRESETS)}")
    return value


PresetName = Annotated[str | None, BeforeValidator(_preset_name)]


RECORDED = ("trace", "timeline")  # what can be recorded
_RECORD_HELP = "use trace=FILE, timeline=FILE, or both with a comma between them"
_NEXT = re.compile(rf",(?=(?:{'|'.join(RECORDED)})=)")  # commas of paths are kept


def recordings(text: str | None) -> dict[str, Path]:
    """Returns the files that the knob ``record`` names; ``ValueError`` if it is not understood."""
    parts = [] if text is None else _NEXT.split(text)
    found: dict[str, Path] = {}
    for part in parts:
        name, given, path = part.partition("=")
        if name not in RECORDED or not given or name in found:
            raise ValueError(f"{brief(part)}: {_RECORD_HELP}")
        found[name] = path_of(path)
    if len(set(found.values())) < len(found):
        raise ValueError("trace and timeline would replace each other; name two files")
    return found


def _record_text(value: Any) -> Any:
    if value is not None and not isinstance(value, str):
        raise ValueError(_RECORD_HELP)
    recordings(value)
    return value


RecordText = Annotated[str | None, BeforeValidator(_record_text)]
HTTP = ("page", "control")


def listed(text: str | None) -> list[str]:
    """Returns the names of a list with commas."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def _http_text(value: Any) -> Any:
    if value is not None and (not isinstance(value, str) or not set(listed(value)) <= set(HTTP)):
        raise ValueError(f"{brief(value)}: use {', '.join(HTTP)}, or {','.join(HTTP)}")
    return value


HttpText = Annotated[str | None, BeforeValidator(_http_text)]
