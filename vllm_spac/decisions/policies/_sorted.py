"""Base class of policies whose eviction order is a sorted set of ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container
from itertools import islice

from sortedcontainers import SortedSet

from vllm_spac.decisions.policies.base import Policy


class SortedPolicy(Policy):
    """Evicts the expert with the lowest rank first; O(log n) per use and per victim.

    A rank is a tuple that ends with the key, so that no two are equal; its first item is the value of keeping the
    expert in its slot.
    """

    def __init__(self) -> None:
        self._rank: dict[int, tuple] = {}
        self._order: SortedSet = SortedSet()

    @abstractmethod
    def _rank_of_use(self, key: int) -> tuple:
        """Returns the rank of ``key``, which is being used now."""

    def insert(self, key: int) -> None:
        assert key not in self._rank, f"{key} is resident already"
        self._place(key, self._rank_of_use(key))

    def touch(self, key: int) -> None:
        self._place(key, self._rank_of_use(key))

    def remove(self, key: int) -> None:
        self._order.remove(self._rank.pop(key))

    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        victims = [rank[-1] for rank in islice((rank for rank in self._order if rank[-1] not in pinned), count)]
        if len(victims) < count:
            raise LookupError(f"{count} victims wanted, {len(victims)} are not in use")
        for key in victims:
            self.remove(key)
        return victims

    def _place(self, key: int, rank: tuple) -> None:
        if key in self._rank:
            self._order.remove(self._rank[key])
        self._rank[key] = rank
        self._order.add(rank)

    def __len__(self) -> int:
        return len(self._rank)

    def __contains__(self, key: int) -> bool:
        return key in self._rank
