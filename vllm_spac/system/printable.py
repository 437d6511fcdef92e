"""Text from elsewhere (file contents, names of models, answers of servers) before it is printed."""

from __future__ import annotations

import sys

_MOST = 4000


def printable(text: object, most: int = _MOST) -> str:
    """One line without control characters, escape sequences and lone surrogates: each becomes its backslash escape.

    Args:
        most: longer text is cut in the middle, and how much was left out is named.
    """
    text = shortened(str(text), most)
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def shortened(text: str, most: int = 120) -> str:
    """``text`` itself, or its two ends around how many characters are left out."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}...({len(text) - 2 * half} characters)...{text[-half:]}"


def brief(value: object) -> str:
    """``repr(value)``, shortened; of an integer without end, what it is."""
    try:
        return shortened(repr(value))
    except ValueError:  # Python writes out at most 4300 digits
        return f"a number of more than {sys.get_int_max_str_digits()} digits"


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
