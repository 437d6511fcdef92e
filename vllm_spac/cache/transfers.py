"""Moves experts from the store into slots: the only owner of I/O threads, and of the stream that they copy on.

Called by the forward thread only. Threads fill tensors and complete futures; the caller collects completed reads and
decides what follows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.background import Background
from vllm_spac.cache.host_tier import Move
from vllm_spac.cache.link import reads_ahead
from vllm_spac.cache.mover import HOST, HostRows, Mover
from vllm_spac.metrics import Counters
from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, outcome
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
        self._slots = slots
        self._mover = Mover(store, slots, path, rows)
        self._device = next(iter(slots.values())).device
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
        moves = [self._mover.plan(key, slot) for key, slot in loads]
        jobs: dict[int, Future] = {}
        failed: dict[int, BaseException] = {}
        with self.ahead.paused():
            try:
                jobs.update((move.key, self._submit(move)) for move in moves[1:])
                jobs.update((move.key, self._here(move)) for move in moves[:1])
                finish(list(jobs.values()))
            finally:
                _settle(list(jobs.values()))
                for move in moves:
                    result = outcome(jobs[move.key]) if move.key in jobs else InterruptedError("the load was given up")
                    self._mover.ended(move, result)
                    if isinstance(result, BaseException):
                        failed[move.key] = result
                    elif counters is not None:
                        counters.loads += 1
                        counters.host_loads += result.path == HOST
                        counters.moved(result.path, result.nbytes)
        if counters is not None:
            counters.stall_seconds += self.clock() - start
        if moves and (timeline := self._mover.timeline) is not None:
            timeline.add(Kind.WAIT, begun, len(moves))
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
        self._mover.close()

    def _submit(self, move: Move) -> Future:
        try:
            return self._pool.submit(self._mover.perform, move)
        except RuntimeError:  # closed: reported like any other failure
            dropped: Future = Future()
            dropped.cancel()
            return dropped

    def _here(self, move: Move) -> Future:
        """Reads in the calling thread, which would only wait otherwise."""
        done: Future = Future()
        try:
            done.set_result(self._mover.perform(move))
        except Exception as error:  # handed to the caller with the errors of the threads
            done.set_exception(error)
        return done


def _settle(jobs: Sequence[Future]) -> None:
    """Cancels the jobs that have not begun and waits for the others, even if interrupted."""
    for job in jobs:
        job.cancel()
    while not all(job.done() for job in jobs):
        with contextlib.suppress(KeyboardInterrupt):  # the first one is already being raised
            finish(jobs)
