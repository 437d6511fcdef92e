"""Futures whose jobs may fail or be cancelled; and closing what was dropped, in a thread of its own.

Python's garbage collector runs finalizers wherever it happens to run, also inside ``threading`` and
``concurrent.futures`` while these hold their locks. A finalizer that joins a thread there never returns. So a finalizer
only puts its callback on a queue (``queue.SimpleQueue`` is made for that), and a thread that has been started before
runs it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from vllm_spac.errors import StoreError

T = TypeVar("T")


def finish(jobs: Iterable[Future]) -> None:
    """Waits until all have finished. ``concurrent.futures.wait`` would wait for a cancelled one forever."""
    for job in jobs:
        with contextlib.suppress(CancelledError):
            job.exception()


def outcome(job: Future[T]) -> T | BaseException:
    """Returns the result of ``job``, or the error if it failed or was cancelled."""
    return cancelled_load() if job.cancelled() else job.exception() or job.result()


def cancelled_load() -> StoreError:
    """Returns the error of a read that never began."""
    return StoreError("spac: no expert is read any more, the engine is shutting down; start it again")


logger = logging.getLogger(__name__)


class Closer:
    """Runs ``close`` once: when called, in another thread after its owner was garbage-collected, or at exit.

    Args:
        close: must not refer to ``owner``. What it raises reaches the caller; without a caller it is logged.
    """

    def __init__(self, owner: object, close: Callable[[], None]) -> None:
        _dropped.start()
        self._finalizer = weakref.finalize(owner, _dropped.put, close)

    def __call__(self) -> None:
        """Closes now, in this thread; does nothing the second time."""
        pending = self._finalizer.detach()
        if pending is not None:
            _, _, (close,), _ = pending
            close()


class _Dropped:
    """The callbacks of dropped objects and the thread that runs them."""

    def __init__(self) -> None:
        self._exiting = False
        self._reset()
        atexit.register(self._exit)
        # A fork has neither the thread nor a usable queue, whose lock the parent's thread may have held.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread, if this process has none yet."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spac-closer", daemon=True)
                self._thread.start()

    def put(self, close: Callable[[], None]) -> None:
        """Called by finalizers. Nothing runs beside an exit, so what is dropped there is closed at once."""
        if self._exiting:
            _run(close)
        else:
            self._queue.put(close)

    def _run(self) -> None:
        while (close := self._queue.get()) is not None:
            _run(close)

    def _exit(self) -> None:
        """Waits until all that was dropped is closed; finalizers that run later call ``put``."""
        self._exiting = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()


def _run(close: Callable[[], None]) -> None:
    try:
        close()
    except Exception:
        logger.exception("spac: what was dropped without being closed could not be closed")


_dropped = _Dropped()
