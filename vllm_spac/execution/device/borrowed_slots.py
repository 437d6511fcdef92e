"""Prompts in borrowed slots: missing experts are copied into a ring of slots ahead of the layers that read them.

A long prompt needs nearly every expert of a layer, each for many rows. Read in place, an expert would cross PCIe once
per block of rows, and PCIe would be idle while attention runs. So a forward of many rows borrows the least valuable
slots. The copy stream fills them, in the order of the layers, as far ahead as there are places. No memory is reserved:
an expert that is still there when the step ends keeps its slot.

The experts that are copied in a step are a sequence k_0, k_1, ..., and k_i takes place i mod R of a ring of R slots. A
layer runs in one launch, or in parts if its missing experts are more than half of the ring.

**Why no kernel reads a slot that is being written.** The table is written by the compute stream alone, which runs in
order. Of the step's launches, those up to part p have been submitted when places are filled for a later one.

- *Evicted before it is filled.* The compute stream evicts from the table what is in these places: a borrowed slot's
  owner, or what the sequence put there a round earlier, which belongs to a part up to p. Then it records E; the copy
  stream waits for E before it copies. So launches up to p have read these places, and later ones do not find them.
- *Filled before it is read.* The copy stream records C after the copies of a part; the compute stream waits for C
  before it writes their slots to the table and launches the part.

What has a slot that is not borrowed keeps it in such a step, in which no layer admits anything. When it ends, all
places have been filled and are in the table, and host and device agree on who has which slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.execution.address_table import MANY_ROWS
from vllm_spac.execution.device.admission import Admission
from vllm_spac.execution.device.layer_launches import LayerLaunches, LayerRows
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.kernels.types import Pieces
from vllm_spac.recording.metrics import Counters
from vllm_spac.storage.base import ExpertStore


class LoanPart(NamedTuple):
    """Missing experts of a layer that one launch reads from borrowed slots: ``start`` to ``stop`` of the sequence."""

    layer: int
    start: int
    stop: int


class Loan(NamedTuple):
    """The slots that a step borrows, and what it copies into them.

    Attributes:
        ring: int [R], slots, ascending.
        owners: int [R], the expert in each of them before the step.
        keys: int [n], the experts to copy, by layer and ascending in it; n >= R.
        parts: of all layers in their order; each layer has one or more.
    """

    ring: np.ndarray
    owners: np.ndarray
    keys: np.ndarray
    parts: list[LoanPart]

    @classmethod
    def of(cls, slot_of: np.ndarray, order: np.ndarray, first: int = 0) -> Loan:
        """Returns what is borrowed: places for two layers' missing experts, but at most half of all slots.

        Args:
            slot_of: int [layers, experts], the slot of each expert, NOWHERE for none.
            order: the experts that have slots, the least valuable first.
            first: the layer that the forward begins with.
        """
        experts, away = slot_of.shape[1], (slot_of == NOWHERE).ravel()
        wanted, before = 0, slice(0, first * experts)
        most = min(max(1, len(order) // 2), len(order), int(away[before.stop :].sum()))
        while (more := min(most, 2 * int(away.reshape(slot_of.shape).sum(1).max(initial=0)))) > wanted:
            away[order[wanted:more]] = True  # which may be of the layer that misses most
            wanted = more
        away[before] = False
        ring = np.sort(slot_of.ravel()[order[:wanted]])
        owner = np.full(int(slot_of.max(initial=0)) + 1, NOWHERE)
        owner[slot_of.ravel()[order]] = order
        parts, start, most = [], 0, max(1, wanted // 2)
        for layer in range(first, len(slot_of)):
            missing = int(away[layer * experts : (layer + 1) * experts].sum())
            for share in np.array_split(np.arange(missing), max(1, -(-missing // most))):
                parts.append(LoanPart(layer, start, start + len(share)))
                start += len(share)
        return cls(ring, owner[ring], np.flatnonzero(away), parts)

    def slots(self, start: int, stop: int) -> np.ndarray:
        """Returns the places of a range of the sequence."""
        return self.ring[np.arange(start, stop) % max(1, len(self.ring))]


class Moves(Protocol):
    """What is submitted to the streams; ``keys`` and ``slots`` are int [n]."""

    def evict(self, keys: np.ndarray) -> object:
        """Writes to the table that ``keys`` are in host memory."""

    def write(self, keys: np.ndarray, slots: np.ndarray) -> object:
        """Writes to the table that ``keys`` are in ``slots``, whose owners they are now."""

    def fill(self, keys: np.ndarray, slots: np.ndarray) -> object:
        """Copies ``keys``, ascending, into ``slots``."""


class BorrowedSlots:
    """Orders the copies and launches of steps that borrow slots. Called by one thread; never waits.

    Args:
        moves: what is submitted.
        compute, copy: the stream that runs the kernels, and one for the copies.
    """

    def __init__(self, moves: Moves, compute: Stream, copy: Stream) -> None:
        self._moves, self._compute, self._copy = moves, compute, copy
        self._loan: Loan | None = None
        self._filled = self._pointed = self._launched = 0  # of the sequence; of its parts
        self._copied: list[tuple[int, Event]] = []  # what has been copied up to a place in the sequence, and when

    def begin(self, loan: Loan) -> None:
        """Borrows slots for a step, or for the rest of it."""
        self._loan, self._copied = loan, []
        self._filled = self._pointed = self._launched = 0
        if len(loan.ring):
            self._compute.submit(self._moves.evict, loan.owners)

    def parts(self, layer: int) -> list[LoanPart]:
        """Returns the parts of a layer; none unless it is the next one, for which the loan is."""
        left = [] if self._loan is None else self._loan.parts[self._launched :]
        return [part for part in left if part.layer == layer] if left and left[0].layer == layer else []

    def begin_part(self, part: LoanPart) -> None:
        """Called before the launch of the next part, after that of the one before."""
        loan = self._loan
        assert loan is not None and part is loan.parts[self._launched]
        self._fill(part.start + len(loan.ring))
        self._point(part.stop)
        self._launched += 1

    def end(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Gives the slots back; returns the number of experts that were copied, those that are left, and where."""
        loan, none = self._loan, np.zeros(0, dtype=np.int64)
        if loan is None:
            return 0, none, none
        size = len(loan.ring)
        self._fill(size, whole=False)  # places that layers which did not run would have filled
        self._point(self._filled)
        self._loan, left = None, (self._filled - size, self._filled)
        return self._filled, loan.keys[slice(*left)], loan.slots(*left)

    def keys(self, part: LoanPart) -> np.ndarray:
        """Returns the experts of a part."""
        assert self._loan is not None
        return self._loan.keys[part.start : part.stop]

    def _fill(self, stop: int, *, whole: bool = True) -> None:
        """Fills the places up to ``stop`` of the sequence, by whole parts."""
        loan = self._loan
        assert loan is not None
        ends = sorted({part.stop for part in loan.parts} if whole else {stop})
        ends = [end for end in ends if self._filled < end <= stop]
        if not ends:
            return
        size = len(loan.ring)
        if (gone := loan.keys[max(0, self._filled - size) : max(0, ends[-1] - size)]).size:
            self._compute.submit(self._moves.evict, gone)
        self._copy.wait(self._compute.record())
        for end in ends:
            self._copy.submit(self._moves.fill, loan.keys[self._filled : end], loan.slots(self._filled, end))
            self._copied.append((end, self._copy.record()))
            self._filled = end

    def _point(self, stop: int) -> None:
        """Writes what has been copied up to ``stop`` to the table."""
        loan = self._loan
        assert loan is not None and stop <= self._filled
        while self._copied and self._pointed < stop:
            end, copied = self._copied.pop(0)
            self._compute.wait(copied)
            keys, slots = loan.keys[self._pointed : end], loan.slots(self._pointed, end)
            self._compute.submit(self._moves.write, keys, slots)
            self._pointed = end


class SlotMoves:
    """Moves experts from the host memory of a store to slots.

    Args:
        store: stores each layer as one block of host memory per tensor.
        slots: name -> tensor of shape [slots, ...].
        admission: owns the table.
    """

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], admission: Admission) -> None:
        self._store, self._slots = store, slots
        self.evict, self.write, self._delivery = admission.evict, admission.write, admission.delivery

    def fill(self, keys: np.ndarray, slots: np.ndarray) -> None:
        """One copy per tensor and run of consecutive experts in consecutive slots; all are of one layer or another.

        What is on a disk is read first, which the caller waits for.
        """
        if not self._store.addressable:
            assert self._delivery is not None
            rows = [{name: tensor[slot] for name, tensor in self._slots.items()} for slot in slots.tolist()]
            self._delivery.copy(keys.tolist(), rows)
            return
        experts = self._store.shape.experts
        broken = (np.diff(keys) != 1) | (np.diff(slots) != 1) | (np.diff(keys // experts) != 0)
        for run in np.split(np.arange(len(keys)), np.flatnonzero(broken) + 1):
            layer, expert = divmod(int(keys[run[0]]), experts)
            block, slot = self._store.layer(layer), int(slots[run[0]])
            for name, tensor in self._slots.items():
                tensor[slot : slot + len(run)].copy_(block[name][expert : expert + len(run)], non_blocking=True)


class LongPrompts:
    """Layers of steps of many rows: their missing experts are in borrowed slots when they run.

    Called by the thread that launches. Layers run in order; what comes out of order, or once more, begins anew.

    Args:
        store, slots: as of ``SlotMoves``.
        launches: of the layers.
        of_model: experts of a layer, of all processes.
        counters: what was copied is counted here, as ``path``.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Mapping[str, Tensor],
        admission: Admission,
        launches: LayerLaunches,
        compute: Stream,
        copy: Stream,
        of_model: int,
        counters: Counters,
        path: str,
    ) -> None:
        self._shape, self._admission, self._launches = store.shape, admission, launches
        self._borrowed = BorrowedSlots(SlotMoves(store, slots, admission), compute, copy)
        self._pairs, self._counters, self._path = MANY_ROWS * of_model, counters, path
        self._step: bool | None = False  # whether its layers borrow; None: its first layer decides
        self._known: np.ndarray | None = None

    def begin(self) -> None:
        """A step begins, of real requests; in others nothing is borrowed."""
        self._step, self._known = None, None

    def take(self, rows: LayerRows) -> bool:
        """Returns whether a layer runs here: the first one of a step decides for all of them."""
        if self._step is None:
            self._step = rows.ids.numel() >= self._pairs
        return self._step and not rows.captured

    def run(self, layer: int, rows: LayerRows, activation: str, out: Tensor) -> Tensor:
        """As ``PointerExecution.run``."""
        if not (parts := self._borrowed.parts(layer)):
            self._borrow(layer)
            parts = self._borrowed.parts(layer)
        if len(parts) == 1:
            self._borrowed.begin_part(parts[0])
            return self._launches.compute(layer, rows, activation, out, whole=True)
        return self._in_parts(layer, rows, activation, out, parts)

    def _borrow(self, layer: int) -> None:
        self._give_back()
        slot_of = self._admission.slots()
        if self._known is None:
            self._known = slot_of != NOWHERE
        order = self._admission.residency.owner[self._admission.offers.slots.cpu().numpy()]
        loan = Loan.of(slot_of.reshape(-1, self._shape.experts), order, layer)
        self._known[loan.owners] = False
        self._borrowed.begin(loan)

    def _in_parts(self, layer: int, rows: LayerRows, activation: str, out: Tensor, parts: Sequence[LoanPart]) -> Tensor:
        """The first part has the experts with slots, too; the last one sums the results of all."""
        experts = self._shape.experts
        part_of = torch.zeros(experts, dtype=torch.int32)
        for number, part in enumerate(parts):
            part_of[torch.from_numpy(self._borrowed.keys(part) - layer * experts)] = number
        of_pairs = self._admission.memory.sent(part_of)[rows.ids.clamp(0, experts - 1)]
        y = rows.x.new_empty(rows.ids.numel(), rows.x.shape[1])
        self._launches.counts[layer].zero_()
        for number, part in enumerate(parts):
            self._borrowed.begin_part(part)
            mine = rows._replace(ids=torch.where(of_pairs == number, rows.ids, -1))
            pieces = Pieces(y, rows.ids if number == len(parts) - 1 else None)
            self._launches.compute(layer, mine, activation, out, whole=True, pieces=pieces)
        return out

    def end(self) -> np.ndarray | None:
        """A step ends: returns bool [keys], the experts that kept their slots, or None if nothing was borrowed."""
        self._give_back()
        self._step = False
        return self._known

    def _give_back(self) -> None:
        copied, keys, slots = self._borrowed.end()
        if copied:
            residency = self._admission.residency
            changed = residency.owner[slots] != keys
            residency.update_owners(slots[changed], keys[changed])
            self._counters.count_bytes(f"{self._path} staged", copied * self._shape.expert_bytes)
