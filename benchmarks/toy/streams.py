"""Token streams that the toy models are trained on and validated with, tokenised once and kept in ``.cache/toy``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import corpus
import domains
import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

HERE = Path(__file__).parent
MODELS = HERE / "models"
CACHE = HERE.parents[1] / ".cache" / "toy"
LIBRARY_SHARE = 0.37  # of the windows of ``mixed``

Split = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]  # (training, validation) token ids by kind of text


def tokenizer() -> Tokenizer:
    """Returns the tokenizer of all toy models; trained at the first call, then kept in the target's folder."""
    path = MODELS / "target" / "tokenizer.json"
    if not path.exists():
        made = corpus.train_tokenizer([p for p in corpus.files() if not corpus.is_held_out(p)])
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(str(path))
    return Tokenizer.from_file(str(path))


def library() -> Split:
    """The standard library with its tests, as one kind of text: what the flat models are trained on."""
    return _kept("library", lambda: tuple({domains.LIBRARY: each} for each in corpus.splits(tokenizer())))


def kinds() -> Split:
    """Several kinds of text, see ``domains``: what the local models are trained on."""
    return _kept("kinds", lambda: domains.splits(tokenizer()))


def _kept(name, make) -> Split:
    cache = CACHE / f"{name}.safetensors"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        parts = zip(("train", "held_out"), make(), strict=True)
        save_file({f"{part}.{kind}": tokens for part, texts in parts for kind, tokens in texts.items()}, cache)
    train: dict[str, np.ndarray] = {}
    held_out: dict[str, np.ndarray] = {}
    for key, tokens in load_file(cache).items():
        part, _, kind = key.partition(".")
        (train if part == "train" else held_out)[kind] = tokens
    return train, held_out


def mixed(texts: dict[str, np.ndarray], batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yields random windows, each of one kind of text, forever: int64 of shape [batch, length + 1].

    ``LIBRARY_SHARE`` of them are of the standard library, or all if there is nothing else; of the other kinds in
    proportion to the square root of their tokens.
    """
    generator = np.random.default_rng(seed)
    weight = np.array([0.0 if kind == domains.LIBRARY else len(tokens) ** 0.5 for kind, tokens in texts.items()])
    if weight.any():
        weight *= (1 - LIBRARY_SHARE) / weight.sum()
    weight[list(texts).index(domains.LIBRARY)] = 1 - weight.sum()
    tokens = list(texts.values())
    while True:
        chosen = [tokens[i] for i in generator.choice(len(tokens), batch, p=weight)]
        starts = [generator.integers(0, len(text) - length - 1) for text in chosen]
        rows = [text[start : start + length + 1] for text, start in zip(chosen, starts, strict=True)]
        yield torch.from_numpy(np.stack(rows))


def windows(tokens: np.ndarray, length: int, count: int) -> Tensor:
    """Returns the same ``count`` windows at every call: int64 of shape [count, length + 1]."""
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))
