"""Exceptions of the package; each message states a remedy, and a refusal's are also data that a test follows.

Values in messages may be anybody's (file contents, model names, answers of servers): ``brief`` and ``printable`` make
them safe to print.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

_MOST = 4000


def printable(text: object, most: int = _MOST) -> str:
    """Returns one line in which control characters, escape sequences and lone surrogates are backslash-escaped.

    Args:
        most: longer text is cut in the middle, with the number of characters left out.
    """
    text = shortened(str(text), most)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape", "surrogatepass").decode() for letter in text
    )


def shortened(text: str, most: int = 120) -> str:
    """Returns ``text`` itself, or its two ends around the number of characters left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...({len(text) - 2 * half} characters)...{text[-half:]}"


def brief(value: object) -> str:
    """Returns ``repr(value)``, shortened; for an integer too long to print, a description."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes out at most 4300 digits
        return f"a number of more than {sys.get_int_max_str_digits()} digits"


def flag(name: str) -> str:
    """Command-line flag of a knob, or of vLLM's option that begins with dashes already."""
    return name if name.startswith("--") else "--spac-" + name.replace("_", "-")


@dataclass(frozen=True)
class Remedy:
    """One way out of a refusal.

    Attributes:
        changes: knob, or option or variable of vLLM -> value, None: to be left out. Empty: no setting helps, but
            another checkpoint, file or machine does.
    """

    text: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    def but(self, more: str) -> Remedy:
        """Returns the same with ``more`` said after it."""
        return Remedy(self.text + more, self.changes)


def use(verb: str = "use", /, **values: Any) -> Remedy:
    """Returns the remedy of giving options: knobs, or vLLM's by the names ``vllm_NAME``; None leaves one out.

    A capital value, as FILE, stands for one of the user's.
    """
    changes = {_option(name): value for name, value in values.items()}
    given = " ".join(f"{flag(name)} {value}" for name, value in changes.items() if value is not None)
    left_out = " and ".join(flag(name) for name, value in changes.items() if value is None)
    return Remedy(" ".join(filter(None, (f"{verb} {given}", left_out and f"without {left_out}"))), changes)


def add(**values: Any) -> Remedy:
    """Returns the remedy of giving options that were left out; as ``use``."""
    return use("add", **values)


def drop(*names: str) -> Remedy:
    """Returns the remedy of leaving out options: knobs, or vLLM's by the names ``vllm_NAME``."""
    options = list(map(_option, names))
    return Remedy(f"drop {' and '.join(map(flag, options))}", dict.fromkeys(options))


def _option(name: str) -> str:
    of_vllm = name.removeprefix("vllm_")
    return name if of_vllm == name else "--" + of_vllm.replace("_", "-")


class SpacError(RuntimeError):
    """Base class of all errors that this package raises deliberately. The text is one line of printable characters."""

    problem: str = ""  # the text without its remedies; empty unless ``refused`` made it
    remedies: tuple[Remedy, ...] = ()  # each is a way out by itself

    @classmethod
    def refused(cls, problem: str, *remedies: Remedy) -> Self:
        """Returns an error whose text is ``problem; remedy, or remedy``."""
        error = cls(f"{problem}; {', or '.join(remedy.text for remedy in remedies)}")
        error.problem, error.remedies = problem, remedies
        return error

    def solved_as(self, other: object) -> Self:
        """Returns this error with the remedies of another, if that has any."""
        if isinstance(other, SpacError):
            self.problem, self.remedies = other.problem, other.remedies
        return self

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(SpacError, ValueError):
    """A knob is unknown, malformed, or cannot be satisfied by this model or machine."""


class UnsupportedError(SpacError, ValueError):
    """The model, the vLLM version or a vLLM option cannot be served by the plugin."""


class StoreError(SpacError):
    """An expert cannot be written to, or read back from, the store exactly as it was packed."""


class PinError(StoreError):
    """The driver pins no more host memory, and the GPU was to read experts there."""
