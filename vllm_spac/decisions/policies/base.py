"""The contract of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np


@dataclass(frozen=True)
class Standing:
    """Eviction order and values of all experts, for a decision without further calls of the policy, e.g. in a kernel.

    Attributes:
        used: float64 [keys]: the value of a slot to an expert that a step now uses. An expert that is not held should
            take the slot of one that is, if its ``used`` is at least the other's ``kept``.
    """

    order: np.ndarray  # int64 [held], the keys that are held, the next victim first
    kept: np.ndarray  # float64 [held], ascending: the value of a slot to each of them
    used: np.ndarray


@dataclass(frozen=True)
class PolicyContext:
    """What is known before serving, for a policy that depends on it.

    Attributes:
        drafts: draft tokens that a request has in a speculative step, 0 without speculation; None if it is not known.
    """

    slots: int
    top_k: int
    drafts: int | None = None


class Policy(ABC):
    """Orders resident experts for eviction. Handles keys (ints) only, no tensors, slots or time.

    Only resident keys are held: ``insert`` adds one, ``evict`` and ``remove`` take it out. Deterministic:
    the same calls give the same victims.

    Attributes:
        offline: why no engine can serve with it, e.g. because it must know the future; empty if one can.
        keeps: it keeps experts for later tokens, so that it is worth trying where slots are a cache.
        needs_layers: it needs calls of ``begin_layer``, so it cannot be used with ``plane=pointers``, which makes none.
        passed: arguments that an engine or a simulation gives, and no user.
        predictor: name of the predictor whose scores order the experts, if any; other users of the same scores read
            them from ``scores``.
    """

    offline: ClassVar[str] = ""
    needs_layers: ClassVar[bool] = False
    keeps: ClassVar[bool] = True
    passed: ClassVar[frozenset[str]] = frozenset({"context", "future"})
    predictor: ClassVar[str | None] = None

    @classmethod
    def of(cls, context: PolicyContext, **knobs: Any) -> Self:
        """Returns an instance that holds no key; most policies need nothing of ``context``."""
        return cls(**knobs)

    @abstractmethod
    def insert(self, key: int) -> None:
        """A missing expert became resident because it was used. ``key`` must not be held."""

    def insert_ahead(self, key: int) -> None:
        """As ``insert``, of an expert that was not used yet."""
        self.insert(key)

    @property
    def recycled(self) -> Container[int]:
        """Held keys whose slots are free to take for any other expert, whatever their ``scores``."""
        return ()

    @abstractmethod
    def touch(self, key: int) -> None:
        """A resident expert was used. ``key`` must be held."""

    def touch_all(self, keys: Sequence[int] | np.ndarray) -> None:
        """Resident experts were used, in this order: ``touch`` for each of them."""
        for key in keys:
            self.touch(int(key))

    @abstractmethod
    def remove(self, key: int) -> None:
        """Removes a resident expert, e.g. because its load failed. ``key`` must be held."""

    @abstractmethod
    def evict(self, count: int, pinned: Container[int]) -> list[int]:
        """Removes and returns ``count`` victims that are not in ``pinned``, in the order of eviction.

        All or nothing: when fewer than ``count`` can be evicted, nothing changes and ``LookupError`` is raised.
        ``count = 0`` returns an empty list.
        """

    def begin_layer(self, layer: range) -> None:
        """A layer starts: the keys used until the next call are in ``layer``. Which keys are held does not change.

        All layers are ranges of the same length that follow one another from key 0, and run in that order. Not called
        while slots are filled at the start.
        """

    def observe(self, counts: np.ndarray) -> None:
        """A forward of the target model has finished. Which keys are held does not change; their order may.

        Args:
            counts: int [keys], rows of the forward that selected each expert, resident or not, or float, the sum of
                their votes if these are weighted; -1 for the experts of a layer that did not run. Always of the same
                length. Prefill rows do not predict the next step: the caller counts the rows of decode and verify
                only, and does not call after a forward without any.
        """

    def observe_prompt(self, rows: np.ndarray) -> None:
        """A forward of prompts alone has finished. Which keys are held does not change; their order may.

        Args:
            rows: bool [rows, keys], the experts that each of its last rows selected, in their order. They predict what
                the answer selects; all rows of a prompt together do not.
        """

    @property
    def scores(self) -> np.ndarray:
        """int64 [keys], scores of ``predictor`` after the last ``observe``; empty before the first. Read-only."""
        return np.zeros(0, dtype=np.int64)

    @property
    def likely(self) -> np.ndarray:
        """float64 [keys], estimated probability that the next step selects each expert; empty if it estimates none."""
        return np.zeros(0)

    @abstractmethod
    def standing(self, keys: int) -> Standing:
        """Returns the order and values of the experts below ``keys``; changes nothing."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: int) -> bool: ...
