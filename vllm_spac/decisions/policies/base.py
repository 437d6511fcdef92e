"""The contract of an eviction policy: as calls, where the host decides, and as a formula, where the device does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor


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
        on_device: it has a ``formula``, which ``plane=pointers`` needs.
        passed: arguments that an engine or a simulation gives, and no user.
        predictor: name of the predictor whose scores order the experts, if any; other users of the same scores read
            them from ``scores``.
    """

    offline: ClassVar[str] = ""
    on_device: ClassVar[bool] = False
    keeps: ClassVar[bool] = True
    passed: ClassVar[frozenset[str]] = frozenset({"context", "future"})
    predictor: ClassVar[str | None] = None

    @classmethod
    def of(cls, context: PolicyContext, **knobs: Any) -> Self:
        """Returns an instance that holds no key; most policies need nothing of ``context``."""
        return cls(**knobs)

    def formula(self, layers: int, experts: int, device: torch.device) -> Formula:
        """Returns the policy as a formula over the ``experts`` of each of so many layers, if it is ``on_device``."""
        raise NotImplementedError

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
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: int) -> bool: ...


class Formula:
    """An eviction policy over tensors of all experts, updated between two steps on the device that runs the layers.

    Nothing waits for the device, no shape depends on data, and all memory stays where it is: an update may be captured
    into a CUDA graph. The same input gives the same order: on a CPU that in which the policy evicts after ``touch``
    and ``insert`` for what each layer used, its hits before what it got slots for, and then ``Policy.observe``.

    Attributes:
        kept: float64 [keys], the value of a slot to each expert that is held; overwritten in place.
        used: float64 [keys], that to an expert which a step uses now. One that is not held should take the slot of one
            that is, if its ``used`` is at least the other's ``kept``.
        held: bool [keys], experts that had a slot when it was updated last.
    """

    def __init__(self, layers: int, experts: int, device: torch.device) -> None:
        self.layers, self.experts = layers, experts
        keys = layers * experts
        self.kept, self.used = (torch.zeros(keys, dtype=torch.float64, device=device) for _ in range(2))
        self.held = torch.zeros(keys, dtype=torch.bool, device=device)
        self.last = torch.zeros(keys, dtype=torch.int64, device=device)  # moment of the last use
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        key = torch.arange(keys, device=device)
        self._place = key + key // experts * experts  # in a turn, of a layer's hits; its newcomers are behind them

    # -- what a policy overrides ---------------------------------------------------------------------------

    def observe_counts(self, counts: Tensor) -> None:
        """As ``Policy.observe``, on the device."""

    def observe_rows(self, rows: Tensor) -> None:
        """As ``Policy.observe_prompt``, on the device."""

    def touch(self, touched: Tensor, came: Tensor) -> None:
        """As ``Policy.touch`` and ``Policy.insert``, bool [keys] each: layer by layer, first touched, then new ones."""
        at = self._turn + self._place
        self.last.copy_(torch.where(touched, at, torch.where(came, at + self.experts, self.last)))
        self._turn += 2 * self.layers * self.experts

    # -- what is called -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def observe(self, owner: Tensor, counts: Tensor | None = None) -> None:
        """A step has ended.

        Args:
            owner: int [slots], the expert in each slot; every slot has one.
            counts: int [keys], rows that generate and selected each expert; None if there are none.
        """
        now = torch.zeros_like(self.held).index_fill_(0, owner.long(), True)
        came = now & ~self.held
        touched = torch.zeros_like(now) if counts is None else now & self.held & (counts > 0)
        self.touch(touched, came)
        self.held.copy_(now)
        if counts is not None:
            self.observe_counts(counts)

    @torch.inference_mode()
    def observe_prompt(self, ids: Tensor) -> None:
        """A step of prompts alone has ended; called before ``observe``.

        Args:
            ids: int [layers, rows, top_k], the experts that its last rows selected; below 0 for none.
        """
        rows = torch.zeros(*ids.shape[:2], self.experts + 1, dtype=torch.bool, device=ids.device)
        rows.scatter_(2, torch.where(ids < 0, self.experts, ids).long(), True)  # nothing: the last column
        self.observe_rows(rows[:, :, :-1].transpose(0, 1).flatten(1))

    @torch.inference_mode()
    def order(self, owner: Tensor) -> Tensor:
        """Returns int64 [slots], these slots, that of the next victim first; among equals the one used longest ago.

        ``owner``: int [slots], their experts.
        """
        held = owner.long()
        by_age = self.last[held].argsort(stable=True)
        return by_age[self.kept[held[by_age]].argsort(stable=True)]
