"""Belady's MIN: the most hits that any policy can have. It knows the future, so it serves the simulator only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from itertools import islice

import numpy as np
from sortedcontainers import SortedSet

from vllm_spac.policies.base import Policy, Standing

_NEVER = 1 << 62


class Belady(Policy):
    """The victim is the expert whose next use lies furthest ahead, among equals the one with the highest key.

    Args:
        future: keys in the order in which they will be used; each ``insert`` and ``touch`` of a key is its next
            occurrence. Uses of different keys may come in another order within one forward of a layer: all its
            experts are pinned then. None when nothing is known: then no key is ever used again.
    """

    offline = True

    def __init__(self, *, future: Sequence[int] | None = None) -> None:
        self._known = future is not None
        self._uses: dict[int, list[int]] = defaultdict(list)
        for moment, key in enumerate(future if future is not None else ()):
            self._uses[int(key)].append(moment)
        for moments in self._uses.values():
            moments.reverse()
        self._rank: dict[int, tuple[int, int]] = {}
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
        victims = [-rank[1] for rank in islice((rank for rank in self._order if -rank[1] not in pinned), count)]
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            self.remove(key)
        return victims

    def standing(self, keys: int) -> Standing:
        ranks = list(self._order)
        used = np.full(keys, -float(_NEVER))
        for key, moments in self._uses.items():
            if len(moments) > 1:
                used[key] = -moments[-2]
        order = np.array([-rank[1] for rank in ranks], dtype=np.int64)
        return Standing(order, np.array([rank[0] for rank in ranks], dtype=np.float64), used)

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, key: int) -> bool:
        return key in self._rank

    def _use(self, key: int) -> None:
        moments = self._uses[key]
        if self._known:
            assert moments, f"expert {key} is used more often than the future said"
            moments.pop()
        self._rank[key] = (-(moments[-1] if moments else _NEVER), -key)
        self._order.add(self._rank[key])
