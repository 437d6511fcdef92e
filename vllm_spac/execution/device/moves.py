"""Moves experts into slots between steps, while kernels read the table of pointers: the protocol, and the copies.

No engine moves experts by it today: the mover of prefetches over pointers is built on it.

A table has one pointer for each expert: at a slot in fast memory, or at the expert's copy in host memory, which is
never written and never goes away. Both can be read at any time, so that a kernel needs no host to run: a *miss* is
computed from the host copy. What is moved is decided one step late, between steps, from the counts of a finished step.
Moving e_new into the slot of e_old takes four steps:

1. point e_old at its host copy;
2. wait until no kernel runs that may have read the old pointer;
3. copy the bytes of e_new into the slot;
4. point e_new at the slot.

**Where each step runs.** 1 and 4 are writes on the *compute stream*, before the kernels of the next step; 3 runs on
the *copy stream*, after an event F recorded on the compute stream right after 1 (that is 2); 4 is submitted when the
host sees that the event D, recorded on the copy stream right after 3, is done, and the compute stream waits for D,
which costs nothing by then. The host queries D between steps and never waits.

**Why this is right for every interleaving.** Let k be a kernel that reads slot s through the pointer p of an expert.

- *k was submitted before step 1 of a move out of s.* It may be running, with p in its registers, while anything else
  happens. The compute stream runs in order, so k has finished when F is reached; step 3 begins after F. Hence nothing
  is written to s while k reads it.
- *k was submitted between steps 1 and 4 of that move.* The stream has run step 1 before k begins: p is not at s for
  e_old; for e_new it is not yet. No other expert owns s. Hence k does not read s at all.
- *k was submitted after step 4.* The stream has waited for D: all bytes are in the slot. They stay until the next move
  out of s, for which the first case holds again.

A table never changes while kernels of a step run: no kernel races with a pointer write, a launch sees one pointer for
both of its GEMMs, and what was a hit in a step is known exactly.

**A step may be one replay of a CUDA graph.** The argument depends only on where k was submitted, not on the order in
which the kernels of a step run, nor on whether they run concurrently. A replay submits them all at one point of the
compute stream, after the pointer writes of its step and before those of the next. What was captured is the address of
the table, not its contents, and the address is fixed; no move, and no wait for one, is ever captured.

**Why not all four on the copy stream,** as the idea is usually put, with F recorded after the last use? A copy stream
lags: kernels that were submitted *after* F may begin before step 1 has run, read the old pointer, and be reading when
step 3 begins. To be right, F would have to be recorded after the host has seen that step 1 is done, or the compute
stream would have to wait for a stream that is busy copying. ``tests/properties/test_pointers.py`` finds the
interleaving, and enumerates those of the protocol above.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_spac.cache.residency import NOWHERE, Residency, SlotState
from vllm_spac.decisions.policies.base import Policy
from vllm_spac.execution.exchange import Event, Stream


@dataclass(frozen=True, slots=True)
class Move:
    """A move of expert ``key`` into ``slot``, which belonged to ``victim``, or was free (NOWHERE)."""

    key: int
    slot: int
    victim: int = NOWHERE


class Pointers:
    """State of the table as the kernels submitted next will read it; called between steps, by one thread.

    Args:
        keys: number of experts of all layers.
        slots: number of slots.
        policy: chooses victims; owned.
    """

    def __init__(self, keys: int, slots: int, policy: Policy) -> None:
        self.residency = Residency(keys, slots, policy)
        # The slot that an expert's pointer is at; NOWHERE: its host copy.
        self.at = np.full(keys, NOWHERE, dtype=np.int32)
        self.moving = 0
        self._next = 0  # the key after the last one that was considered for a move

    def observe(self, counts: np.ndarray) -> None:
        """Updates the policy from the experts that a step selected, int [keys] as in ``Policy.observe``."""
        policy = self.residency.policy
        self.residency.observe(counts)
        for key in np.flatnonzero((counts > 0) & (self.residency.slot_of != NOWHERE)).tolist():
            policy.touch(key)

    def choose(self, counts: np.ndarray, most: int) -> list[Move]:
        """Chooses moves after a step with ``counts`` and performs their step 1; at most ``most`` are in flight.

        Of the missed experts, twice as many as may move are considered: those with the highest counts, among equals
        round-robin from where the last call stopped, so that no layer has to wait for those before it. An expert moves
        in if the policy prefers it to some other that is not moving; experts in flight are not affected.
        """
        room = most - self.moving
        missed = np.flatnonzero((counts > 0) & (self.residency.slot_of == NOWHERE))
        turn = (missed - self._next) % len(self.at)
        moves: list[Move] = []
        for key in missed[np.lexsort((turn, -counts[missed]))][: 2 * room].tolist():
            if len(moves) == room:
                break
            self._next = key + 1
            placement = self.residency.exchange(key)
            if placement is not None:
                victim = next(iter(placement.victims), NOWHERE)
                if victim != NOWHERE:
                    self.at[victim] = NOWHERE
                moves.append(Move(key, placement.loads[0][1], victim))
        self.moving += len(moves)
        return moves

    def arrived(self, moves: Iterable[Move]) -> None:
        """Performs step 4: the bytes of these moves are in their slots."""
        for move in moves:
            self.residency.loaded(move.key)
            self.at[move.key] = move.slot
            self.moving -= 1

    def placed(self, key: int) -> Move:
        """Assigns a free slot to ``key``, which has none, to be filled and ``arrived`` before any kernel runs."""
        ((_, slot),) = self.residency.prepare([key]).loads
        self.residency.release([key])
        self.moving += 1
        return Move(key, slot)

    def check_integrity(self) -> None:
        """Checks every invariant, in O(slots + keys); raises ``AssertionError``."""
        self.residency.check_integrity()
        slot_of, state = self.residency.slot_of, self.residency.state
        ready = (slot_of != NOWHERE) & (state[slot_of] == SlotState.READY)
        assert (self.at == np.where(ready, slot_of, NOWHERE)).all(), "a pointer is at a slot that is not its expert's"
        assert self.moving == (state == SlotState.LOADING).sum(), "a move is forgotten"


class Memory(Protocol):
    """Operations that ``StepMover`` submits to streams."""

    def point(self, keys: Sequence[int], slots: Sequence[int]) -> object:
        """Writes the pointers of ``keys``: to these slots, or to the host copies where a slot is NOWHERE."""

    def copy(self, key: int, slot: int) -> object:
        """Copies the bytes of an expert from host memory into a slot."""


class StepMover:
    """Runs the protocol, which defines the order of the steps. Called between steps, by one thread.

    Args:
        pointers: the state machine; owned.
        memory: the table and the slots' bytes.
        compute: the stream that runs the kernels which read the table.
        copy: a separate stream for the copies; owned.
    """

    def __init__(self, pointers: Pointers, memory: Memory, compute: Stream, copy: Stream) -> None:
        self.pointers = pointers
        self._memory, self._compute, self._copy = memory, compute, copy
        self._copying: deque[tuple[list[Move], Event]] = deque()

    def arrive(self) -> list[Move]:
        """Performs step 4 for the copies that have finished, the oldest first; returns their moves. Does not wait."""
        arrived: list[Move] = []
        while self._copying and self._copying[0][1].done():
            moves, copied = self._copying.popleft()
            self._compute.wait(copied)
            arrived += moves
        if arrived:
            self.pointers.arrived(arrived)
            self._compute.submit(self._memory.point, [m.key for m in arrived], [m.slot for m in arrived])
        return arrived

    def begin(self, moves: Sequence[Move]) -> None:
        """Performs steps 1, 2 and 3 for ``moves``, as just returned by ``Pointers.choose``."""
        if not moves:
            return
        victims = [move.victim for move in moves if move.victim != NOWHERE]
        if victims:
            self._compute.submit(self._memory.point, victims, [NOWHERE] * len(victims))
        self._copy.wait(self._compute.record())
        for move in moves:
            self._copy.submit(self._memory.copy, move.key, move.slot)
        self._copying.append((list(moves), self._copy.record()))

    def close(self) -> None:
        """Finishes the copies in flight."""
        self._copy.close()
