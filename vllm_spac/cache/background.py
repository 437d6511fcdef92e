"""Reads ahead of need: threads of their own, tickets that can be cancelled, and silence while a layer waits."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, outcome


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A read ahead of need; ``after`` are the kernels that may still read the slot's old expert."""

    key: int
    slot: int
    after: torch.cuda.Event | None
    done: Future = field(default_factory=Future)


class Background:
    """Called by the forward thread only, but for ``read``, which its threads call.

    Args:
        read: fills a slot with an expert; returns the bytes moved.
        threads: reads in flight at once.
        device: where the slots lie.
    """

    def __init__(self, read: Callable[[int, int], int], threads: int, device: torch.device) -> None:
        self._read = read
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-ahead", initializer=unbind)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tickets: dict[int, _Ticket] = {}  # the forward thread's
        self._lock = threading.Lock()  # of the four below
        self._waiting: deque[_Ticket] = deque()
        self._readers = 0
        self._pauses = 0
        self._closed = False

    @property
    def keys(self) -> KeysView[int]:
        """Keys that were asked for and not cancelled, reaped or waited for since; the oldest first."""
        return self._tickets.keys()

    def fetch(self, loads: Iterable[tuple[int, int]]) -> None:
        """Read each (key, slot), in this order; does not wait."""
        after = None
        if self._stream is not None:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._device))
        tickets = [_Ticket(key, slot, after) for key, slot in loads]
        for ticket in tickets:
            assert ticket.key not in self._tickets, f"expert {ticket.key} is on its way already"
            self._tickets[ticket.key] = ticket
        with self._lock:
            self._waiting.extend(tickets)
        self._begin()

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Forget those of ``keys`` whose read has not begun; returns them. Their slots were not written."""
        gone = [key for key in keys if self._tickets[key].done.cancel()]
        for key in gone:
            del self._tickets[key]
        if gone:
            with self._lock:
                self._waiting = deque(ticket for ticket in self._waiting if not ticket.done.cancelled())
        return gone

    def reap(self) -> dict[int, int | BaseException]:
        """The reads that are over since the last call: bytes moved, or the error. Does not wait."""
        over = [key for key, ticket in self._tickets.items() if ticket.done.done()]
        return {key: outcome(self._tickets.pop(key).done) for key in over}

    def wait(self, keys: Sequence[int]) -> dict[int, int | BaseException]:
        """As ``reap``, for ``keys``, none of which ``cancel`` would take: returns when all are over."""
        done = [self._tickets[key].done for key in keys]
        assert all(job.running() or job.done() for job in done), "cancel before waiting: nothing is begun meanwhile"
        with self.paused():
            finish(done)
        return {key: outcome(self._tickets.pop(key).done) for key in keys}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No read is begun inside; those in flight go on."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
            self._begin()

    def close(self) -> None:
        """Wait for the reads in flight, drop the others and stop the threads. What comes after fails."""
        with self._lock:
            self._closed = True
        self._begin()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _begin(self) -> None:
        """See to it that as many threads read as may and can."""
        with self._lock:
            if self._closed:
                for ticket in self._waiting:
                    ticket.done.cancel()
                self._waiting.clear()
            elif not self._pauses:
                for _ in range(min(self._threads - self._readers, len(self._waiting))):
                    self._pool.submit(self._work)
                    self._readers += 1

    def _work(self) -> None:
        """In a thread: read what waits, until nothing does or there is a pause."""
        while (ticket := self._next()) is not None:
            if not ticket.done.set_running_or_notify_cancel():
                continue
            try:
                if ticket.after is not None:
                    ticket.after.synchronize()
                with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    ticket.done.set_result(self._read(ticket.key, ticket.slot))
            except BaseException as error:  # told to whoever asks for the ticket
                ticket.done.set_exception(error)

    def _next(self) -> _Ticket | None:
        with self._lock:
            if self._waiting and not self._pauses:
                return self._waiting.popleft()
            self._readers -= 1
            return None
