"""CPU twin of ``fetch``."""

from __future__ import annotations

import ctypes

from torch import Tensor

from ..types import Experts


def fetch(copies: Tensor, experts: Experts, words: Tensor) -> None:
    """Twin of ``fetch.fetch``."""
    total, n = int(copies[0]), len(copies) // 2
    for key, slot in zip(copies[1 : 1 + total].tolist(), copies[1 + n : 1 + n + total].tolist(), strict=True):
        for source, target, size in zip(experts.hosts[:, key], experts.places[:, slot], words, strict=True):
            ctypes.memmove(int(target), int(source), 8 * int(size))
