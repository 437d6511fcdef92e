"""Moves experts from the store into slots: the only owner of I/O threads, and of the stream that they copy on.

Called by the forward thread only. Threads fill tensors and complete futures; the caller collects completed reads and
decides what follows.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.background import Background
from vllm_spac.cache.host_tier import Move
from vllm_spac.cache.link import Moved, reads_ahead
from vllm_spac.cache.mover import HOST, HostRows, Mover
from vllm_spac.errors import ConfigError
from vllm_spac.metrics import Counters
from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, given_up
from vllm_spac.system.io_uring import Ring
from vllm_spac.tiers.base import ExpertStore
from vllm_spac.timeline.recorder import Kind, Timeline, now


class Transfers:
    """Loads several experts concurrently: on demand with ``load``, ahead of need with ``ahead``.

    A load on demand never waits for a prefetch: the two have separate threads, and no prefetch starts while the caller
    waits.

    Args:
        store: source of the experts.
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        threads: maximum number of loads on demand in flight, in addition to the one in the calling thread.
        path: the name of the store in ``Counters.bytes``.
        background: maximum number of prefetch reads in flight; half of ``threads`` unless given.
        rows: host memory between the slots and the store, if any.
        ring: reads the loads on demand of a layer together, in the calling thread; owned. None: threads do.

    Raises:
        ConfigError: ``ring`` cannot read from this store into these slots.
    """

    def __init__(
        self,
        store: ExpertStore,
        slots: Mapping[str, Tensor],
        threads: int,
        path: str,
        background: int | None = None,
        rows: HostRows | None = None,
        ring: Ring | None = None,
    ) -> None:
        self._mover = Mover(store, slots, path, rows)
        self._ring = ring
        if ring is not None and not self._mover.batches():
            ring.close()
            raise ConfigError(
                f"spac: io_submit=io_uring (--spac-io-submit) reads files with direct I/O into slots of whole pages in "
                f"CPU memory, which is not so for {store.describe()}; use --spac-io-submit threads"
            )
        self._device = next(iter(slots.values())).device
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-io", initializer=unbind)
        self.ahead = Background(self._mover, reads_ahead(threads, background), self._device)

    def clock(self) -> float:
        """Returns monotonic time in seconds."""
        return time.perf_counter()

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        """Fills each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        Whether it returns or raises, no thread writes to these slots afterwards.

        Returns:
            The keys that failed, with their errors.
        """
        start, begun = self.clock(), now()
        if self._device.type == "cuda":  # a kernel that was launched before may still read the slots
            torch.cuda.current_stream(self._device).synchronize()
        planned = [self._mover.plan(key, slot) for key, slot in loads]
        left, results = deque(planned[1:]), dict[int, Moved | BaseException]()
        failed: dict[int, BaseException] = {}
        with self.ahead.paused():
            helpers: list[Future] = []
            try:
                if self._ring is not None:
                    with contextlib.closing(self._mover.perform_all(planned, self._ring)) as ended:
                        results.update(ended)
                else:
                    helpers = self._submit(min(self._threads, len(left)), left, results)
                    self._perform(deque(planned[:1]), results)  # this thread would only wait otherwise
                    self._perform(left, results)
            finally:
                left.clear()  # it was interrupted
                _settle(helpers)
                for move in planned:
                    result = results.get(move.key) or given_up()
                    self._mover.ended(move, result)
                    if isinstance(result, BaseException):
                        failed[move.key] = result
                    elif counters is not None:
                        counters.loads += 1
                        counters.host_loads += result.path == HOST
                        counters.moved(result.path, result.nbytes)
        if counters is not None:
            counters.stall_seconds += self.clock() - start
        if planned and (timeline := self._mover.timeline) is not None:
            timeline.add(Kind.WAIT, begun, len(planned))
        return failed

    def keep(self, keys: Sequence[int]) -> Iterator[int]:
        """Reads ``keys``, which neither slots nor rows of host memory have, into free rows; yields 1 for each.

        Raises:
            StoreError: one could not be read; the engine must not start.
        """
        for _ in self._pool.map(self._mover.fill_row, [self._mover.admit(key) for key in keys], keys):
            yield 1

    def watch(self, timeline: Timeline | None, first: int) -> None:
        """As ``Execution.watch``."""
        self._mover.watch(timeline, first)

    def enter(self, layer: range) -> None:
        self._mover.enter(layer)

    def observe(self, counts: np.ndarray) -> None:
        self._mover.observe(counts)

    def poison(self, slot: int) -> None:
        self._mover.poison(slot)

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.ahead.close()
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        self._mover.close()

    def _submit(self, count: int, left: deque[Move], results: dict[int, Moved | BaseException]) -> list[Future]:
        """Starts up to ``count`` threads that perform what is left; those that come too late find nothing."""
        try:
            return [self._pool.submit(self._perform, left, results, BaseException) for _ in range(count)]
        except RuntimeError:  # closed: each move is reported as given up
            left.clear()
            return []

    def _perform(
        self, left: deque[Move], results: dict[int, Moved | BaseException], caught: type[BaseException] = Exception
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
