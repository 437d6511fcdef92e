"""Types of knobs: how their values are written, and the number of slots."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field

from vllm_spac.errors import flag as flag
from vllm_spac.system.untrusted import path_of


def _path(value: Any) -> Any:
    return value if value is None else path_of(value)


ALPHA = 0.5  # of weighted votes, by default
STEPS = 256  # of a timeline, by default
AUTO = "auto"  # of prefetch: a predictor is chosen, or none; of cpu_experts: the balancer selects them
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


def _check_slots(value: str) -> str:
    SlotCount.parse(value)
    return value


def _as_text(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(_SLOTS_HELP)
    return str(value)


def no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("use a number")
    return value


def _check_size(value: Any) -> Any:
    """Refuses a number without a unit that is smaller than any expert: 32 was meant to be 32GiB."""
    value = no_bool(value)
    if re.fullmatch(r"\s*\d+(\.\d*)?\s*", str(value)) and 0 < float(value) < _LEAST_BYTES:
        number = str(value).strip()
        raise ValueError(f"that is {number} bytes; did you mean {number}GiB? Give a unit, e.g. 32GiB or 512MiB")
    return value


def _check_cpu_experts(value: str) -> str:
    if value not in ("off", "auto") and not re.fullmatch(r"[1-9][0-9]{0,5}", value):
        raise ValueError("use off, auto, or a number of experts of a layer, 1 or more")
    return value


Size = Annotated[ByteSize, BeforeValidator(_check_size)]
SlotsText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check_slots)]
CpuExpertsText = Annotated[str, BeforeValidator(lambda value: str(no_bool(value))), AfterValidator(_check_cpu_experts)]


TunedText = Annotated[
    str,
    BeforeValidator(lambda value: value if value in ("off", "auto") else str(path_of(value))),
    Field(
        description="A profile of vllm-spac tune, whose knobs are used if you set none of them: auto, with vllm serve "
        "the one beside the packed experts; off; or a file."
    ),
]


TunedAllow = Annotated[
    Literal["exact", "rounding", "lossy"],
    Field(
        description="What a tuned profile may set: exact, exact knobs alone; rounding, also knobs that are exact up to "
        "rounding; lossy, also budgets. One that sets more is not used."
    ),
]
