"""Which expert lies in which slot: the state machine of fast memory. No tensors, no threads, no I/O.

A slot is FREE, LOADING or READY. ``prepare`` pins what a forward needs and says what must be loaded;
``loaded`` or ``failed`` answer for each load; ``release`` unpins. Weights are read-only, so eviction only
forgets: nothing is ever copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from vllm_spac.policies.base import Policy

NOWHERE = -1


class SlotState(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2


@dataclass(frozen=True, slots=True)
class Placement:
    """Answer of ``prepare``: how many keys were resident, and which (key, slot) pairs to load."""

    hits: int
    loads: tuple[tuple[int, int], ...]


class Residency:
    """Slots ``0 .. slots-1`` for expert keys ``0 .. keys-1``.

    Args:
        keys: number of experts that could be resident.
        slots: number of slots.
        policy: chooses victims; owned by this object.
    """

    def __init__(self, keys: int, slots: int, policy: Policy) -> None:
        assert 0 < slots <= keys, f"{slots} slots for {keys} experts"
        self.policy = policy
        self.slot_of = np.full(keys, NOWHERE, dtype=np.int32)
        self.owner = np.full(slots, NOWHERE, dtype=np.int32)
        self.state = np.full(slots, SlotState.FREE, dtype=np.int8)
        self._free = list(range(slots - 1, -1, -1))
        self._pinned: set[int] = set()

    @property
    def slots(self) -> int:
        return len(self.owner)

    @property
    def resident(self) -> int:
        """Experts that are ready in a slot."""
        return int((self.state == SlotState.READY).sum())

    def prepare(self, keys: Sequence[int]) -> Placement:
        """Pin ``keys`` (distinct, none pinned already) and find a slot for each that is missing.

        All or nothing: raises ``LookupError`` and changes nothing when there are not enough unpinned slots.
        """
        assert not self._pinned.intersection(keys), "an expert is prepared twice"
        slots = self.slot_of[list(keys)] if keys else ()
        missing = [key for key, slot in zip(keys, slots, strict=True) if slot == NOWHERE]
        pinned = self._pinned.union(keys)
        victims = self.policy.evict(max(0, len(missing) - len(self._free)), pinned)
        for victim in victims:
            self._vacate(victim)
        for key, slot in zip(keys, slots, strict=True):
            if slot != NOWHERE:
                self.policy.touch(key)
        self._pinned = pinned
        return Placement(len(keys) - len(missing), tuple((key, self._occupy(key)) for key in missing))

    def loaded(self, key: int) -> None:
        """The load of ``key`` is complete: its slot may be read."""
        assert self._is_loading(key), f"expert {key} was not loading"
        self.state[self.slot_of[key]] = SlotState.READY

    def failed(self, key: int) -> None:
        """The load of ``key`` did not happen: its slot is free again and the key is not resident."""
        assert self._is_loading(key), f"expert {key} was not loading"
        self._pinned.discard(key)
        self.policy.remove(key)
        self._vacate(key)

    def release(self, keys: Iterable[int]) -> None:
        """Unpin ``keys``; they stay resident until the policy lets them go. Keys whose load failed are ignored."""
        self._pinned.difference_update(keys)

    def check_integrity(self) -> None:
        """Every invariant, in O(slots + keys); raises ``AssertionError``."""
        owned = np.flatnonzero(self.owner != NOWHERE)
        assert (self.slot_of[self.owner[owned]] == owned).all(), "owner and slot_of disagree"
        assert (self.slot_of != NOWHERE).sum() == len(owned), "a key points to a slot that it does not own"
        assert ((self.state == SlotState.FREE) == (self.owner == NOWHERE)).all(), "a free slot has an owner"
        assert sorted(self._free) == np.flatnonzero(self.owner == NOWHERE).tolist(), "the free list is wrong"
        assert len(self.policy) == len(owned), "the policy holds other keys than the slots"
        assert all(int(key) in self.policy for key in self.owner[owned]), "a resident key is unknown to the policy"
        assert all(self.slot_of[key] != NOWHERE for key in self._pinned), "a pinned key is not resident"

    def _is_loading(self, key: int) -> bool:
        return self.slot_of[key] != NOWHERE and self.state[self.slot_of[key]] == SlotState.LOADING

    def _occupy(self, key: int) -> int:
        slot = self._free.pop()
        self.owner[slot], self.slot_of[key], self.state[slot] = key, slot, SlotState.LOADING
        self.policy.insert(key)
        return slot

    def _vacate(self, key: int) -> None:
        slot = int(self.slot_of[key])
        assert self.state[slot] == SlotState.READY or key not in self._pinned, "a loading slot is taken away"
        self.owner[slot], self.slot_of[key], self.state[slot] = NOWHERE, NOWHERE, SlotState.FREE
        self._free.append(slot)
