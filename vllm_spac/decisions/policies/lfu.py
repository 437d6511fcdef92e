"""Least frequently used, with ageing so that formerly popular experts can be evicted."""

from __future__ import annotations

import numpy as np
from sortedcontainers import SortedSet

from vllm_spac.decisions.policies._sorted import SortedPolicy
from vllm_spac.decisions.policies.base import Standing


class LFU(SortedPolicy):
    """Evicts the expert with the fewest uses, among equals the one used longest ago.

    Counts of uses survive evictions (an expert that is loaded repeatedly is popular) and are halved every
    ``half_life`` uses of any expert.
    """

    def __init__(self, *, half_life: int = 65536) -> None:
        super().__init__()
        self._half_life = half_life
        self._uses: dict[int, float] = {}
        self._clock = 0

    def standing(self, keys: int) -> Standing:
        used = np.ones(keys)
        for key, uses in self._uses.items():
            used[key] += uses
        return Standing(*self._held(), used)

    def _rank_of_use(self, key: int) -> tuple:
        self._clock += 1
        self._uses[key] = self._uses.get(key, 0.0) + 1
        if self._clock % self._half_life == 0:
            self._age()
        return (self._uses[key], self._clock, key)

    def _age(self) -> None:
        self._uses = {key: uses / 2 for key, uses in self._uses.items()}
        self._rank = {key: (self._uses[key], rank[1], key) for key, rank in self._rank.items()}
        self._order = SortedSet(self._rank.values())
