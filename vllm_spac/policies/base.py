"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container


class Policy(ABC):
    """Orders resident experts. Knows keys (ints) and nothing of tensors, slots or time.

    Only resident keys are held: ``insert`` adds one, ``evict`` and ``remove`` take it out. Deterministic:
    the same calls give the same victims.
    """

    @abstractmethod
    def insert(self, key: int) -> None:
        """A missing expert became resident because it was used. ``key`` must not be held."""

    @abstractmethod
    def touch(self, key: int) -> None:
        """A resident expert was used. ``key`` must be held."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """Forget a resident expert, e.g. because its load failed. ``key`` must be held."""

    @abstractmethod
    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        """Take out ``count`` victims that are not in ``pinned``, the first to go first.

        All or nothing: when fewer than ``count`` can go, nothing changes and ``LookupError`` is raised.
        ``count = 0`` returns an empty list.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: int) -> bool: ...
