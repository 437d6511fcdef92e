"""Prompts as token ids: text that the model never saw, or random ids where there is no tokenizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import xxhash
from tokenizers import Tokenizer

from benchmarks.common import PlanError
from benchmarks.real import held
from benchmarks.shapes import routing
from benchmarks.toy import corpus


@dataclass(frozen=True)
class Prompts:
    """``ids`` [prompts][tokens], and where they come from."""

    ids: list[list[int]]
    source: str

    def describe(self) -> dict:
        """Returns facts for the result that show whether two runs used the same prompts."""
        digest = xxhash.xxh3_64_hexdigest(json.dumps(self.ids).encode())
        return {"count": len(self.ids), "tokens": max(map(len, self.ids)), "source": self.source, "xxh3_64": digest}

    def begun_again(self, tokens: int) -> Prompts:
        """Each with its first ``tokens`` tokens once more behind it: an answer goes on with what it has read."""
        return Prompts([ids + ids[:tokens] for ids in self.ids], f"{self.source}; each begins once more at its end")


def load(model: Path, count: int, tokens: int, seed: int = 0) -> Prompts:
    """Returns ``count`` different prompts of ``tokens`` tokens each for the model in the folder ``model``.

    Beside the carved model lie its texts (see ``held``): they and questions, some of which are shorter.
    """
    if files := held.beside(model):
        return Prompts(held.prompts(model, files, count, tokens, seed), held.SOURCE)
    if not (model / "tokenizer.json").is_file():
        config = json.loads((model / "config.json").read_text())
        vocabulary = config.get("vocab_size") or config["text_config"]["vocab_size"]
        draw = random.Random(seed)
        ids = [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]
        if (model / routing.FILE).is_file():
            ids = [routing.ids_of(request, drawn, vocabulary) for request, drawn in enumerate(ids)]
        return Prompts(ids, "random ids: the model has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return Prompts(_windows(tokenizer, count, tokens, seed), "held-out files of Python's standard library")


def kinds(model: Path, count: int) -> list[str]:
    """Returns the kind of text of each of ``count`` prompts of ``load``."""
    files = held.beside(model)
    return held.kinds(files, count) if files else ["text"] * count


def _windows(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Returns one window of each of ``count`` held-out files, or more per file if there are too few."""
    paths = [path for path in corpus.files() if corpus.is_held_out(path)]
    draw = random.Random(seed)
    draw.shuffle(paths)
    windows: list[list[int]] = []
    while len(windows) < count:
        before = len(windows)
        for path in paths[:]:
            ids = tokenizer.encode(corpus.read(path), add_special_tokens=False).ids
            if len(ids) <= tokens:
                paths.remove(path)
                continue
            start = draw.randrange(len(ids) - tokens)
            windows.append(ids[start : start + tokens])
            if len(windows) == count:
                break
        if len(windows) == before:
            raise PlanError(f"no held-out file has more than {tokens} tokens; ask for shorter prompts")
    return windows
