"""Brings lost workers back while the engine serves, in a thread of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import zmq

from vllm_spac.distributed.link import Link
from vllm_spac.distributed.roster import name
from vllm_spac.errors import SpacError

logger = logging.getLogger("vllm.spac")

_LONGEST = 30.0  # seconds between two attempts


class Recovery:
    """Tries to reach lost workers until they are back.

    Args:
        bring: returns a link to a worker that serves again and was tested; called in this object's thread.
        ended: set when the engine ends.
    """

    def __init__(self, bring: Callable[[int], Link], ended: threading.Event) -> None:
        self._bring, self._ended = bring, ended
        self._lost: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._back: queue.SimpleQueue[tuple[int, Link]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def lost(self, worker: int) -> None:
        """``worker`` is to be brought back."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spac-recovery", daemon=True)
            self._thread.start()
        self._lost.put(worker)

    def back(self) -> list[tuple[int, Link]]:
        """Returns the workers that are back since the last call, with their links."""
        found = []
        while not self._back.empty():
            found.append(self._back.get())
        return found

    def close(self) -> None:
        """Waits for the thread, after ``ended`` was set, and closes links that nobody took."""
        self._lost.put(None)
        if self._thread is not None:
            self._thread.join()
        for _, link in self.back():
            link.drop()

    def _run(self) -> None:
        waiting: dict[int, tuple[float, int]] = {}  # worker -> when to try next, and attempts so far
        said: dict[int, str] = {}
        while not self._ended.is_set():
            for worker in self._news(waiting):
                waiting[worker] = time.monotonic(), 0
            for worker, (due, attempts) in list(waiting.items()):
                if time.monotonic() < due or self._ended.is_set():
                    continue
                try:
                    link = self._bring(worker)
                except (SpacError, zmq.ZMQError, OSError) as error:
                    if said.get(worker) != str(error):
                        said[worker] = str(error)
                        logger.warning("spac: %s is not back yet: %s", name(worker), error)
                    waiting[worker] = time.monotonic() + min(_LONGEST, 2.0**attempts), attempts + 1
                else:
                    del waiting[worker]
                    said.pop(worker, None)
                    self._back.put((worker, link))

    def _news(self, waiting: dict[int, tuple[float, int]]) -> list[int]:
        """Waits for lost workers, at most until the next attempt is due."""
        due = min((due for due, _ in waiting.values()), default=None)
        found = []
        try:
            timeout = None if due is None else max(0.0, due - time.monotonic())
            found.append(self._lost.get(timeout=timeout) if timeout != 0 else self._lost.get_nowait())
            while True:
                found.append(self._lost.get_nowait())
        except queue.Empty:
            return [worker for worker in found if worker is not None]
