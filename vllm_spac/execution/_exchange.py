"""Copies of small tensors between host and device through reused pinned buffers.

For memory that is not pinned CUDA copies through its own staging buffer and makes the caller wait for the device.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from vllm_spac.execution.pointers.streams import Event

_BUFFERS = 4  # for copies in flight to the device


class Lane(Protocol):
    """Copies that run in order, after what the caller launched before, possibly after the call has returned."""

    def copy(self, target: Tensor, source: Tensor) -> object: ...
    def record(self) -> Event: ...


class _CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self.event.record()

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CurrentStream:
    """The CUDA stream that the caller launches on."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> _CudaEvent:
        return _CudaEvent()


class Exchange:
    """Copies tensors to and from a device. Called by one thread.

    The host writes a buffer, then launches the copy that reads it; it writes the buffer again only after the event
    recorded after that copy has been reached. The device receives newly allocated memory, ordered by its stream.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self._device = device
        self._lane = lane or CurrentStream()
        self._in = _grown(None, 0)
        self._out: list[tuple[Tensor, Event | None]] = [(_grown(None, 0), None) for _ in range(_BUFFERS)]
        self._next = 0

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the device's ``tensor`` on the CPU, owned by the caller; waits for the device."""
        self._in = _grown(self._in, tensor.nbytes)
        arrived = _as(self._in, tensor)
        self._lane.copy(arrived, tensor)
        self._lane.record().wait()
        return arrived.clone()

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the CPU's ``tensor`` on the device, for work launched from now on; does not wait for it."""
        buffer, event = self._out[self._next]
        if event is not None:
            event.wait()
        buffer = _grown(buffer, tensor.nbytes)
        leaves = _as(buffer, tensor)
        leaves.copy_(tensor)
        arrives = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._lane.copy(arrives, leaves)
        self._out[self._next] = buffer, self._lane.record()
        self._next = (self._next + 1) % _BUFFERS
        return arrives


def _grown(buffer: Tensor | None, nbytes: int) -> Tensor:
    if buffer is not None and buffer.numel() >= nbytes:
        return buffer
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def _as(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
