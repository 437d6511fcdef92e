"""Text of several kinds, from the packages that ``make setup`` installs: the corpus of the ``local`` toy model.

Routing is local where the text is: a window is of one kind, as a user's request is. Held out are the standard
library's files that ``corpus`` holds out and, of the other kinds, one file name in ten, chosen by its checksum (by
name, so that copies of one licence are all on one side).
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import corpus
import numpy as np
from tokenizers import Tokenizer

LIBRARY = "library"
_TRAINING_CHARACTERS = 4_500_000  # per kind; the standard library has fewer
_HELD_OUT_CHARACTERS = 150_000
_FILE_BYTES = range(200, 400_000)
_FILE_CHARACTERS = 200_000  # read from each file
_PACKAGES = ("torch", "vllm", "transformers", "sympy", "numpy", "scipy")  # whose Python files are read
_PROSE = ("LICENSE", "NOTICE", "COPYING", "METADATA")


def _files(root: Path, *suffixes: str) -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.suffix in suffixes and _is_text(p))


def _is_text(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size in _FILE_BYTES


def _prose(root: Path) -> list[Path]:
    return sorted(
        p
        for p in root.rglob("*")
        if (p.name.upper().startswith(_PROSE) and p.suffix not in (".py", ".pyc") or p.suffix in (".md", ".rst"))
        and _is_text(p)
    )


def files() -> dict[str, list[Path]]:
    """Returns the files by kind of text, in a stable order; without the standard library's tests."""
    packages = Path(sysconfig.get_paths()["purelib"])
    return {
        LIBRARY: [p for p in corpus.files() if "test" not in p.parts],
        "packages": [p for name in _PACKAGES for p in _files(packages / name, ".py")],
        "headers": _files(packages / "torch" / "include", ".h", ".hpp", ".cuh"),
        "stubs": _files(packages, ".pyi"),
        "json": _files(packages, ".json"),
        "prose": _prose(packages),
    }


def is_held_out(kind: str, path: Path) -> bool:
    """Returns whether a file is for validation."""
    return corpus.is_held_out(path) if kind == LIBRARY else zlib.crc32(path.name.encode()) % 10 == 0


def _texts(paths: list[Path], characters: int) -> Iterator[str]:
    """Yields the text of ``paths`` until there are ``characters``."""
    for path in paths:
        if characters <= 0:
            return
        text = corpus.read(path)[:_FILE_CHARACTERS]
        characters -= len(text)
        yield text


def _tokens(tokenizer: Tokenizer, texts: Iterator[str]) -> np.ndarray:
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    assert end is not None, "one of its special tokens"
    encodings = tokenizer.encode_batch(list(texts))
    return np.concatenate([np.array([end, *encoding.ids], dtype=np.int64) for encoding in encodings])


def splits(tokenizer: Tokenizer, seed: int = 1) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns (training tokens, validation tokens) by kind of text, each int64 of shape [tokens].

    Raises:
        FileNotFoundError: if the installation lacks a kind of text.
    """
    train, held_out = {}, {}
    for kind, paths in files().items():
        random.Random(seed).shuffle(paths)
        parts = [[p for p in paths if is_held_out(kind, p) == held] for held in (False, True)]
        if not all(parts):
            raise FileNotFoundError(f"no files with text of the kind {kind!r}; `make setup` installs them")
        train[kind] = _tokens(tokenizer, _texts(parts[0], _TRAINING_CHARACTERS))
        held_out[kind] = _tokens(tokenizer, _texts(parts[1], _HELD_OUT_CHARACTERS))
    return train, held_out
