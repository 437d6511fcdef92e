"""Which experts a policy evicts where some are protected: pinned ones never, softly pinned ones last."""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_spac.decisions.policies.base import Policy


@dataclass(frozen=True, slots=True)
class Better:
    """Keys that may not be evicted for one that scores ``limit``: those that score as much, and are not recycled."""

    scores: np.ndarray
    limit: int
    recycled: Container[int]

    def __contains__(self, key: Any) -> bool:
        return bool(self.scores[key] >= self.limit) and key not in self.recycled


@dataclass(frozen=True, slots=True)
class Either:
    """Keys that are in one of two collections."""

    one: Container[int]
    other: Container[int]

    def __contains__(self, key: Any) -> bool:
        return key in self.one or key in self.other


def evict(
    policy: Policy, count: int, frozen: Container[int], soft: Container[int] | None, held: np.ndarray
) -> list[int]:
    """Evicts ``count`` keys that are not ``frozen``, all others before those of ``soft``.

    Args:
        held: int [n], the keys that the policy holds; negative: none.

    Raises:
        LookupError: there are fewer; nothing changes.
    """
    if not count or soft is None:
        return policy.evict(count, frozen)
    either = Either(frozen, soft)
    try:
        return policy.evict(count, either)
    except LookupError:
        left = [key for key in held.tolist() if key >= 0 and key not in frozen]
        if len(left) < count:
            raise
        victims = policy.evict(sum(key not in soft for key in left), either)
        return victims + policy.evict(count - len(victims), frozen)


def evict_up_to(policy: Policy, count: int, frozen: Container[int], soft: Container[int] | None) -> list[int]:
    """As ``evict``, or fewer keys where there are fewer."""
    victims: list[int] = [] if soft is None else _up_to(policy, count, Either(frozen, soft))
    return victims + _up_to(policy, count - len(victims), frozen)


def _up_to(policy: Policy, count: int, frozen: Container[int]) -> list[int]:
    try:
        return policy.evict(count, frozen)
    except LookupError:  # it has evicted none of the fewer that there are
        victims: list[int] = []
        with contextlib.suppress(LookupError):
            while True:
                victims += policy.evict(1, frozen)
        return victims
