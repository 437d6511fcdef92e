"""Prompts over a table of pointers: a layer's missing experts are copied to a buffer while the layer before computes.

A long prompt needs nearly every expert of a layer, each for many rows. Read in place, an expert would cross PCIe once
per block of rows, and PCIe would be idle while attention runs. So forwards of many rows read experts without a slot
from one of two buffers, filled by the copy stream one layer ahead, through a table of their own.

**Why no kernel reads a buffer that is being written.** Layers take the buffers in turns. For layer l in buffer b:

- *Filled before it is read.* The copy stream records C after its copies; the compute stream waits for C before it
  launches l. The table of b is written by the compute stream, which runs in order: before the launch that reads it,
  and after the one that read it last.
- *Read before it is filled again.* After the launch of l the compute stream records R; the copy stream waits for R
  before it copies another layer into b.

The assignment of slots does not change within a step, so the experts copied for a layer ahead are exactly those its
table lacks; the next step does not rely on the contents of the buffers. For an expert with a slot, a staged table has
the same pointer as the step's table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.cache.sizing import resolve
from vllm_spac.config.types import SlotCount
from vllm_spac.core import MoEShape
from vllm_spac.execution.address_table import AddressTable
from vllm_spac.execution.exchange import Event, Stream
from vllm_spac.storage.base import ExpertStore

BUFFERS = 2
# Average rows per expert from which a forward is staged: with fewer, many experts are not needed. Reasoned, not
# measured.
ROWS = 16


def staging_bytes(shape: MoEShape) -> int:
    """Returns the bytes of fast memory of the buffers of one shape."""
    return BUFFERS * shape.experts * shape.expert_bytes


def divide(slots: SlotCount, knob: str, shape: MoEShape, free_bytes: int) -> tuple[int, bool]:
    """Divides ``free_bytes`` of fast memory into slots and staging buffers.

    Args:
        slots: what the user requested.
        knob: ``on``, ``off``, or ``auto``: staged if the buffers take at most a quarter of ``free_bytes`` and fit in
            addition to the requested slots.
        shape: the layers and experts.
        free_bytes: fast memory that may be used.

    Returns:
        (slots for all layers of ``shape``, whether its prompts are staged).

    Raises:
        ConfigError: as ``sizing.resolve``.
    """
    count, needed = resolve(slots, shape, free_bytes), staging_bytes(shape)
    fits = slots == SlotCount() or count * shape.expert_bytes + needed <= free_bytes
    if count == shape.total or knob == "off" or (knob == "auto" and not (fits and 4 * needed <= free_bytes)):
        return count, False
    return resolve(slots, shape, free_bytes - needed), True


class Staging:
    """Orders the copies and launches of a forward whose layers are staged. Called by one thread; never waits.

    Args:
        buffers: the bytes and tables.
        layers: number of layers; they run in order.
        compute, copy: the stream that runs the kernels, and one for the copies.
    """

    def __init__(self, buffers: ExpertBuffers, layers: int, compute: Stream, copy: Stream) -> None:
        self._buffers, self._layers, self._compute, self._copy = buffers, layers, compute, copy
        self._holds: list[int] = [NOWHERE] * BUFFERS  # the layer that was copied last
        self._copied: list[Event | None] = [None] * BUFFERS
        self._read: list[Event | None] = [None] * BUFFERS

    def begin(self) -> None:
        """Begins a step: invalidates the buffers, because the assignment of slots may have changed."""
        self._holds = [NOWHERE] * BUFFERS

    @contextlib.contextmanager
    def layer(self, layer: int, slots: np.ndarray) -> Iterator[int]:
        """Yields the buffer whose table the launch of ``layer`` reads; the caller launches it inside the block.

        Args:
            layer: number of the layer.
            slots: int [layers, experts], the slot of each expert in this step; NOWHERE for none.
        """
        self._fill(layer, slots)
        if layer + 1 < self._layers:
            self._fill(layer + 1, slots)
        buffer = layer % BUFFERS
        copied = self._copied[buffer]
        assert copied is not None, "filled above"
        self._compute.wait(copied)
        self._compute.submit(self._buffers.direct, buffer, layer, slots[layer])
        yield buffer
        self._read[buffer] = self._compute.record()

    def _fill(self, layer: int, slots: np.ndarray) -> None:
        buffer = layer % BUFFERS
        if self._holds[buffer] == layer:
            return
        if (read := self._read[buffer]) is not None:
            self._copy.wait(read)
        self._copy.submit(self._buffers.fill, buffer, layer, np.flatnonzero(slots[layer] == NOWHERE))
        self._copied[buffer] = self._copy.record()
        self._holds[buffer] = layer


class ExpertBuffers:
    """Buffers for the experts of two layers in fast memory, and a table for each.

    Args:
        store: stores each layer as one block of host memory per tensor.
        memory: provides the addresses of the slots.
        slots: the slots' tensors, whose device, names and dtypes the buffers have.

    Attributes:
        tables: per buffer, name -> int64 [experts] on the device.
    """

    def __init__(self, store: ExpertStore, memory: AddressTable, slots: Mapping[str, Tensor]) -> None:
        self._store, self._memory = store, memory
        experts = store.shape.experts
        self._tensors = [
            {name: tensor.new_empty((experts, *tensor.shape[1:])) for name, tensor in slots.items()}
            for _ in range(BUFFERS)
        ]
        self._places = [np.array([[e.data_ptr() for e in tensor] for tensor in b.values()]) for b in self._tensors]
        device = next(iter(slots.values())).device
        self._tables = [torch.from_numpy(places).to(device, copy=True) for places in self._places]
        self.tables = [dict(zip(slots, table, strict=True)) for table in self._tables]

    def fill(self, buffer: int, layer: int, missing: np.ndarray) -> None:
        """Copies experts ``missing`` (int [n], ascending) of a layer from host memory into their places in a buffer.

        One copy per tensor and run of consecutive experts.
        """
        block, tensors = self._store.layer(layer), self._tensors[buffer]
        for run in np.split(missing, np.flatnonzero(np.diff(missing) > 1) + 1):
            if len(run):
                part = slice(int(run[0]), int(run[-1]) + 1)
                for name, tensor in tensors.items():
                    tensor[part].copy_(block[name][part], non_blocking=True)

    def direct(self, buffer: int, layer: int, slots: np.ndarray) -> None:
        """Writes the table of a buffer, by one small copy to the device.

        Args:
            slots: int [experts], NOWHERE for an expert that is at its place in the buffer.
        """
        addresses = np.where(slots == NOWHERE, self._places[buffer], self._memory.slot_addresses[:, slots])
        written = torch.from_numpy(addresses)
        if self._tables[buffer].is_cuda:  # pinned, so that it does not wait; torch keeps it until it has been read
            written = written.pin_memory()
        self._tables[buffer].copy_(written, non_blocking=True)
