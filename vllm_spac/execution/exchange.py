"""In-order work queues and events (CUDA streams on a GPU, threads on a CPU), and copies between host and device.

A ``Stream`` has the same meaning everywhere: ``submit`` does not wait, work runs in the order of submission, ``wait``
delays what is submitted after it until an event of another stream is reached, and the host may query whether an event
is ``done``. On a CPU a stream is the calling thread or a thread of its own.

``Exchange`` copies small tensors through reused pinned buffers. For memory that is not pinned CUDA copies through its
own staging buffer and makes the caller wait for the device.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from vllm_spac.recording import watchdog

logger = logging.getLogger("vllm.spac")


class Event(Protocol):
    """A point in a stream, made by ``Stream.record``."""

    def done(self) -> bool:
        """Whether all work before it has finished, with its effects visible to the caller. Does not wait."""

    def wait(self) -> None:
        """Waits until it is done."""


E = TypeVar("E", bound=Event)


class Stream(ABC, Generic[E]):
    """Runs submitted work in order. Called by one thread."""

    @abstractmethod
    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        """Runs ``work(*arguments)`` after what was submitted before."""

    @abstractmethod
    def record(self) -> E:
        """Returns an event at the end of what was submitted so far."""

    @abstractmethod
    def wait(self, event: E) -> None:
        """Orders what is submitted from now on after ``event``, of any stream of the same kind. Does not wait."""

    def close(self) -> None:
        """Finishes what was submitted; nothing is submitted afterwards."""


class ThreadEvent:
    """Event that the thread of its stream reaches; ``wait`` and ``done`` raise the error of a failed stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()
        self._check()

    def done(self) -> bool:
        reached = self._reached.is_set()
        self._check()
        return reached

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def done(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()


class CallerStream(Stream[ThreadEvent]):
    """The calling thread as a stream: work has finished when ``submit`` returns."""

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        work(*arguments)

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        event.finish()
        return event

    def wait(self, event: ThreadEvent) -> None:
        event.wait()


class ThreadStream(Stream[ThreadEvent]):
    """A thread with a queue. After work has raised, no further work is run, and later events raise the same error."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        self._queue.put((work, arguments))

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        self._queue.put((event.finish, None))
        return event

    def wait(self, event: ThreadEvent) -> None:
        self.submit(event.wait)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, arguments = item
            if arguments is None:
                work(self._error)
            elif self._error is None:
                try:
                    work(*arguments)
                except BaseException as error:  # raised by the events
                    self._error = error


class CudaStream(Stream[_CudaEvent]):
    """A CUDA stream. ``work`` launches and returns; it must not synchronise."""

    def __init__(self, stream: torch.cuda.Stream, name: str = "copies between steps") -> None:
        self.stream = stream
        watchdog.watch(stream, name)

    def submit(self, work: Callable[..., object], *arguments: Any) -> None:
        with torch.cuda.stream(self._current()):
            work(*arguments)

    def record(self) -> _CudaEvent:
        event = torch.cuda.Event()
        event.record(self._current())
        return _CudaEvent(event)

    def wait(self, event: _CudaEvent) -> None:
        self._current().wait_event(event.event)

    def close(self) -> None:
        self.stream.synchronize()

    def _current(self) -> torch.cuda.Stream:
        return self.stream


class CurrentCudaStream(CudaStream):
    """The stream that the calling thread launches on, which runs the model.

    If that stream changes, the new one waits for the old one. A capture has a stream of its own, which must wait for
    nothing outside of it: vLLM has ordered it before.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.cuda.current_stream(device), "model")
        self._device = device

    def _current(self) -> torch.cuda.Stream:
        current = torch.cuda.current_stream(self._device)
        if current != self.stream and not torch.cuda.is_current_stream_capturing():
            current.wait_stream(self.stream)
            self.stream = current
            watchdog.watch(current, "model")
        return current


class Repeated:
    """Work that a stream runs again and again over the same memory: on a GPU one launch, once it is captured.

    Args:
        work: launches and returns; what it launches is the same every time, and has run before it is captured.
    """

    def __init__(self, stream: Stream, work: Callable[[], object]) -> None:
        self._stream, self._work = stream, work

    def prepare(self) -> None:
        """Captures the work into a CUDA graph, without running it; on a CPU nothing changes.

        Where the driver captures none of it, the work stays single launches, and the log warns.
        """
        if not isinstance(self._stream, CudaStream):
            return
        graph, work = torch.cuda.CUDAGraph(), self._work
        try:
            # Other threads may ask for memory or events meanwhile, which a capture of all threads would not survive.
            with torch.cuda.graph(graph, stream=self._stream.stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            logger.warning("spac: what follows each step takes many launches, since no CUDA graph has them: %s", error)
            return
        self._work = graph.replay

    def submit(self) -> None:
        """As ``Stream.submit`` of the work."""
        self._stream.submit(self._work)


def streams(device: torch.device) -> tuple[Stream, Stream]:
    """Returns the stream that runs the model on ``device``, and a new one for concurrent copies."""
    if device.type == "cuda":
        return CurrentCudaStream(device), CudaStream(torch.cuda.Stream(device))
    return CallerStream(), ThreadStream("spac-copy")


def capturing(tensor: torch.Tensor) -> bool:
    """Whether launches on ``tensor`` are captured into a CUDA graph instead of run."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_BUFFERS = 4  # for copies in flight to the device
_ALIGNED = 16  # bytes


class Lane(Protocol):
    """Copies that run in order, after what the caller launched before, possibly after the call has returned."""

    def copy(self, target: Tensor, source: Tensor) -> object: ...
    def record(self) -> Event: ...


class CurrentStream:
    """The CUDA stream that the caller launches on; asked for by ``device``, since torch looks long for another one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def record(self) -> _CudaEvent:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return _CudaEvent(event)


class CallerLane(CallerStream):
    """The calling thread, where the device is the CPU: a copy has arrived when ``copy`` returns."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class Sent(NamedTuple):
    """Tensors on their way to the CPU."""

    tensors: list[Tensor]  # on the CPU, in memory that is theirs until ``Exchange.read``
    arrived: Event  # when they are there
    buffer: Tensor  # that memory


class Exchange:
    """Copies tensors to and from a device. Called by one thread.

    The host writes a buffer, then launches the copy that reads it; it writes the buffer again only after the event
    recorded after that copy has been reached. The device receives newly allocated memory, ordered by its stream.
    """

    def __init__(self, device: torch.device, lane: Lane | None = None) -> None:
        self._device = device
        self._lane = lane or (CurrentStream(device) if device.type == "cuda" else CallerLane())
        self._in = _grown(None, 0)
        self._out: list[tuple[Tensor, Event | None]] = [(_grown(None, 0), None) for _ in range(_BUFFERS)]
        self._next = 0
        # To send with, once their event has been reached: pinning memory takes long, and may wait for the device.
        self._spare: list[tuple[Tensor, Event | None]] = []

    def to_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the device's ``tensor`` on the CPU, owned by the caller; waits for the device."""
        return self.all_to_host((tensor,))[0]

    def all_to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As ``to_host``, of several tensors: there is one wait for all of them."""
        self._in = _grown(self._in, sum(map(_padded, tensors)))
        arrived = self._copied(tensors, self._in)
        self._lane.record().wait()
        return [each.clone() for each in arrived]

    def send(self, tensors: Sequence[Tensor]) -> Sent:
        """Copies the device's ``tensors`` to the CPU; does not wait for the device."""
        free = (number for number, (_, event) in enumerate(self._spare) if event is None or event.done())
        buffer = None if (number := next(free, None)) is None else self._spare.pop(number)[0]
        buffer = _grown(buffer, sum(map(_padded, tensors)))
        arriving = self._copied(tensors, buffer)
        return Sent(arriving, self._lane.record(), buffer)

    def reserve(self, sends: int, nbytes: int) -> None:
        """Gets the memory of ``sends`` copies that are on their way to the CPU at once, and of all to the device.

        Args:
            nbytes: most of a copy, either way; larger ones get other memory when they come.
        """
        self._spare += [(_grown(None, nbytes), None) for _ in range(sends)]
        self._out = [(_grown(buffer, nbytes), event) for buffer, event in self._out]

    def read(self, sent: Sent) -> None:
        """What ``send`` returned is not read any more: once it has arrived, a later one gets its memory."""
        self._spare.append((sent.buffer, sent.arrived))

    def _copied(self, tensors: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
        """Launches copies of ``tensors`` into ``buffer``, one after another; returns where they arrive."""
        arriving, start = [], 0
        for tensor in tensors:
            arriving.append(_as(buffer[start:], tensor))
            self._lane.copy(arriving[-1], tensor)
            start += _padded(tensor)
        return arriving

    def to_device(self, tensor: Tensor) -> Tensor:
        """Returns a copy of the CPU's ``tensor`` on the device, for work launched from now on; does not wait for it."""
        arrives = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self.write(arrives, tensor)
        return arrives

    def write(self, arrives: Tensor, tensor: Tensor) -> None:
        """As ``to_device``, into the device's ``arrives``."""
        buffer, event = self._out[self._next]
        if event is not None:
            event.wait()
        buffer = _grown(buffer, tensor.nbytes)
        leaves = _as(buffer, tensor)
        leaves.copy_(tensor)
        self._lane.copy(arrives, leaves)
        self._out[self._next] = buffer, self._lane.record()
        self._next = (self._next + 1) % _BUFFERS


def _grown(buffer: Tensor | None, nbytes: int) -> Tensor:
    if buffer is not None and buffer.numel() >= nbytes:
        return buffer
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def _padded(tensor: Tensor) -> int:
    """Bytes of ``tensor``, rounded up so that any other may begin behind it."""
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _as(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
