"""Moves experts from the store into slots: the only owner of I/O threads."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from vllm_spac.metrics import Counters
from vllm_spac.tiers.base import ExpertStore


class Transfers:
    """Loads experts on demand, several at a time.

    Args:
        store: where experts are read.
        slots: name -> tensor of shape [slots, ...]; a load writes one row of each.
        threads: reads in flight at once.
        path: the name of the store in ``Counters.bytes``.
    """

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], threads: int, path: str) -> None:
        self._store = store
        self._slots = slots
        self._device = next(iter(slots.values())).device
        self._path = path
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="spac-io")

    def load(self, loads: Sequence[tuple[int, int]], counters: Counters | None) -> dict[int, Exception]:
        """Fill each (key, slot) of ``loads``; returns when all are done and adds to ``counters``, if given.

        Returns:
            The keys that failed, with their errors: empty when all is well.
        """
        start = time.perf_counter()
        if self._device.type == "cuda":  # a kernel that was launched before may still read the slots
            torch.cuda.current_stream(self._device).synchronize()
        failed: dict[int, Exception] = {}
        jobs = [(key, self._pool.submit(self._read, key, slot)) for key, slot in loads[1:]]
        first: list[tuple[int, Future]] = [(key, self._here(key, slot)) for key, slot in loads[:1]]
        for key, job in first + jobs:
            error = job.exception()
            if error is not None:
                failed[key] = error
            elif counters is not None:
                counters.loads += 1
                counters.bytes[self._path] = counters.bytes.get(self._path, 0) + job.result()
        if counters is not None:
            counters.stall_seconds += time.perf_counter() - start
        return failed

    def close(self) -> None:
        """Wait for the reads in flight and stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self, key: int, slot: int) -> int:
        return self._store.read(key, {name: tensor[slot] for name, tensor in self._slots.items()})

    def _here(self, key: int, slot: int) -> Future:
        """Read in the calling thread, which would only wait otherwise."""
        done: Future = Future()
        try:
            done.set_result(self._read(key, slot))
        except Exception as error:  # handed to the caller with the errors of the threads
            done.set_exception(error)
        return done
