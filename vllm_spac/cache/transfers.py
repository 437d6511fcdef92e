"""Moves experts from the store into slots: the only owner of I/O threads, and of the stream that they copy on.

Called by the forward thread only. Threads fill tensors and complete futures; what follows from a completed read is
decided by the caller, when it asks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vllm_spac.cache.background import Background
from vllm_spac.metrics import Counters
from vllm_spac.system.cpu_affinity import unbind
from vllm_spac.system.futures import finish, outcome
from vllm_spac.tiers.base import ExpertStore


class Transfers:
    """Loads experts, several at a time: on demand with ``load``, ahead of need with ``ahead``.

    A read on demand never queues behind one ahead: they have threads of their own, and none ahead is begun while the
    caller waits.

    Args:
        store: where experts are read.
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        threads: reads on demand in flight at once, beside the caller's own.
        path: the name of the store in ``Counters.bytes``.
        background: reads ahead of need in flight at once; half of ``threads`` unless given.
    """

    def __init__(
        self, store: ExpertStore, slots: Mapping[str, Tensor], threads: int, path: str, background: int | None = None
    ) -> None:
        self._store = store
        self._slots = slots
        self._device = next(iter(slots.values())).device
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-io", initializer=unbind)
        self.path = path
        self.ahead = Background(self._read, max(1, threads // 2) if background is None else background, self._device)

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, BaseException]:
        """Fill each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        However it ends, no thread writes to these slots any more.

        Returns:
            The keys that failed, with their errors: empty when all is well.
        """
        start = time.perf_counter()
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
            counters.stall_seconds += time.perf_counter() - start
        return failed

    def poison(self, slot: int) -> None:
        """Set all bits of a slot, which is NaN in every float format: whoever reads it too early shows."""
        for tensor in self._slots.values():
            tensor[slot].reshape(-1).view(torch.uint8).fill_(0xFF)

    def close(self) -> None:
        """Wait for the reads in flight, drop the others and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.ahead.close()

    def _read(self, key: int, slot: int) -> int:
        return self._store.read(key, {name: tensor[slot] for name, tensor in self._slots.items()})

    def _submit(self, key: int, slot: int) -> Future:
        try:
            return self._pool.submit(self._read, key, slot)
        except RuntimeError:  # closed: told as any other failure
            dropped: Future = Future()
            dropped.cancel()
            return dropped

    def _here(self, key: int, slot: int) -> Future:
        """Read in the calling thread, which would only wait otherwise."""
        done: Future = Future()
        try:
            done.set_result(self._read(key, slot))
        except Exception as error:  # handed to the caller with the errors of the threads
            done.set_exception(error)
        return done


def _settle(jobs: Sequence[Future]) -> None:
    """Drop the jobs that have not begun and wait for the others, whatever interrupts."""
    for job in jobs:
        job.cancel()
    while not all(job.done() for job in jobs):
        with contextlib.suppress(KeyboardInterrupt):  # the one that brought us here is on its way up already
            finish(jobs)
