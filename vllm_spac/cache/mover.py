"""Copies experts between the store, host memory and slots: what one load does, in any thread."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
from torch import Tensor, uint8

from vllm_spac.cache.host_tier import HostTier, Move
from vllm_spac.cache.link import Moved
from vllm_spac.errors import StoreError
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.system.io_uring import Ring
from vllm_spac.tiers.base import ExpertStore, Slot, Slots, rows_of
from vllm_spac.timeline.recorder import Kind, Timeline, now

HOST = "host"


@dataclass(frozen=True)
class HostRows:
    """Host memory between slots and store.

    Attributes:
        tier: which expert is in which row; owned.
        block: the rows; owned.
    """

    tier: HostTier
    block: HostBlock

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> CPU tensor [rows, ...]."""
        return self.block.tensors


class Mover:
    """Fills slots. ``perform`` may run in several threads at once, everything else in the forward thread only.

    Args:
        store: source of the experts.
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        path: name of the store in ``Counters.bytes``.
        rows: host memory beside the store, if any.

    Attributes:
        timeline: records loads and what waits for them, if given.
    """

    timeline: Timeline | None = None

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], path: str, rows: HostRows | None) -> None:
        self._store, self._path, self._rows = store, path, rows
        self._slots = Slots(slots)
        self._row_memory = {} if rows is None else rows_of(rows.tensors)
        self._saved: set[int] = set()  # keys whose move has filled its row; every thread adds only its own
        self._to_poison: set[int] = set()
        self._first = 0

    def watch(self, timeline: Timeline | None, first: int) -> None:
        """As ``Execution.watch``."""
        self.timeline, self._first = timeline, first

    def plan(self, key: int, slot: int) -> Move:
        """Decides what the load of ``key`` into ``slot`` does; ``ended`` or ``untouched`` must follow."""
        return Move(key, slot) if self._rows is None else self._rows.tier.plan(key, slot)

    def perform(self, move: Move) -> Moved:
        """Fills the slot of ``move``; raises ``StoreError`` as ``ExpertStore.read``."""
        if (timeline := self.timeline) is None:
            return self._perform(move)
        start = now()
        moved = self._perform(move)
        timeline.add(Kind.LOAD if move.source is None else Kind.HOST_LOAD, start, self._first + move.key, moved.nbytes)
        return moved

    def _perform(self, move: Move) -> Moved:
        slot = self._slots[move.slot]
        if move.saved is not None:
            self._save(slot, move)
        if move.slot in self._to_poison:
            self._fill(move.slot)
        if move.source is not None:
            for name, rows in self._row_memory.items():
                slot.fill(name, rows[move.source])
            return Moved(HOST, self._store.shape.expert_bytes)
        nbytes = self._store.read(move.key, slot)
        if move.row is not None and move.saved is None:
            self._save(slot, move)
        return Moved(self._path, nbytes)

    def batches(self) -> bool:
        """Whether ``perform_all`` can perform moves: without host memory, from a store that reads several at once."""
        return self._rows is None and self._store.batches(self._slots[0])

    def perform_all(self, moves: Sequence[Move], ring: Ring) -> Generator[tuple[int, Moved | StoreError], None, None]:
        """Fills the slots of ``moves``; yields the key of each as it ends, and what ``perform`` returns or raises.

        Nothing writes to their slots any more once the iterator has ended or is closed.
        """
        timeline, start = self.timeline, now() if self.timeline is not None else 0
        with closing(self._store.read_all([(move.key, self._slots[move.slot]) for move in moves], ring)) as reads:
            for number, result in reads:
                key = moves[number].key
                if isinstance(result, StoreError):
                    yield key, result
                    continue
                if timeline is not None:
                    timeline.add(Kind.LOAD, start, self._first + key, result)
                yield key, Moved(self._path, result)

    def ended(self, move: Move, result: object) -> None:
        """Completes ``move``; ``result``: what ``perform`` returned, or the exception that it raised."""
        saved = move.key in self._saved
        self._saved.discard(move.key)
        if self._rows is not None:
            self._rows.tier.ended(move, read=isinstance(result, Moved), saved=saved)

    def enter(self, layer: range) -> None:
        """As ``Policy.enter``."""
        if self._rows is not None:
            self._rows.tier.policy.enter(layer)

    def observe(self, counts: np.ndarray) -> None:
        """As ``Policy.observe``."""
        if self._rows is not None:
            self._rows.tier.policy.observe(counts)

    def untouched(self, move: Move) -> None:
        """Undoes ``move``, which was never performed."""
        if self._rows is not None:
            self._rows.tier.untouched(move)

    def admit(self, key: int) -> int:
        """Returns the row that ``key`` gets before anything is served; ``fill_row`` must follow."""
        assert self._rows is not None
        return self._rows.tier.admit(key)

    def fill_row(self, row: int, key: int) -> None:
        """Reads ``key`` into a row of host memory; in any thread, raises as ``ExpertStore.read``."""
        assert self._rows is not None
        self._store.read(key, Slot({name: rows[row] for name, rows in self._rows.tensors.items()}))

    def close(self) -> None:
        """Releases host memory; nothing is read any more."""
        if self._rows is not None:
            self._rows.block.close()

    def poison(self, slot: int) -> None:
        """Sets all bits of a slot, which is NaN in every float format, so that premature reads become visible.

        With host memory this happens after the slot's old expert was copied there.
        """
        if self._rows is None:
            self._fill(slot)
        else:
            self._to_poison.add(slot)

    def _fill(self, slot: int) -> None:
        for tensor in self._slots[slot].values():
            tensor.view(-1).view(uint8).fill_(0xFF)

    def _save(self, slot: Slot, move: Move) -> None:
        assert self._rows is not None and move.row is not None
        if slot.memory is not None:
            for name, rows in self._row_memory.items():
                np.copyto(rows[move.row], slot.memory[name])
        else:
            for name, tensor in slot.items():
                self._rows.tensors[name][move.row].copy_(tensor)
        self._saved.add(move.key)
