"""Moves experts into slots between steps, while layers give away other slots: the rules, and the copies.

A table has one pointer for each expert: at a slot in fast memory, or at the expert's copy in host memory, which is
never written and never goes away. Both can be read at any time, so that a kernel needs no host to run: a *miss* is
computed from the host copy. In a step, layers give slots to what they miss (``admission``), on the *compute stream*.
Between steps the host moves experts that a predictor names. Moving e_new into the slot of e_old takes four steps:

1. point e_old at its host copy, so that the slot has no owner;
2. wait until no kernel runs that may have read the old pointer;
3. copy the bytes of e_new into the slot;
4. point e_new at the slot, which it owns from now on.

**Where each step runs.** 1 and 4 are writes on the compute stream, before the kernels of the next step; 3 runs on the
*copy stream*, after an event F recorded on the compute stream right after 1 (that is 2); 4 is submitted when the host
sees that the event D, recorded on the copy stream right after 3, is done, and the compute stream waits for D, which
costs nothing by then. The host queries D between steps and never waits.

**Who owns a slot.** The device changes the slots that a step had on offer, and nothing else. The host learns of it
from the step's report, one or more steps late. So it moves into a slot only if no step that had it on offer is
unreported, and it offers no slot that it may move into:

- *Withheld.* A slot that is not offered any more is the host's as soon as the steps launched before are reported.
  Then the host knows the slot's expert, and the device changes neither. Slots that were freed are the host's, too.
- *Offered again.* A slot that the host gives back, or that has received its expert, is offered like any other.
- *Reports.* What a report says of slots that its step did not have on offer is older than what the host knows.

**Who owns an expert.** A step that begins after 1 gives e_new no slot: to an expert that is on the way, a slot is worth
less than to any owner. A step that was launched before 1 and is unreported may have given it one. So 4 waits for the
reports of these steps as it waits for D. If one says so, the move is void: e_new stays where it is, and the move's slot
is free. The next copy into that slot is behind the old one, on the same stream.

**Why this is right for every interleaving.** Let k be a kernel that reads slot s through the pointer p of an expert,
and s a slot of the host's.

- *k was submitted before step 1 of a move into s.* It may be running, with p in its registers, while anything else
  happens. The compute stream runs in order, so k has finished when F is reached; step 3 begins after F. Hence nothing
  is written to s while k reads it.
- *k was submitted between steps 1 and 4 of that move.* The stream has run step 1 before k begins: p is not at s for
  e_old; for e_new it is not yet. No other expert owns s. Hence k does not read s at all.
- *k was submitted after step 4.* The stream has waited for D: all bytes are in the slot. They stay until the next move
  into s, for which the first case holds again, or until a layer gives s away, behind k on the same stream.

**A step may be one replay of a CUDA graph.** The argument depends only on where k was submitted. A replay submits all
kernels of its step at one point of the compute stream, after the writes of 1 and 4 and before those of the next step.
What was captured is the address of the table, not its contents; no move, and no wait for one, is ever captured.

**Why not all four on the copy stream,** as the idea is usually put, with F recorded after the last use? A copy stream
lags: kernels that were submitted *after* F may begin before step 1 has run, read the old pointer, and be reading when
step 3 begins. To be right, F would have to be recorded after the host has seen that step 1 is done, or the compute
stream would have to wait for a stream that is busy copying. ``tests/properties/test_pointers.py`` finds the
interleaving, and enumerates those of the rules above.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from vllm_spac.cache.link import Moved
from vllm_spac.cache.residency import NOWHERE, Residency
from vllm_spac.execution.exchange import Event, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A move of expert ``key`` into ``slot``."""

    key: int
    slot: int


@dataclass(frozen=True, slots=True)
class _Copying:
    """Moves that began together: when their bytes are there, and how many steps were launched before."""

    moves: list[Move]
    copied: Event
    launched: int


class Memory(Protocol):
    """Operations that ``StepMover`` submits to streams."""

    def leave(self, keys: Sequence[int], slots: Sequence[int]) -> object:
        """Step 1 for experts ``keys``, which own ``slots``."""

    def copy(self, key: int, slot: int) -> object:
        """Copies the bytes of an expert from host memory into a slot."""

    def enter(self, keys: Sequence[int], slots: Sequence[int]) -> object:
        """Step 4 for experts ``keys``, whose bytes are in ``slots``."""


class StepMover:
    """Owns the slots that may be moved into, and moves. Called between steps, by one thread.

    It is what a prefetcher reads ahead with: ``cache.link.Ahead``, and ``ReadsAhead`` of itself.

    Args:
        residency: what the host knows, from reports and moves; ``own`` is set.
        memory: the table and the slots' bytes.
        compute: the stream that runs the kernels which read the table.
        copy: a separate stream for the copies.
        moved: of each expert, as ``reap`` returns it.
    """

    def __init__(self, residency: Residency, memory: Memory, compute: Stream, copy: Stream, moved: Moved) -> None:
        self._residency, self._memory, self._compute, self._copy = residency, memory, compute, copy
        self._moved = moved
        self._mine: dict[int, int] = {}  # slot of the host's -> the expert that owns it on the device, NOWHERE: none
        self._withheld: dict[int, int] = {}  # slot that is not offered -> steps launched before; until it is in _mine
        self._moving: dict[int, Move] = {}  # by expert; void moves are not here
        self._copying: deque[_Copying] = deque()
        self._launched = self._reported = 0
        residency.own = self._mine

    # -- steps ---------------------------------------------------------------------------------------------

    def withhold(self, slots: np.ndarray, count: int) -> Collection[int]:
        """Called before a step: keeps the first ``count`` of ``slots`` from being offered; they become the host's.

        Args:
            slots: int [n], those with an owner, the next victim's first.

        Returns:
            All slots that the step must not have on offer.
        """
        moving = {move.slot for move in self._moving.values()}
        wanted = list(islice((slot for slot in slots.tolist() if slot not in moving), count))
        for slot in [slot for slot, key in self._mine.items() if key != NOWHERE and slot not in wanted]:
            del self._mine[slot]
        since = self._withheld
        self._withheld = {slot: since.get(slot, self._launched) for slot in wanted if slot not in self._mine}
        return self._mine.keys() | self._withheld.keys()

    def launched(self) -> None:
        """A step was launched, with all slots on offer but those that ``withhold`` named."""
        self._launched += 1

    def reported(self) -> None:
        """The residency has what the oldest step that was not reported did."""
        self._reported += 1
        for slot in [slot for slot, launched in self._withheld.items() if launched <= self._reported]:
            del self._withheld[slot]
            self._mine[slot] = int(self._residency.owner[slot])

    def void(self, keys: Iterable[int]) -> None:
        """Experts ``keys``, which are being moved, have got other slots by a step."""
        for key in keys:
            del self._moving[key]

    # -- reads ahead ---------------------------------------------------------------------------------------

    @property
    def ahead(self) -> StepMover:
        return self

    def clock(self) -> float:
        return time.perf_counter()

    @property
    def keys(self) -> KeysView[int]:
        return self._moving.keys()

    @property
    def reading(self) -> int:
        return len(self._moving)

    def fetch(self, loads: Iterable[tuple[int, int]]) -> None:
        """Performs steps 1, 2 and 3 for each (expert, slot), which the residency has assigned."""
        moves = [Move(key, slot) for key, slot in loads]
        leaving = [(self._mine[move.slot], move.slot) for move in moves if self._mine[move.slot] != NOWHERE]
        if leaving:
            keys, slots = zip(*leaving, strict=True)
            self._compute.submit(self._memory.leave, keys, slots)
        self._copy.wait(self._compute.record())
        for move in moves:
            self._mine[move.slot] = NOWHERE
            self._moving[move.key] = move
            self._copy.submit(self._memory.copy, move.key, move.slot)
        self._copying.append(_Copying(moves, self._copy.record(), self._launched))

    def reap(self) -> Mapping[int, Moved]:
        """Performs step 4 for the moves that have finished, the oldest first; returns them. Does not wait."""
        arrived: list[Move] = []
        while self._copying and self._copying[0].launched <= self._reported and self._copying[0].copied.done():
            oldest = self._copying.popleft()
            self._compute.wait(oldest.copied)
            arrived += [move for move in oldest.moves if self._moving.get(move.key) is move]
        for move in arrived:
            del self._moving[move.key]
            self._mine[move.slot] = move.key
        if arrived:
            self._compute.submit(self._memory.enter, [move.key for move in arrived], [move.slot for move in arrived])
        return {move.key: self._moved for move in arrived}

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Every read has begun."""
        return []

    def wait(self, keys: Sequence[int]) -> Mapping[int, Moved]:
        """No layer waits for a move: it reads the expert where it is."""
        raise AssertionError(f"a wait for {keys}")

    def check_integrity(self) -> None:
        """Checks every invariant; raises ``AssertionError``."""
        residency, mine = self._residency, self._mine
        residency.check_integrity()
        moving = {move.slot: move.key for move in self._moving.values()}
        assert mine.keys().isdisjoint(self._withheld), "a slot is the host's, and will be"
        assert moving.keys() <= mine.keys(), "a move into a slot that is not the host's"
        for slot, key in mine.items():
            expected = NOWHERE if slot in moving else key
            assert key == expected and residency.owner[slot] == moving.get(slot, key), "who owns a slot is not known"
        for slot in np.flatnonzero(residency.owner == NOWHERE).tolist():
            assert slot in mine, "a free slot is nobody's"
        assert all(residency.is_loading(key) for key in self._moving), "a move is forgotten"
