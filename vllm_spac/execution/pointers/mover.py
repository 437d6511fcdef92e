"""Moves experts into slots while kernels run; streams order the writes to the table and the copies."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.execution.pointers.protocol import Move, Pointers
from vllm_spac.execution.pointers.streams import Event, Stream


class Memory(Protocol):
    """Operations that ``Mover`` submits to streams."""

    def point(self, keys: Sequence[int], slots: Sequence[int]) -> object:
        """Writes the pointers of ``keys``: to these slots, or to the host copies where a slot is NOWHERE."""

    def copy(self, key: int, slot: int) -> object:
        """Copies the bytes of an expert from host memory into a slot."""


class Mover:
    """Runs the protocol of ``protocol.py``, which defines the order of the steps. Called between steps, by one thread.

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
