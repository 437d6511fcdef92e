"""Which experts host memory holds between the slots and the store: bookkeeping. No tensors, no threads, no I/O.

Called by the forward thread only. ``plan`` decides what a load does besides reading, ``finish`` completes it; in
between, its rows of host memory belong to it. Where the device decides, nothing is planned: ``OrderedRows``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.decisions.policies.base import Policy

_MOST_EVICTED = 8  # one of so many rows between two steps of ``OrderedRows``
# One of so many slots keeps its expert. Simulated: of more, what skewed routing moves is read again from the disk.
_LASTING = 4
INCLUSIVE_FROM = 4  # rows per slot from which an expert in a slot keeps its row


def is_inclusive(keys: int, rows: int, slots: int) -> bool:
    """Whether experts in slots keep their rows: not where slots and rows hold all experts only together."""
    return rows >= INCLUSIVE_FROM * slots and not keys - slots <= rows < keys


def useful_rows(keys: int, rows: int, slots: int, moving: int) -> int:
    """Returns how many of ``rows`` can hold an expert.

    Exclusive ones are those of all experts without a slot, and of ``moving`` experts, which leave their slots before
    the rows of those that replace them are free.
    """
    rows = min(keys, rows)
    return rows if is_inclusive(keys, rows, slots) else min(rows, keys - slots + moving)


class HostMove(NamedTuple):
    """A load of an expert into a slot.

    Attributes:
        source: row of host memory that has it; None: it is read from the store.
        saved: the expert whose bytes the slot still has and which is copied to a row first; None: none is.
        row: the row of ``saved``, or the one that ``key`` is copied to after it was read from the store.
    """

    key: int
    slot: int
    source: int | None = None
    saved: int | None = None
    row: int | None = None


class HostTier:
    """Rows ``0 .. rows-1`` of host memory for expert keys ``0 .. keys-1``, beside ``slots`` slots.

    Exclusive: an expert is in a slot or in a row. When it loses its slot it is copied to a row, so slots and rows
    together hold as many experts as possible; each miss may cost a copy in the other direction. Inclusive: an expert
    that was read from the store is copied to a row at once and keeps it while it has a slot, so only reads from the
    store cost a copy, but experts in slots take rows as well. With ``INCLUSIVE_FROM`` rows per slot these are few. The
    tier is exclusive nevertheless where slots and rows hold all experts only together.

    Args:
        policy: chooses which expert loses its row; owned by this object.
    """

    def __init__(self, keys: int, rows: int, slots: int, policy: Policy) -> None:
        assert 0 < rows <= keys, f"{rows} rows for {keys} experts"
        self.policy = policy
        self.inclusive = is_inclusive(keys, rows, slots)
        self.row_of = np.full(keys, NOWHERE, dtype=np.int32)  # of complete rows
        self._content = np.full(slots, NOWHERE, dtype=np.int32)  # the expert whose bytes a slot has
        self._free = list(range(rows - 1, -1, -1))
        self._rows = rows
        self._reading: set[int] = set()  # their rows are being copied to a slot
        self._writing: dict[int, int] = {}  # experts that are being copied to a row

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._rows

    @property
    def held(self) -> int:
        """Number of experts that have a complete row."""
        return int((self.row_of != NOWHERE).sum())

    def plan(self, key: int, slot: int) -> HostMove:
        """Returns what the load of ``key`` into ``slot`` does; ``finish`` must follow."""
        before, self._content[slot] = int(self._content[slot]), NOWHERE
        source = None
        if self.row_of[key] != NOWHERE:
            source = int(self.row_of[key])
            self.policy.touch(key)
            self._reading.add(key)
        if self.inclusive:
            row = None if source is not None else self._take(key)
            return HostMove(key, slot, source, None, row)
        row = None if before == NOWHERE else self._take(before)
        return HostMove(key, slot, source, None if row is None else before, row)

    def finish(self, move: HostMove, *, read: bool, saved: bool) -> None:
        """Completes a move.

        Args:
            read: the slot has the expert now.
            saved: ``move.row`` has its expert now, if there is one.
        """
        if read:
            self._content[self._content == move.key] = NOWHERE  # a slot that was given up keeps its bytes
            self._content[move.slot] = move.key
        if move.source is not None:
            self._reading.remove(move.key)
            if read and not self.inclusive:
                self.policy.remove(move.key)
                self._vacate(move.key)
        if move.row is not None:
            key = move.key if move.saved is None else move.saved
            del self._writing[key]
            if saved:
                self.row_of[key] = move.row
            else:
                self.policy.remove(key)
                self._free.append(move.row)

    def cancel(self, move: HostMove) -> None:
        """Undoes a move that has not begun: the slot still has the bytes that it had."""
        before = move.saved
        self.finish(move, read=False, saved=False)
        if before is not None:
            self._content[move.slot] = before

    def first(self, keys: Iterable[int], slot_of: np.ndarray) -> list[int]:
        """Returns those of ``keys`` that get a row before anything is served: without slot or row, as rows are free."""
        missing = (key for key in keys if slot_of[key] == NOWHERE and self.row_of[key] == NOWHERE)
        return list(islice(missing, len(self._free)))

    def admit(self, key: int) -> int:
        """Returns a free row for ``key``, which the caller fills before anything is planned."""
        row = self._free.pop()
        self.put(key, row)
        return row

    def put(self, key: int, row: int) -> None:
        """``key`` is in a ``row`` that is not free."""
        self.policy.insert(key)
        self.row_of[key] = row

    def check_integrity(self) -> None:
        """Checks every invariant of a tier without moves in flight; raises ``AssertionError``."""
        assert not self._reading and not self._writing, "a move is forgotten"
        held = np.flatnonzero(self.row_of != NOWHERE)
        rows = self.row_of[held].tolist()
        assert len(set(rows)) == len(rows) and sorted([*rows, *self._free]) == list(range(self._rows)), "rows are lost"
        assert len(self.policy) == len(held) and all(int(key) in self.policy for key in held), "the policy disagrees"
        there = self._content[self._content != NOWHERE]
        assert len(np.unique(there)) == len(there), "two slots have one expert"

    def _take(self, key: int) -> int | None:
        """Returns a row that ``key`` is copied to; None if it has one, gets one already, or is worth less than all."""
        if self.row_of[key] != NOWHERE or key in self._writing:
            return None
        self.policy.insert(key)
        if not self._free:
            try:
                victims = self.policy.evict(1, self._reading | self._writing.keys())
            except LookupError:  # all rows are in use, and so is this one
                victims = [key]
                self.policy.remove(key)
            if victims == [key]:
                return None
            self._vacate(victims[0])
        row = self._writing[key] = self._free.pop()
        return row

    def _vacate(self, key: int) -> None:
        self._free.append(int(self.row_of[key]))
        self.row_of[key] = NOWHERE


class OrderedRows:
    """Rows of a tier where the device decides: what layers order takes those that are free, and keeps them.

    Between steps as many experts give up their rows as the last step has ordered: how many it had to pass on without
    one is known only then. First those that will keep their slots, since nobody reads their rows: of experts with slots
    the likeliest to be selected again. Then the policy's victims. One thread calls ``place`` and ``release``, the
    forward thread the others.

    Args:
        tier: inclusive; nothing is planned with it.
    """

    def __init__(self, tier: HostTier) -> None:
        self.tier, self.row_of = tier, tier.row_of
        self._kept: deque[tuple[int, int]] = deque()  # experts and their rows, of which the tier does not know yet
        self._ordered = self._known = 0  # experts, and those of which ``begin_step`` knows
        self._released = self._evicted = 0  # rows

    def place(self, key: int) -> int | None:
        """Returns the row that an expert will be read to, and have from then on; None if none is free."""
        self._ordered += 1
        if not self.tier._free:
            return None
        self._kept.append((key, row := self.tier._free.pop()))
        return row

    def release(self, rows: Sequence[int]) -> None:
        """Nobody reads these any more, which ``begin_step`` has returned."""
        self.tier._free.extend(rows)
        self._released += len(rows)

    def begin_step(self, slot_of: np.ndarray) -> dict[int, int]:
        """Returns the experts that lose their rows, and these: they may be read until they are given to ``release``.

        ``slot_of``: int [keys], slots or NOWHERE, as last known.
        """
        self.insert()
        ordered, self._known = self._ordered - self._known, self._ordered
        held, free = len(self.tier.policy), len(self.tier._free) + self._evicted - self._released
        # a short prompt orders nearly all experts
        wanted = min(ordered, -(-self.tier.rows // _MOST_EVICTED), len(self.row_of) - held)
        if (count := min(wanted - free, held)) <= 0:
            return {}
        victims = self._lasting(slot_of)[:count]
        for key in victims:
            self.tier.policy.remove(key)
        victims += self.tier.policy.evict(count - len(victims), ())
        rows = dict(zip(victims, self.row_of[victims].tolist(), strict=True))
        self.row_of[victims] = NOWHERE
        self._evicted += count
        return rows

    def _lasting(self, slot_of: np.ndarray) -> list[int]:
        """Returns the experts with rows that will keep their slots, if the policy says which; the likeliest first."""
        likely = self.tier.policy.likely
        if not len(likely):
            return []
        owners = np.flatnonzero(slot_of != NOWHERE)
        best = owners[np.argsort(-likely[owners], kind="stable")[: len(owners) // _LASTING]]
        return best[self.row_of[best] != NOWHERE].tolist()

    def insert(self) -> None:
        """The tier knows what has been read."""
        while self._kept:
            self.tier.put(*self._kept.popleft())

    def observe(self, counts: np.ndarray, read: np.ndarray) -> None:
        """What a step used: int [keys], rows that generate, as ``Policy.observe``; bool [keys], what had no slot."""
        self.tier.policy.observe(counts)
        self.tier.policy.touch_all(np.flatnonzero(read & (self.row_of != NOWHERE)))
