"""Least frequently used, with ageing so that yesterday's favourites can leave."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

import numpy as np
from sortedcontainers import SortedSet

from vllm_spac.policies.base import Policy, Standing


class LFU(Policy):
    """The victim is the expert with the fewest uses, among equals the one used longest ago.

    Uses are remembered across evictions (an expert that keeps coming back is popular) and halved every
    ``half_life`` uses of the whole pool.
    """

    def __init__(self, *, half_life: int = 65536) -> None:
        self._half_life = half_life
        self._uses: dict[int, float] = {}
        self._clock = 0
        self._rank: dict[int, tuple[float, int, int]] = {}
        self._order: SortedSet = SortedSet()

    def insert(self, key: int) -> None:
        assert key not in self._rank, f"{key} is resident already"
        self._use(key)

    def touch(self, key: int) -> None:
        self._order.remove(self._rank[key])
        self._use(key)

    def remove(self, key: int) -> None:
        self._order.remove(self._rank.pop(key))

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims = [rank[2] for rank in islice((rank for rank in self._order if rank[2] not in pinned), count)]
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            self.remove(key)
        return victims

    def standing(self, keys: int) -> Standing:
        ranks = list(self._order)
        used = np.ones(keys)
        for key, uses in self._uses.items():
            used[key] += uses
        order = np.array([rank[2] for rank in ranks], dtype=np.int64)
        return Standing(order, np.array([rank[0] for rank in ranks], dtype=np.float64), used)

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, key: int) -> bool:
        return key in self._rank

    def _use(self, key: int) -> None:
        self._clock += 1
        self._uses[key] = self._uses.get(key, 0.0) + 1
        self._rank[key] = (self._uses[key], self._clock, key)
        self._order.add(self._rank[key])
        if self._clock % self._half_life == 0:
            self._age()

    def _age(self) -> None:
        self._uses = {key: uses / 2 for key, uses in self._uses.items()}
        self._rank = {key: (self._uses[key], rank[1], key) for key, rank in self._rank.items()}
        self._order = SortedSet(self._rank.values())
