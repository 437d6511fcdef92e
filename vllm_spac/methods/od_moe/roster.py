"""Which workers are asked, and under which epoch: what a client knows between two layers.

A layer waits for a worker for a multiple of what such calls took (``Patience``); then its rows go elsewhere. Threads
bring lost workers back while the engine serves.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import zmq

from vllm_spac.errors import SpacError
from vllm_spac.methods.od_moe import division
from vllm_spac.methods.od_moe.wire import Ready
from vllm_spac.methods.od_moe.worker_link import WorkerLink

logger = logging.getLogger("vllm.spac")

_KEPT, _ENOUGH, _TIMES = 64, 8, 8
_MOST_FAILURES = 2  # in a row: late answers, errors or values that cannot be
_LONGEST = 30.0  # seconds between two attempts


class Patience:
    """Deadlines of the calls to one worker, by size: calls with about as many rows take about as long.

    Args:
        least: shortest deadline in seconds.
        first: deadline in seconds while fewer than 8 calls of that size were answered.
    """

    def __init__(self, least: float = 1.0, first: float = 60.0) -> None:
        self._least, self._first = least, first
        self._taken: dict[int, deque[float]] = {}  # by the power of two of the rows

    def observe(self, rows: int, seconds: float) -> None:
        """A call with so many rows was answered after ``seconds``."""
        self._taken.setdefault(rows.bit_length(), deque(maxlen=_KEPT)).append(seconds)

    def of(self, rows: int) -> float:
        """Returns the deadline in seconds of a call: 8 times the longest of the last 64 of that size."""
        taken = self._taken.get(rows.bit_length(), ())
        return self._first if len(taken) < _ENOUGH else max(self._least, _TIMES * max(taken))


@dataclass
class WorkerShare:
    """What became of the calls of one worker; rows are counted once per layer, and per worker of a group."""

    calls: int = 0  # requests whose answer counted
    rows: int = 0  # their rows
    losses: int = 0  # requests whose answer did not count: late, wrong, or of a worker that ended
    rows_lost: int = 0  # their rows, which were computed elsewhere
    # sent_bytes, received_bytes: of requests, and of answers that counted
    sent_bytes: int = 0
    received_bytes: int = 0
    # from sending a request to its answer, of those that counted; a worker has up to two at once
    round_trip_seconds: float = 0.0
    readmissions: int = 0  # times that it returned after it was lost


@dataclass
class Shares:
    """What became of the rows of all layers since the start."""

    workers: tuple[WorkerShare, ...]  # of each worker, by its number
    elsewhere: int = 0  # rows that this process computed, because no worker could
    dropped: int = 0  # answers that did not count: late, repeated, damaged, or of another session


class Roster:
    """The workers of one engine. Called by one thread.

    Args:
        size: as in ``division.owners``.
        fingerprint: 16 bytes, of the experts.
    """

    def __init__(
        self, workers: int, fingerprint: bytes, patience: Callable[[], Patience] = Patience, size: int = 1
    ) -> None:
        self.workers, self.size, self.fingerprint = workers, size, fingerprint
        self.shares = Shares(tuple(WorkerShare() for _ in range(workers)))
        self.why_out: dict[int, str] = {}  # of each worker that was removed
        self._patience = patience
        self._patiences: dict[int, Patience] = {}
        self._epochs: dict[int, int] = {}  # of the workers that are in
        self._failures: dict[int, int] = {}  # in a row
        self._sequence = 0

    def admit(self, worker: int, epoch: int) -> None:
        """Asks ``worker`` from now on; answers of its earlier epochs do not count."""
        assert worker not in self._epochs and epoch > 0
        self._epochs[worker], self._failures[worker] = epoch, 0
        self.shares.workers[worker].readmissions += worker in self._patiences
        self._patiences[worker] = self._patience()
        self.why_out.pop(worker, None)

    def remove(self, worker: int, why: str) -> None:
        """Asks ``worker`` no more; does nothing if it is out."""
        if self._epochs.pop(worker, None) is not None:
            self.why_out[worker] = why

    def observe_failure(self, worker: int, why: str) -> None:
        """A request to ``worker`` came to nothing; two in a row remove it."""
        if worker in self._epochs:
            self._failures[worker] += 1
            if self._failures[worker] >= _MOST_FAILURES:
                self.remove(worker, why)

    def observe_answer(self, worker: int, rows: int, seconds: float, nbytes: int) -> None:
        """An answer of ``worker`` counted: ``nbytes`` for so many rows, so long after the request."""
        self._failures[worker] = 0
        self._patiences[worker].observe(rows, seconds)
        share = self.shares.workers[worker]
        share.calls += 1
        share.rows += rows
        share.round_trip_seconds += seconds
        share.received_bytes += nbytes

    def epoch(self, worker: int) -> int | None:
        """The epoch of ``worker``; None if it is out."""
        return self._epochs.get(worker)

    def patience(self, worker: int, rows: int) -> float:
        """As ``Patience.of``, of a worker that is in."""
        return self._patiences[worker].of(rows)

    def having(self, layer: int) -> tuple[int, ...]:
        """The workers that have ``layer``, in or out."""
        return division.owners(layer, self.workers, self.size)

    def owners(self, layer: int) -> list[int]:
        """Those of ``having`` that are in."""
        return [worker for worker in self.having(layer) if worker in self._epochs]

    def sequence(self) -> int:
        """Returns the number of a new request; none is used twice."""
        self._sequence += 1
        return self._sequence


def name(worker: int) -> str:
    """How a worker is called in logs and statistics."""
    return f"worker-{worker}"


class ReadyWorker(NamedTuple):
    """A worker that may be asked for rows: its slots are filled, and it was tested."""

    worker: int
    link: WorkerLink
    ready: Ready
    resident: np.ndarray  # which experts have a slot there, as ``Frame.resident``


class Recovery:
    """Tries to reach lost workers until they are back, each in a thread of its own, or until ``ended`` is set.

    ``bring`` returns a worker that serves again and was tested.
    """

    def __init__(self, bring: Callable[[int], ReadyWorker], ended: threading.Event) -> None:
        self._bring, self._ended = bring, ended
        self._back: queue.SimpleQueue[ReadyWorker] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def request(self, worker: int) -> None:
        """``worker`` is to be brought back."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._run, args=(worker,), name="spac-recovery", daemon=True))
        self._threads[-1].start()

    def back(self) -> list[ReadyWorker]:
        """Returns the workers that are back since the last call."""
        return [self._back.get() for _ in range(self._back.qsize())]

    def close(self) -> None:
        """Waits for the threads, after ``ended`` was set, and closes links that nobody took."""
        for thread in self._threads:
            thread.join()
        for back in self.back():
            back.link.drop()

    def _run(self, worker: int) -> None:
        logged, pause = "", 1.0
        while not self._ended.is_set():
            try:
                self._back.put(self._bring(worker))
                return
            except Exception as error:  # also of what a worker answered: were the thread to end, it never came back
                known = isinstance(error, (SpacError, zmq.ZMQError, OSError))
                problem = str(error) if known else f"{type(error).__name__}: {error}"
                if problem != logged:
                    logger.warning("spac: %s is not back yet: %s", name(worker), problem, exc_info=not known)
                logged = problem
            self._ended.wait(pause)
            pause = min(_LONGEST, 2 * pause)
