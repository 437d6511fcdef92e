"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container
from dataclasses import dataclass
from typing import ClassVar

import numpy as np


@dataclass(frozen=True)
class Standing:
    """Who would go and who would come, for those who decide without asking again, e.g. a kernel.

    Attributes:
        order: int64 [held], the keys that are held, the first to go first.
        kept: float64 [held], ascending: what a slot is worth to each of them.
        used: float64 [keys]: what it would be worth to an expert that a step now uses. One that is not held should
            take the slot of one that is, if this is at least what the slot is worth to that one.
    """

    order: np.ndarray
    kept: np.ndarray
    used: np.ndarray


class Policy(ABC):
    """Orders resident experts. Knows keys (ints) and nothing of tensors, slots or time.

    Only resident keys are held: ``insert`` adds one, ``evict`` and ``remove`` take it out. Deterministic:
    the same calls give the same victims.

    Attributes:
        offline: why no engine can serve with it, e.g. because it must know the future; empty if one can.
        needs_layers: it must know which layer asks, by ``enter``: not for ``execution=pointers``, where none does.
        predictor: name of the predictor whose scores it orders experts by, if it does; who needs the same scores takes
            them from ``scores``.
    """

    offline: ClassVar[str] = ""
    needs_layers: ClassVar[bool] = False
    predictor: ClassVar[str | None] = None

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

    def enter(self, layer: range) -> None:
        """A layer starts: the keys used until the next call are in ``layer``. Which keys are held does not change.

        All layers are ranges of the same length that follow one another from key 0, and run in that order. Not called
        while slots are filled at the start.
        """

    def observe(self, counts: np.ndarray) -> None:
        """A forward of the target model is over. Which keys are held does not change; their order may.

        Args:
            counts: int [keys], rows of the forward that selected each expert, resident or not; -1 for the experts of
                a layer that did not run. Always of the same length. Prompts say nothing about the next step: the
                caller counts the rows of decode and verify only, and does not call after a forward without any.
        """

    @property
    def scores(self) -> np.ndarray:
        """int64 [keys], those of ``predictor`` after the last ``observe``; empty before the first. Not to be written
        to."""
        return np.zeros(0, dtype=np.int64)

    @abstractmethod
    def standing(self, keys: int) -> Standing:
        """How the experts below ``keys`` stand; nothing changes."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: int) -> bool: ...
