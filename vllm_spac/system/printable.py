"""Sanitises external text (file contents, model names, server responses) before it is printed."""

from __future__ import annotations

import sys

_MOST = 4000


def printable(text: object, most: int = _MOST) -> str:
    """Returns one line in which control characters, escape sequences and lone surrogates are backslash-escaped.

    Args:
        most: longer text is cut in the middle, with the number of characters left out.
    """
    text = shortened(str(text), most)
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


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


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")
