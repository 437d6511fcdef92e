"""Moves experts from the store into slots: the only owner of I/O threads, and of the stream that they copy on.

Called by the forward thread only. Threads fill tensors and complete futures; the caller collects completed reads and
decides what follows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vllm_spac.cache.background import Background
from vllm_spac.cache.link import reads_ahead
from vllm_spac.metrics import Counters
from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, outcome
from vllm_spac.tiers.base import ExpertStore


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
    """

    def __init__(
        self, store: ExpertStore, slots: Mapping[str, Tensor], threads: int, path: str, background: int | None = None
    ) -> None:
        self._store = store
        self._slots = slots
        self._device = next(iter(slots.values())).device
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-io", initializer=unbind)
        self.path = path
        self.ahead = Background(self._read, reads_ahead(threads, background), self._device)

    def clock(self) -> float:
        """Returns monotonic time in seconds."""
        return time.perf_counter()

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        """Fills each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        Whether it returns or raises, no thread writes to these slots afterwards.

        Returns:
            The keys that failed, with their errors.
        """
        start = self.clock()
        if self._device.type == "cuda":  # a kernel that was launched before may still read the slots
            torch.cuda.current_stream(self._device).synchronize()
        jobs: list[Future] = []
        with self.ahead.paused():
            try:
                jobs.extend(self._submit(key, slot) for key, slot in loads[1:])
                first = [self._here(key, slot) for key, slot in loads[:1]]
                finish(jobs)
            finally:
                _settle(jobs)
        failed: dict[int, BaseException] = {}
        for (key, _), job in zip(loads, first + jobs, strict=True):
            result = outcome(job)
            if isinstance(result, BaseException):
                failed[key] = result
            elif counters is not None:
                counters.loads += 1
                counters.moved(self.path, result)
        if counters is not None:
            counters.stall_seconds += self.clock() - start
        return failed

    def poison(self, slot: int) -> None:
        """Sets all bits of a slot, which is NaN in every float format, so that premature reads become visible."""
        for tensor in self._slots.values():
            tensor[slot].reshape(-1).view(torch.uint8).fill_(0xFF)

    def close(self) -> None:
        """Waits for the reads in flight, cancels the others and stops the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.ahead.close()

    def _read(self, key: int, slot: int) -> int:
        return self._store.read(key, {name: tensor[slot] for name, tensor in self._slots.items()})

    def _submit(self, key: int, slot: int) -> Future:
        try:
            return self._pool.submit(self._read, key, slot)
        except RuntimeError:  # closed: reported like any other failure
            dropped: Future = Future()
            dropped.cancel()
            return dropped

    def _here(self, key: int, slot: int) -> Future:
        """Reads in the calling thread, which would only wait otherwise."""
        done: Future = Future()
        try:
            done.set_result(self._read(key, slot))
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
