"""Which expert is in which slot: the state machine of fast memory. No tensors, no threads, no I/O.

A slot is FREE, LOADING or READY. ``prepare`` pins what a forward needs and returns what must be loaded; ``admit`` finds
a slot for what may be needed later, ``exchange`` for what was used without one; ``finish_load`` or ``cancel_load`` ends
each load; ``release`` unpins. ``use`` is for a layer that misses nothing. Slots that are LOADING, pinned or in use are
frozen: never a victim. Weights are read-only, so eviction only forgets: nothing is ever copied back. Only the forward
thread calls, so that no state changes between two lines.

``ExpertActivity`` is what experts did lately, for somebody who looks at a running engine; nothing is kept otherwise.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from vllm_spac.decisions.policies.base import Policy
from vllm_spac.decisions.victims import Better, Either, evict, evict_up_to

_FADING = 0.95  # per step: a step of 14 steps ago counts half


class ExpertActivity:
    """Heat of each expert, and which the CPU computed. Called by the forward thread only.

    Attributes:
        heat: float32 [keys], steps that selected each expert, the latest counting most: below 20.
        computed: bool [keys], experts that the CPU has computed since the last ``take_computed``.
    """

    def __init__(self, keys: int) -> None:
        self.heat = np.zeros(keys, dtype=np.float32)
        self.computed = np.zeros(keys, dtype=bool)

    def observe(self, counts: np.ndarray) -> None:
        """A step has finished; ``counts`` as in ``Policy.observe``."""
        self.heat *= _FADING
        self.heat += counts > 0

    def take_computed(self) -> np.ndarray:
        """Returns ``computed`` and begins anew."""
        taken, self.computed = self.computed, np.zeros_like(self.computed)
        return taken


NOWHERE = -1


class SlotState(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2


_FREE, _LOADING, _READY = map(int, SlotState)  # numpy takes a microsecond for a member of an enumeration


class Placement(NamedTuple):
    """Result of a call that assigns slots."""

    hits: int  # number of keys that were READY
    loads: tuple[tuple[int, int], ...]  # (key, slot) pairs to load now
    waits: tuple[tuple[int, int], ...] = ()  # (key, slot) pairs that are being loaded already
    victims: tuple[int, ...] = ()  # keys that were evicted


class SlotOwners:
    """Which of the expert keys ``0 .. keys-1`` is in which of the slots ``0 .. slots-1``, whoever decides that.

    Attributes:
        slot_of: int32 [keys], NOWHERE for those without a slot; ``owner``: int32 [slots]; ``state``: int8 [slots].
    """

    activity: ExpertActivity | None = None  # what experts did lately, while somebody looks

    def __init__(self, keys: int, slots: int) -> None:
        assert 0 <= slots <= keys, f"{slots} slots for {keys} experts"
        self.slots = slots
        self.slot_of = np.full(keys, NOWHERE, dtype=np.int32)
        self.owner = np.full(slots, NOWHERE, dtype=np.int32)
        self.state = np.full(slots, SlotState.FREE, dtype=np.int8)

    @property
    def resident(self) -> int:
        """Number of experts that are READY."""
        return int((self.state == SlotState.READY).sum())

    @property
    def pinned(self) -> int:
        """Number of experts that a layer is using; 0 between steps."""
        return 0

    def ready(self, keys: slice) -> np.ndarray:
        """Returns which of consecutive keys have a slot that may be read: bool [keys]."""
        slots = self.slot_of[keys]
        return (slots != NOWHERE) & (self.state[slots] == SlotState.READY)

    def check_integrity(self) -> None:
        """Checks every invariant, in O(slots + keys); raises ``AssertionError``."""
        owned = np.flatnonzero(self.owner != NOWHERE)
        assert (self.slot_of[self.owner[owned]] == owned).all(), "owner and slot_of disagree"
        assert (self.slot_of != NOWHERE).sum() == len(owned), "a key points to a slot that it does not own"
        assert ((self.state == SlotState.FREE) == (self.owner == NOWHERE)).all(), "a free slot has an owner"


class ReportedSlots(SlotOwners):
    """Slots that the device assigns: what the host knows of them is what was reported last."""

    def assign(self, key: int) -> int:
        """Gives ``key`` the first free slot, to be filled before anything else is assigned; returns it."""
        slot = int((self.owner == NOWHERE).argmax())
        self.update_owners(np.array([slot]), np.array([key]))
        return slot

    def update_owners(self, slots: np.ndarray, keys: np.ndarray) -> None:
        """Records that ``keys`` are in these slots, READY, in place of their owners, if these have any.

        Args:
            slots: int [n].
            keys: int [n], the new owner of each slot.
        """
        victims = self.owner[slots]
        self.slot_of[victims[victims != NOWHERE]] = NOWHERE
        assert len(np.unique(keys)) == len(keys) and (self.slot_of[keys] == NOWHERE).all(), "an expert has two slots"
        self.owner[slots], self.slot_of[keys], self.state[slots] = keys, slots, _READY


class Residency(SlotOwners):
    """Slots ``0 .. slots-1`` for expert keys ``0 .. keys-1``, which the host assigns.

    Attributes:
        policy: chooses victims; owned by this object.
        soft: keys that ``prepare`` and ``admit_unless`` evict last (soft pins), if any.
    """

    def __init__(self, keys: int, slots: int, policy: Policy) -> None:
        super().__init__(keys, slots)
        self.policy = policy
        self.soft: Container[int] | None = None
        self._free = list(range(slots - 1, -1, -1))
        self._pinned, self._loading = set[int](), set[int]()
        self._in_use: Sequence[int] | np.ndarray = ()  # keys that ``use`` named last, until that layer has run

    @property
    def pinned(self) -> int:
        return len(self._pinned)

    def prepare(self, keys: Sequence[int]) -> Placement:
        """Pins ``keys`` (distinct, none pinned already) and finds a slot for each that is missing.

        All or nothing: raises ``LookupError`` and changes nothing when there are not enough slots that are neither
        pinned nor LOADING.
        """
        assert self._pinned.isdisjoint(keys), "an expert is prepared twice"
        self._in_use = ()
        slots = self.slot_of[list(keys)].tolist() if keys else []
        missing = [key for key, slot in zip(keys, slots, strict=True) if slot == NOWHERE]
        waits = [(key, int(self.slot_of[key])) for key in keys if key in self._loading] if self._loading else []
        frozen = self._pinned.union(keys, self._loading)
        wanted = len(missing) - len(self._free)
        victims = evict(self.policy, wanted, frozen, self.soft, self.owner) if wanted > 0 else []
        self._vacate(victims, frozen)
        self.policy.touch_all([key for key, slot in zip(keys, slots, strict=True) if slot != NOWHERE])
        self._pinned.update(keys)
        for key in missing:
            self.policy.insert(key)
        return Placement(len(keys) - len(missing) - len(waits), self._fill_slots(missing), tuple(waits), tuple(victims))

    def use(self, keys: np.ndarray) -> bool:
        """Returns whether all ``keys`` are READY, and then tells the policy that they are used, in this order.

        They are frozen as if pinned until ``end_use``, or until ``use`` or ``prepare`` is called for another layer.
        """
        slots = self.slot_of[keys]
        if slots.min() == NOWHERE or (self._loading and (self.state[slots] != _READY).any()):
            return False
        self.policy.touch_all(keys)
        self._in_use = keys
        return True

    def end_use(self) -> None:
        """The layer for which ``use`` was called has run."""
        self._in_use = ()

    def admit(self, key: int, scores: np.ndarray) -> Placement | None:
        """Finds a slot for ``key`` as ``admit_unless``, where no expert is evicted for one with a lower score.

        One that the policy recycles scores less than any. Without a slot None is returned.
        """
        placement = self.admit_unless((key,), Better(scores, int(scores[key]), self.policy.recycled))
        return placement if placement.loads else None

    def spare(self, layer: range) -> int:
        """Number of slots that are free, or whose expert is neither frozen nor one of ``layer``."""
        here = self.slot_of[layer.start : layer.stop]
        return self.slots - int((here != NOWHERE).sum()) - sum(key not in layer for key in self._frozen())

    def admit_unless(self, keys: Sequence[int], kept: Container[int]) -> Placement:
        """Finds slots for ``keys``, which have none, to be loaded before they are needed; does not pin them.

        The first ones get the free slots, the others those of the policy's first victims that are not in ``kept``.
        Where too few are found, the last keys get none.

        Args:
            keys: distinct experts.
            kept: experts that may not be evicted for them.

        Returns:
            ``loads`` of the keys that have slots now, in their order; the last ones in place of ``victims``.
        """
        assert (self.slot_of[list(keys)] == NOWHERE).all(), "an expert has a slot"
        frozen, wanted = self._frozen(), len(keys) - len(self._free)
        victims = evict_up_to(self.policy, wanted, Either(frozen, kept), self.soft) if wanted > 0 else []
        self._vacate(victims, frozen)
        chosen = keys[: len(self._free)]
        for key in chosen:
            self.policy.insert_ahead(key)
        return Placement(0, self._fill_slots(chosen), victims=tuple(victims))

    def exchange(self, key: int) -> Placement | None:
        """Finds a slot for ``key``, which has none and was just used, to be loaded while kernels run; does not pin it.

        The slot is a free one, or else that of the policy's first victim, chosen from the resident experts and ``key``:
        if the policy would evict ``key`` first, nothing changes and None is returned.
        """
        assert self.slot_of[key] == NOWHERE, f"expert {key} has a slot"
        self.policy.insert(key)
        frozen = self._frozen()
        victims = [] if self._free else self.policy.evict(1, frozen)
        if victims == [key]:
            return None
        self._vacate(victims, frozen)
        return Placement(0, self._fill_slots([key]), victims=tuple(victims))

    def observe(self, counts: np.ndarray) -> None:
        """A forward has finished: as ``Policy.observe``."""
        self.policy.observe(counts)
        if self.activity is not None:
            self.activity.observe(counts)

    def is_loading(self, key: int) -> bool:
        """Whether ``key`` has a slot that may not be read yet."""
        return key in self._loading

    def finish_load(self, key: int) -> None:
        """Completes the load of ``key``: its slot may be read."""
        assert key in self._loading, f"expert {key} was not loading"
        self._loading.remove(key)
        self.state[self.slot_of[key]] = _READY

    def cancel_load(self, key: int) -> None:
        """Undoes the load of ``key``: its slot is free again, and the key is neither resident nor pinned."""
        assert key in self._loading, f"expert {key} was not loading"
        self._loading.remove(key)
        self._pinned.discard(key)
        self.policy.remove(key)
        self._vacate([key], ())

    def release(self, keys: Iterable[int]) -> None:
        """Unpins ``keys``; they stay resident until the policy evicts them. Keys whose load failed are ignored."""
        self._pinned.difference_update(keys)

    def check_integrity(self) -> None:
        super().check_integrity()
        owned = np.flatnonzero(self.owner != NOWHERE)
        assert self._loading == set(self.owner[self.state == SlotState.LOADING].tolist()), "a load is forgotten"
        assert sorted(self._free) == np.flatnonzero(self.owner == NOWHERE).tolist(), "the free list is wrong"
        assert len(self.policy) == len(owned), "the policy holds other keys than the slots"
        assert all(int(key) in self.policy for key in self.owner[owned]), "a resident key is unknown to the policy"
        assert all(self.slot_of[key] != NOWHERE for key in self._pinned), "a pinned key is not resident"

    def _frozen(self) -> set[int]:
        return self._pinned.union(self._loading, self._in_use)

    def _fill_slots(self, keys: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Gives each of ``keys``, which the policy holds, a free slot to be loaded; returns ``Placement.loads``."""
        slots = [self._free.pop() for _ in keys]
        for key, slot in zip(keys, slots, strict=True):
            self.owner[slot], self.slot_of[key], self.state[slot] = key, slot, _LOADING
        self._loading.update(keys)
        return tuple(zip(keys, slots, strict=True))

    def _vacate(self, keys: Sequence[int], frozen: Container[int]) -> None:
        """Frees the slots of ``keys``, which the policy holds no more."""
        for key in keys:
            assert key not in frozen, "the policy evicts a frozen expert"
            slot = int(self.slot_of[key])
            self.owner[slot], self.slot_of[key], self.state[slot] = NOWHERE, NOWHERE, _FREE
            self._free.append(slot)
