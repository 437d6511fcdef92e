"""Records what each thread does and when: a ring of events per thread, written without locks."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

import numpy as np

COLUMNS = ("start", "duration", "kind", "a", "b")
STEP_KINDS = ("dummy", "prefill", "decode", "verify", "mixed")  # of ``core.Step.kind``
UNKNOWN = -1  # tokens of a step whose number is not known on the host
now = time.perf_counter_ns


class Kind(IntEnum):
    """What an event is, and what its numbers ``a`` and ``b`` are. The first seven are of the forward thread.

    Attributes:
        STEP: from the batch to its sampled tokens and the next drafts; index into ``STEP_KINDS``, tokens or UNKNOWN.
        FORWARD: the model's forward; rows, requests.
        LAYER: the routed experts of a layer, with the waits in it; layer, rows.
        WAIT: the forward waits for loads on demand; experts, 0.
        WAIT_AHEAD: the forward waits for reads ahead of need that have begun; experts, 0.
        WAIT_CPU: the forward waits for experts on the CPU; 0, 0.
        UPDATE: policies and predictors observe a finished forward, and reads ahead of need are planned; 0, 0.
        DRAFT: the drafter proposes tokens; tokens, requests.
        LOAD: an expert is read from the store into a slot; key of the expert over all layers, bytes.
        HOST_LOAD: the same from host memory beside the store.
        CPU: experts of a layer are computed on the CPU; rows, 0.
    """

    STEP = 0
    FORWARD = 1
    LAYER = 2
    WAIT = 3
    WAIT_AHEAD = 4
    WAIT_CPU = 5
    UPDATE = 6
    DRAFT = 7
    LOAD = 8
    HOST_LOAD = 9
    CPU = 10


class _Ring:
    """The last events of one thread; only that thread calls ``add``."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self._rows = np.empty((capacity, len(COLUMNS)), dtype=np.int64)
        self._count = 0

    def add(self, start: int, end: int, kind: int, a: int, b: int) -> None:
        count = self._count
        self._rows[count % len(self._rows)] = (start, end - start, kind, a, b)
        self._count = count + 1

    def last(self) -> tuple[np.ndarray, bool]:
        """Returns the events, int64 [n, COLUMNS], first ended first, and whether older ones were overwritten.

        May be called while the thread adds events: those that it may be overwriting are left out.
        """
        stop, capacity = self._count, len(self._rows)
        rows = self._rows[: min(stop, capacity)].copy()
        start = max(0, self._count + 1 - capacity)
        kept = np.arange(min(start, stop), stop) % capacity
        return rows[kept], start > 0


class Timeline:
    """The last events of all threads. An instance exists only while somebody records.

    Args:
        capacity: events kept per thread.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 1
        self._capacity = capacity
        self._own = threading.local()
        self._rings: list[_Ring] = []
        self._lock = threading.Lock()  # protects the list

    def add(self, kind: Kind, start: int, a: int = 0, b: int = 0) -> None:
        """Records that what this thread began at ``start``, a value of ``now``, ends now."""
        end = now()
        try:
            ring = self._own.ring
        except AttributeError:
            ring = self._own.ring = self._begin()
        ring.add(start, end, kind, a, b)

    def last(self) -> tuple[list[str], np.ndarray, np.ndarray, int]:
        """Returns what is kept of all threads, which may go on meanwhile.

        Returns:
            Names of the threads, int64 [n] indices into them, int64 [n, COLUMNS] events, and the time from which no
            event was overwritten: each that ended later is kept.
        """
        with self._lock:
            rings = list(self._rings)
        parts, complete = [], 0
        for ring in rings:
            rows, lost = ring.last()
            parts.append(rows)
            if lost:
                complete = max(complete, int(rows[0, 0] + rows[0, 1]) if len(rows) else now())
        threads = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return [ring.name for ring in rings], threads, np.concatenate(parts or [np.empty((0, 5), np.int64)]), complete

    def _begin(self) -> _Ring:
        ring = _Ring(threading.current_thread().name, self._capacity)
        with self._lock:
            self._rings.append(ring)
        return ring


def capacity_of(steps: int, layers: int) -> int:
    """Returns the events per thread that ``steps`` steps of a model with ``layers`` MoE layers need, if most layers run
    in one wave and load few experts in one thread."""
    return steps * (6 * layers + 16)


@dataclass(frozen=True, eq=False)
class Recording:
    """The events of some consecutive steps, sorted by their start, and those that contain others before these."""

    threads: tuple[str, ...]  # their names
    thread: np.ndarray  # int64 [n], indices into ``threads``
    # start, duration: int64 [n], nanoseconds; the first step starts at 0
    start: np.ndarray
    duration: np.ndarray
    # kind, a, b: int64 [n], as of ``Kind``
    kind: np.ndarray
    a: np.ndarray
    b: np.ndarray

    @classmethod
    def of(cls, timeline: Timeline, steps: int) -> Self:
        """Returns the last ``steps`` steps of which no event was overwritten; fewer if the rings hold fewer."""
        threads, thread, events, complete = timeline.last()
        start, duration, kind, _, _ = events.T
        whole = (kind == Kind.STEP) & (start >= complete)
        began, ends = np.sort(start[whole])[-steps:], (start + duration)[whole]
        first, last = (int(began[0]), int(ends.max())) if len(began) else (0, 0)
        kept = np.flatnonzero((start >= first) & (start < last))
        order = kept[np.lexsort((kind[kept], -duration[kept], start[kept]))]
        columns = dict(zip(COLUMNS, events[order].T, strict=True))
        return cls(tuple(threads), thread[order], **columns | {"start": columns["start"] - first})

    @property
    def end(self) -> np.ndarray:
        """int64 [n], when each event ended."""
        return self.start + self.duration
