"""Static placement by calibration: the experts that were used most are pinned, the other slots are an LRU cache."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import numpy as np

from vllm_spac.decisions.policies._sorted import SortedPolicy
from vllm_spac.decisions.policies.base import PolicyContext, Standing


class Pinned(SortedPolicy):
    """Evicts the least recently used expert that is not pinned, and a pinned one only when no other is left.

    Pinned are the experts of all layers that the calibration's tokens selected most, ties by the lowest key: placement
    by popularity, as offloaders with a list of hot experts have it. At least one token's slots are left to the others.

    Args:
        share: part of the slots whose experts are pinned, 0 to 1.
        context: slots and the calibration's counts; without one nothing is pinned, which is LRU.

    Raises:
        ValueError: ``share`` is outside of 0 to 1.
    """

    needs_calibration: ClassVar[bool] = True

    def __init__(self, *, share: float = 0.75, context: PolicyContext | None = None) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ValueError(f"share={share}: use 0 to 1")
        self._clock = 0
        self._pinned: dict[int, None] = {}  # in order of counts
        if context is not None and context.counts is not None:
            most = min(int(share * context.slots), context.slots - context.top_k)
            order = np.argsort(-context.counts.ravel(), kind="stable")[: max(0, most)]
            self._pinned = dict.fromkeys(order.tolist())

    @classmethod
    def of(cls, context: PolicyContext, **knobs: Any) -> Self:
        return cls(context=context, **knobs)

    def first(self) -> list[int]:
        return list(self._pinned)

    def standing(self, keys: int) -> Standing:
        used = np.zeros(keys)
        used[[key for key in self._pinned if key < keys]] = 1
        return Standing(*self._held(), used)

    def _rank_of_use(self, key: int) -> tuple:
        self._clock += 1
        return (int(key in self._pinned), self._clock, key)
