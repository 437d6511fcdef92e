"""Background reads ahead of need: own threads, cancellable tickets, and a pause while a layer waits."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from vllm_spac.cache.host_tier import Move
from vllm_spac.cache.link import Moved
from vllm_spac.cache.mover import Mover
from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, outcome
from vllm_spac.timeline.recorder import Kind, now


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A read ahead of need. ``after`` is reached when no kernel may still read the slot's old expert."""

    move: Move
    after: torch.cuda.Event | None
    done: Future = field(default_factory=Future)


class Background:
    """Queue and threads of the reads ahead of need.

    Called by the forward thread only.

    Args:
        mover: plans, performs and completes the reads.
        threads: maximum number of reads in flight.
        device: device of the slots.
    """

    def __init__(self, mover: Mover, threads: int, device: torch.device) -> None:
        self._mover = mover
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-ahead", initializer=unbind)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._tickets: dict[int, _Ticket] = {}  # used by the forward thread only
        self._lock = threading.Lock()  # protects the four below
        self._waiting: deque[_Ticket] = deque()
        self._readers = 0
        self._pauses = 0
        self._closed = False

    @property
    def keys(self) -> KeysView[int]:
        """Keys that were queued and not cancelled, reaped or waited for since; the oldest first."""
        return self._tickets.keys()

    def fetch(self, loads: Iterable[tuple[int, int]]) -> None:
        """Queues the reads of each (key, slot), in this order; does not wait."""
        after = None
        if self._stream is not None:
            after = torch.cuda.Event()
            after.record(torch.cuda.current_stream(self._device))
        tickets = []
        for key, slot in loads:
            assert key not in self._tickets, f"a read of expert {key} is in flight already"
            self._tickets[key] = _Ticket(self._mover.plan(key, slot), after)
            tickets.append(self._tickets[key])
        with self._lock:
            self._waiting.extend(tickets)
        self._begin()

    def cancel(self, keys: Iterable[int]) -> list[int]:
        """Cancels those of ``keys`` whose read has not begun; returns them. Their slots were not written."""
        gone = [key for key in keys if self._tickets[key].done.cancel()]
        for key in gone:
            self._mover.untouched(self._tickets.pop(key).move)
        if gone:
            with self._lock:
                self._waiting = deque(ticket for ticket in self._waiting if not ticket.done.cancelled())
        return gone

    def reap(self) -> dict[int, Moved | BaseException]:
        """Returns the reads finished since the last call: key -> what was moved, or the error. Does not wait."""
        over = [key for key, ticket in self._tickets.items() if ticket.done.done()]
        return {key: self._end(key) for key in over}

    def wait(self, keys: Sequence[int]) -> dict[int, Moved | BaseException]:
        """Waits for the reads of ``keys`` to finish; returns as ``reap``. All of them must have begun."""
        begun = now()
        done = [self._tickets[key].done for key in keys]
        assert all(job.running() or job.done() for job in done), "cancel before waiting: nothing is begun meanwhile"
        with self.paused():
            finish(done)
        if (timeline := self._mover.timeline) is not None:
            timeline.add(Kind.WAIT_AHEAD, begun, len(done))
        return {key: self._end(key) for key in keys}

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Starts no read inside the block; reads in flight continue."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            with self._lock:
                self._pauses -= 1
            self._begin()

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads. Later reads are cancelled."""
        with self._lock:
            self._closed = True
        self._begin()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _end(self, key: int) -> Moved | BaseException:
        ticket = self._tickets.pop(key)
        result = outcome(ticket.done)
        self._mover.ended(ticket.move, result)
        return result

    def _begin(self) -> None:
        """Starts as many threads as there are queued reads and free threads, unless paused."""
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
        """Body of a thread: performs queued reads until the queue is empty or reads are paused."""
        while (ticket := self._next()) is not None:
            if not ticket.done.set_running_or_notify_cancel():
                continue
            try:
                if ticket.after is not None:
                    ticket.after.synchronize()
                with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    ticket.done.set_result(self._mover.perform(ticket.move))
            except BaseException as error:  # raised by the caller that waits for the ticket
                ticket.done.set_exception(error)

    def _next(self) -> _Ticket | None:
        with self._lock:
            if self._waiting and not self._pauses:
                return self._waiting.popleft()
            self._readers -= 1
            return None
