"""Reads prompt files, tokenises them, and fingerprints the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from vllm_spac.errors import ConfigError
from vllm_spac.system.untrusted import path_of

_KEYS = ("text", "prompt", "prompt_token_ids")
_HELP = (
    'use JSON lines, {"text": "..."} (or "prompt", or "prompt_token_ids") on each, or plain text with blank lines or '
    "NUL characters between the texts"
)


def read(path: str | Path) -> list[str | list[int]]:
    """Reads the texts of a file, each a string or, where the file has them, token ids.

    A file that begins with ``{`` is JSON lines; blank lines are skipped. In any other, NUL characters separate the
    texts; where there is none, blank lines do. Empty texts are left out.

    Raises:
        ConfigError: the file cannot be read, a line is not understood (named by its number), or there is no text.
    """
    try:
        content = path_of(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}; {_HELP}") from error
    if content.lstrip().startswith("{"):
        lines = ((number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip())
        texts: list[str | list[int]] = [_of_line(line, f"{path}, line {number}") for number, line in lines]
    else:
        texts = [*(content.split("\0") if "\0" in content else _paragraphs(content))]
    texts = [text for text in texts if (text.strip() if isinstance(text, str) else text)]
    if not texts:
        raise ConfigError(f"{path} holds no text; {_HELP}")
    return texts


def tokens(
    texts: Sequence[str | list[int]],
    encode: Callable[[str], Sequence[int]] | None,
    length: int,
    limit: int | None = None,
) -> list[list[int]]:
    """Tokenises texts into pieces of token ids.

    Args:
        encode: str -> ids; None where no text is a string.
        length: longer texts are cut into pieces of ``length`` tokens; a piece of a single token is left out.
        limit: maximum number of tokens in all pieces together.

    Raises:
        ConfigError: nothing is left.
    """
    pieces: list[list[int]] = []
    left = limit
    for text in texts:
        if isinstance(text, str):
            assert encode is not None, "a text to be encoded"
            ids = list(encode(text))
        else:
            ids = text
        for start in range(0, len(ids), length):
            piece = ids[start : min(start + length, len(ids))][:left]
            if len(piece) > 1:
                pieces.append(piece)
                left = None if left is None else left - len(piece)
        if left is not None and left <= 1:
            break
    if not pieces:
        raise ConfigError("the texts are too short: each has less than two tokens; use longer ones, or a higher limit")
    return pieces


def checksum(pieces: Sequence[Sequence[int]]) -> str:
    """Returns 16 hexadecimal digits that change with any token."""
    return xxhash.xxh3_64_hexdigest(json.dumps([list(ids) for ids in pieces]).encode())


def _paragraphs(content: str) -> list[str]:
    """Splits a file into texts at blank lines."""
    texts: list[list[str]] = [[]]
    for line in content.splitlines():
        if line.strip():
            texts[-1].append(line)
        elif texts[-1]:
            texts.append([])
    return ["\n".join(lines) for lines in texts]


def _of_line(line: str, where: str) -> str | list[int]:
    try:
        item: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}; {_HELP}") from error
    keys = [key for key in _KEYS if isinstance(item, dict) and key in item]
    if len(keys) != 1:
        raise ConfigError(f"{where} must have exactly one of {', '.join(_KEYS)}; {_HELP}")
    value = item[keys[0]]
    if keys[0] == "prompt_token_ids":
        if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
            return value
        raise ConfigError(f"{where}: prompt_token_ids must be a list of integers from 0")
    if not isinstance(value, str):
        raise ConfigError(f"{where}: {keys[0]} must be a string; {_HELP}")
    return value
