"""Texts and questions of the carved model, as token ids: those that it was not fitted on, and those that it was.

They lie beside the model, as ``fit/texts.py`` and ``fit/chats.py`` write them. Where they do, the other scripts take
them instead of the standard library, which the carved model was fitted on.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer

from benchmarks.common import PlanError
from benchmarks.real.fit import chats

FILES = ("chats.safetensors", "texts.safetensors")
SOURCE = "questions, and code, docs, handbooks and prose that the model was not fitted on, in turn"


def beside(model: Path) -> list[Path]:
    """Returns the files of texts beside the folder ``model``; none of a toy model."""
    return [path for path in (model.parent / name for name in FILES) if path.is_file()]


def texts(files: list[Path], side: str) -> dict[str, np.ndarray]:
    """Returns kind of text -> its token ids, int32 [tokens]; ``side``: fit or held."""
    found: dict[str, np.ndarray] = {}
    for path in files:
        with safe_open(path, "np") as file:
            names = [name for name in sorted(file.keys()) if name.endswith(f".{side}")]
            found |= {name.partition(".")[0]: file.get_tensor(name) for name in names}
    return found


def windows(files: list[Path], side: str, count: int, length: int) -> list[dict]:
    """Returns ``count`` windows of ``length`` tokens, of all kinds in turn, spread evenly over each kind."""
    kinds = texts(files, side)
    each = -(-count // len(kinds))
    found = []
    for place in range(each):
        for kind, ids in kinds.items():
            start = place * (len(ids) - length) // each
            found.append({"file": kind, "prompt_token_ids": ids[start : start + length].tolist()})
    return found[:count]


def prompts(model: Path, files: list[Path], count: int, tokens: int, seed: int) -> list[list[int]]:
    """Returns ``count`` prompts of all kinds in turn: windows of ``tokens`` tokens, and for chats whole questions.

    Raises:
        PlanError: a question is longer than ``tokens``.
    """
    tokenizer, draw = Tokenizer.from_file(str(model / "tokenizer.json")), random.Random(seed)
    asked = [tokenizer.encode(chats.begun(question), add_special_tokens=False).ids for question in chats.HELD_QUESTIONS]
    if (longest := max(map(len, asked))) > tokens:
        raise PlanError(f"questions with the chat template have up to {longest} tokens; ask for as many or more")
    draw.shuffle(asked)

    def drawn(ids: np.ndarray) -> Iterator[list[int]]:
        while True:
            start = draw.randrange(len(ids) - tokens)
            yield ids[start : start + tokens].tolist()

    sources = [cycle(asked), *(drawn(ids) for kind, ids in texts(files, "held").items() if kind != "chat")]
    return list(islice((next(source) for source in cycle(sources)), count))


def kinds(files: list[Path], count: int) -> list[str]:
    """Returns the kind of each of as many ``prompts``."""
    others = (kind for kind in texts(files, "held") if kind != "chat")
    return list(islice(cycle(["chat", *others]), count))
