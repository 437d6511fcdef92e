"""Text and tokenizer of the toy model, from files of every Python installation.

The corpus is the standard library's source and its documentation (``pydoc_data/topics.py`` and the
docstrings). One file in twenty, chosen by the checksum of its path, is held out for validation.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"
_SKIP = {"site-packages", "encodings", "lib2to3", "idlelib", "turtledemo", "distutils"}
_LIBRARY_REPEATS = 2  # the library itself is read twice, its tests once


def files() -> list[Path]:
    """Returns the Python files of the running interpreter's standard library, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIP.intersection(path.relative_to(root).parts) and path.stat().st_size < 400_000
    )


def is_held_out(path: Path) -> bool:
    """Returns whether a file is for validation: one library file in twenty, never the library's tests."""
    relative = path.relative_to(sysconfig.get_paths()["stdlib"])
    return "test" not in relative.parts and zlib.crc32(str(relative).encode()) % 20 == 0


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(paths: list[Path]) -> Tokenizer:
    """Trains byte-level BPE on ``paths``; every byte string round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((read(path) for path in paths), trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, paths: list[Path], seed: int = 0) -> np.ndarray:
    """Returns all ``paths`` shuffled and joined by the end-of-text token: int64 of shape [tokens]."""
    paths = list(paths)
    random.Random(seed).shuffle(paths)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None, "one of its special tokens"
    ids: list[int] = []
    for encoding in tokenizer.encode_batch([read(path) for path in paths]):
        ids.append(end)
        ids.extend(encoding.ids)
    return np.asarray(ids, dtype=np.int64)


def splits(tokenizer: Tokenizer, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns (training tokens, validation tokens), each int64 of shape [tokens]."""
    everything = files()
    train = [path for path in everything if not is_held_out(path)]
    library = [path for path in train if "test" not in path.parts]
    train += library * (_LIBRARY_REPEATS - 1)
    held_out = [path for path in everything if is_held_out(path)]
    return tokenize(tokenizer, train, seed), tokenize(tokenizer, held_out, seed)
