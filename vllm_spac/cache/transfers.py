"""Loads experts from their store into slots: the only owner of I/O threads, and of the stream that they copy on.

``Mover`` is what one load does, in any thread; ``Background`` reads ahead of need, and pauses while a layer waits;
``Transfers`` has both, and loads on demand. Called by the forward thread only. Threads fill tensors and complete
futures; the caller collects completed reads and decides what follows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.host_tier import HostMove, HostTier
from vllm_spac.cache.link import Moved, reads_ahead
from vllm_spac.recording import watchdog
from vllm_spac.recording.metrics import Counters
from vllm_spac.recording.timeline_recorder import Kind, Timeline, now
from vllm_spac.storage.base import ExpertStore, Slot, Slots, rows_of
from vllm_spac.system.host_blocks import HostBlock
from vllm_spac.system.machine import reset_affinity
from vllm_spac.system.threads import cancelled_load, finish, outcome

HOST = "host"


@dataclass(frozen=True)
class HostRows:
    """Host memory between slots and store."""

    tier: HostTier  # which expert is in which row; owned
    block: HostBlock  # the rows; owned

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> CPU tensor [rows, ...]."""
        return self.block.tensors

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of the rows, as ``ExpertStore.host_bytes``."""
        return self.block.host_bytes


class Mover:
    """Fills slots. ``perform`` may run in several threads at once, everything else in the forward thread only.

    Args:
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        path: name of the store in ``Counters.bytes``.
        rows: host memory beside the store, if any.
    """

    timeline: Timeline | None = None

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], path: str, rows: HostRows | None) -> None:
        self._store, self._path, self._rows = store, path, rows
        self._slots = Slots(slots)
        self._row_memory = {} if rows is None else rows_of(rows.tensors)
        self._saved: set[int] = set()  # keys whose move has filled its row; every thread adds only its own
        self._first = 0

    def watch(self, timeline: Timeline | None, first: int) -> None:
        """As ``Execution.watch``."""
        self.timeline, self._first = timeline, first

    def plan(self, key: int, slot: int) -> HostMove:
        """Decides what the load of ``key`` into ``slot`` does; ``finish`` or ``cancel`` must follow."""
        return HostMove(key, slot) if self._rows is None else self._rows.tier.plan(key, slot)

    def perform(self, move: HostMove) -> Moved:
        """Fills the slot of ``move``; raises ``StoreError`` as ``ExpertStore.read``."""
        if (timeline := self.timeline) is None:
            return self._perform(move)
        start = now()
        moved = self._perform(move)
        timeline.add(Kind.LOAD if move.source is None else Kind.HOST_LOAD, start, self._first + move.key, moved.nbytes)
        return moved

    def _perform(self, move: HostMove) -> Moved:
        slot = self._slots[move.slot]
        if move.saved is not None:
            self._save(slot, move)
        if move.source is not None:
            for name, rows in self._row_memory.items():
                slot.fill(name, rows[move.source])
            return Moved(HOST, self._store.shape.expert_bytes)
        nbytes = self._store.read(move.key, slot)
        if move.row is not None and move.saved is None:
            self._save(slot, move)
        return Moved(self._path, nbytes)

    def queue(self, key: int, slot: int) -> Moved:
        """Launches the copies of ``key``, which is in memory that the GPU reads, on the caller's stream; no waiting."""
        tensors = self._slots[slot]
        for name, stored in self._store.view(key).items():
            tensors[name].copy_(stored, non_blocking=True)
        return Moved(self._path, self._store.shape.expert_bytes)

    def finish(self, move: HostMove, result: object) -> None:
        """Completes ``move``; ``result``: what ``perform`` returned, or the exception that it raised."""
        saved = move.key in self._saved
        self._saved.discard(move.key)
        if self._rows is not None:
            self._rows.tier.finish(move, read=isinstance(result, Moved), saved=saved)

    def begin_layer(self, layer: range) -> None:
        """As ``Policy.begin_layer``."""
        if self._rows is not None:
            self._rows.tier.policy.begin_layer(layer)

    def observe(self, counts: np.ndarray) -> None:
        """As ``Policy.observe``."""
        if self._rows is not None:
            self._rows.tier.policy.observe(counts)

    def observe_prompt(self, rows: np.ndarray) -> None:
        """As ``Policy.observe_prompt``."""
        if self._rows is not None:
            self._rows.tier.policy.observe_prompt(rows)

    def cancel(self, move: HostMove) -> None:
        """Undoes ``move``, which was never performed."""
        if self._rows is not None:
            self._rows.tier.cancel(move)

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

    def _save(self, slot: Slot, move: HostMove) -> None:
        assert self._rows is not None and move.row is not None
        if slot.memory is not None:
            for name, rows in self._row_memory.items():
                np.copyto(rows[move.row], slot.memory[name])
        else:
            for name, tensor in slot.items():
                self._rows.tensors[name][move.row].copy_(tensor)
        self._saved.add(move.key)


@dataclass(frozen=True, eq=False)
class _Ticket:
    """A read ahead of need. ``after`` is reached when no kernel may still read the slot's old expert."""

    move: HostMove
    after: torch.cuda.Event | None
    done: Future = field(default_factory=Future)


class Background:
    """Queue and threads of the reads ahead of need.

    Called by the forward thread only.

    Args:
        threads: maximum number of reads in flight.
    """

    def __init__(self, mover: Mover, threads: int, device: torch.device) -> None:
        self._mover = mover
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-ahead", initializer=reset_affinity)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            watchdog.watch(self._stream, "loads of experts")
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

    @property
    def reading(self) -> int:
        """As in ``Ahead``."""
        return sum(ticket.done.running() for ticket in self._tickets.values())

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
            self._mover.cancel(self._tickets.pop(key).move)
        if gone:
            with self._lock:
                self._waiting = deque(ticket for ticket in self._waiting if not ticket.done.cancelled())
        return gone

    def take_finished(self) -> dict[int, Moved | BaseException]:
        """Returns the reads finished since the last call: key -> what was moved, or the error. Does not wait."""
        over = [key for key, ticket in self._tickets.items() if ticket.done.done()]
        return {key: self._end(key) for key in over}

    def wait(self, keys: Sequence[int]) -> dict[int, Moved | BaseException]:
        """Waits for the reads of ``keys`` to finish; returns as ``take_finished``. All of them must have begun."""
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
        self._mover.finish(ticket.move, result)
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


_HAND_OFF = 256 << 10  # bytes that are copied while a thread wakes up, some 30 us


class _Stalls:
    """Measures how long a CUDA stream is busy with copies; the host learns it later and never waits for it."""

    def __init__(self) -> None:
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """The current stream's work inside the block is measured."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._open.append((start, end))

    def seconds(self) -> float:
        """Returns the time of the blocks that the stream has finished since the last call."""
        found = 0.0
        while self._open and self._open[0][1].query():
            start, end = self._open.popleft()
            found += start.elapsed_time(end) / 1e3
        return found


class Transfers:
    """Loads several experts concurrently: on demand with ``load``, ahead of need with ``ahead``.

    A load on demand never waits for a prefetch: the two have separate threads, and no prefetch starts while the caller
    waits.

    Experts in memory that the GPU reads (``ExpertStore.addressable``) are loaded without threads, and nobody waits: the
    copies are queued on the stream that runs the model, after the kernels that may still read the slots and before
    those that will. On an H100 a token at batch size 4 took 20 ms instead of the 35 with threads and their waits.

    Args:
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        threads: maximum number of loads on demand in flight, in addition to the one in the calling thread. Where the
            others together are copied while a thread would begin, the calling thread does all.
        path: the name of the store in ``Counters.bytes``.
        background: maximum number of prefetch reads in flight; half of ``threads`` unless given.
        rows: host memory between the slots and the store, if any.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Mapping[str, Tensor],
        threads: int,
        path: str,
        background: int | None = None,
        rows: HostRows | None = None,
    ) -> None:
        self._mover = Mover(store, slots, path, rows)
        self._device = next(iter(slots.values())).device
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-io", initializer=reset_affinity)
        self.ahead = Background(self._mover, reads_ahead(threads, background), self._device)
        self._addressable, self._expert_bytes = rows is None and store.addressable, store.shape.expert_bytes
        queued = self._device.type == "cuda" and self._addressable
        self._stalls = _Stalls() if queued else None

    def clock(self) -> float:
        """Returns monotonic time in seconds."""
        return time.perf_counter()

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        """Fills each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        Whether it returns or raises, no thread writes to these slots afterwards. They are done for what the caller
        launches next on its stream: a GPU may still copy. ``finish`` waits for it.

        Returns:
            The keys that failed, with their errors.
        """
        if self._stalls is not None:
            return self._queue(loads, counters, self._stalls)
        start, begun = self.clock(), now()
        if self._device.type == "cuda":  # a kernel that was launched before may still read the slots
            torch.cuda.current_stream(self._device).synchronize()
        planned = [self._mover.plan(key, slot) for key, slot in loads]
        results: dict[int, Moved | BaseException] = {}
        try:
            if self._quick(len(planned) - 1):
                self._perform(deque(planned), results)
            else:
                self._share(planned, results)
        finally:
            failed = self._end(planned, results, counters)
        if counters is not None:
            counters.stall_seconds += self.clock() - start
        if planned and (timeline := self._mover.timeline) is not None:
            timeline.add(Kind.WAIT, begun, len(planned))
        return failed

    def _share(self, planned: Sequence[HostMove], results: dict[int, Moved | BaseException]) -> None:
        """Performs what is ``planned`` in this thread and others; reads ahead pause meanwhile."""
        left = deque(planned[1:])
        with self.ahead.paused():
            helpers: list[Future] = []
            try:
                helpers = self._submit(min(self._threads, len(left)), left, results)
                self._perform(deque(planned[:1]), results)  # this thread would only wait otherwise
                self._perform(left, results)
            finally:
                left.clear()  # it was interrupted
                if helpers:
                    _settle(helpers)

    def _end(
        self,
        planned: Sequence[HostMove],
        results: Mapping[int, Moved | BaseException],
        counters: Counters | None,
    ) -> dict[int, BaseException]:
        """Completes what was ``planned``, and counts it; returns what failed."""
        failed: dict[int, BaseException] = {}
        for move in planned:
            result = results.get(move.key) or cancelled_load()
            self._mover.finish(move, result)
            if isinstance(result, BaseException):
                failed[move.key] = result
            elif counters is not None:
                counters.loads += 1
                counters.host_loads += result.path == HOST
                counters.count_bytes(result.path, result.nbytes)
        return failed

    def _queue(
        self, loads: Sequence[tuple[int, int]], counters: Counters | None, stalls: _Stalls
    ) -> dict[int, BaseException]:
        moved: list[Moved] = []
        failed: dict[int, BaseException] = {}
        begun = now()
        with contextlib.nullcontext() if counters is None else stalls.measured():
            for key, slot in loads:
                try:
                    moved.append(self._mover.queue(key, slot))
                except Exception as error:  # handed to the caller, as those of threads are
                    failed[key] = error
        if counters is not None:
            counters.loads += len(moved)
            for each in moved:
                counters.count_bytes(each.path, each.nbytes)
            counters.stall_seconds += stalls.seconds()
        if loads and (timeline := self._mover.timeline) is not None:
            timeline.add(Kind.WAIT, begun, len(loads))
        return failed

    def finish(self) -> None:
        """Waits until what was loaded is there for any stream."""
        if self._stalls is not None:
            torch.cuda.synchronize(self._device)

    def fill_host(self, keys: Sequence[int]) -> Iterator[int]:
        """Reads ``keys``, which neither slots nor rows of host memory have, into free rows; yields 1 for each.

        Raises:
            StoreError: one could not be read; the engine must not start.
        """
        for _ in self._pool.map(self._mover.fill_row, [self._mover.admit(key) for key in keys], keys):
            yield 1

    def watch(self, timeline: Timeline | None, first: int) -> None:
        """As ``Execution.watch``."""
        self._mover.watch(timeline, first)

    def begin_layer(self, layer: range) -> None:
        self._mover.begin_layer(layer)

    def observe(self, counts: np.ndarray) -> None:
        self._mover.observe(counts)

    def observe_prompt(self, rows: np.ndarray) -> None:
        self._mover.observe_prompt(rows)

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.ahead.close()
        self._mover.close()

    def _quick(self, loads: int) -> bool:
        """Whether so many loads take less time than a thread takes to begin."""
        return self._addressable and loads * self._expert_bytes <= _HAND_OFF

    def _submit(self, count: int, left: deque[HostMove], results: dict[int, Moved | BaseException]) -> list[Future]:
        """Starts up to ``count`` threads that perform what is left; those that come too late find nothing."""
        try:
            return [self._pool.submit(self._perform, left, results, BaseException) for _ in range(count)]
        except RuntimeError:  # closed: each move is reported as given up
            left.clear()
            return []

    def _perform(
        self, left: deque[HostMove], results: dict[int, Moved | BaseException], caught: type[BaseException] = Exception
    ) -> None:
        """Performs what is left, move by move, in any thread; errors of the type ``caught`` are results."""
        while left:
            try:
                move = left.popleft()
            except IndexError:  # another thread took it
                return
            try:
                results[move.key] = self._mover.perform(move)
            except caught as error:  # handed to the caller of ``load``
                results[move.key] = error


def _settle(jobs: Sequence[Future]) -> None:
    """Cancels the jobs that have not begun and waits for the others, even if interrupted."""
    for job in jobs:
        job.cancel()
    while not all(job.done() for job in jobs):
        with contextlib.suppress(KeyboardInterrupt):  # the first one is already being raised
            finish(jobs)
