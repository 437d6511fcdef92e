"""Pacing: transfers and computations that end when those of a slower machine would, never earlier.

What is paced does its work first and then sleeps until its deadline, so that the work is a part of its time. Deadlines
are absolute: while transfers are waiting, what a sleep overshoots delays none of those behind it.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

Clock = Callable[[], float]
_PR_SET_TIMERSLACK = 29
_thread = threading.local()


def sleep(seconds: float) -> None:
    """Sleeps, without the 50 microseconds by which Linux may prolong the sleep of a thread by default."""
    if not getattr(_thread, "prompt", False):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _thread.prompt = True
    time.sleep(seconds)


@dataclass
class Kept:
    """How well deadlines were kept.

    Attributes:
        waits: deadlines that were waited for; ``overshoot_seconds``: by how much the sleeps exceeded them, in total.
        missed: deadlines that had passed before there was anything to wait for: the machine is too slow for its pace;
            ``missed_seconds``: by how much, in total.
    """

    waits: int = 0
    overshoot_seconds: float = 0.0
    missed: int = 0
    missed_seconds: float = 0.0


class Pace:
    """Sleeps until deadlines and counts how well they are kept. Thread-safe.

    Args:
        kept: the counters.
        clock, sleep: in seconds.
    """

    def __init__(self, kept: Kept, clock: Clock = time.perf_counter, sleep: Callable[[float], object] = sleep) -> None:
        self._kept, self._clock, self._sleep = kept, clock, sleep
        self._lock = threading.Lock()

    def until(self, deadline: float) -> None:
        """Returns at ``deadline``, or at once if it has passed."""
        left = deadline - self._clock()
        if left > 0:
            self._sleep(left)
        late = self._clock() - deadline
        with self._lock:
            if left > 0:
                self._kept.waits += 1
                self._kept.overshoot_seconds += late
            else:
                self._kept.missed += 1
                self._kept.missed_seconds += late


class Link:
    """A channel of one rate over which transfers run one after another, in the order of ``book``. Thread-safe.

    Args:
        bytes_per_second: its rate.
        clock: in seconds.
    """

    def __init__(self, bytes_per_second: float, clock: Clock = time.perf_counter) -> None:
        self._rate, self._clock = bytes_per_second, clock
        self._free = 0.0
        self._lock = threading.Lock()

    def book(self, nbytes: int) -> float:
        """Returns when a transfer of ``nbytes`` ends that is requested now."""
        with self._lock:
            self._free = max(self._clock(), self._free) + nbytes / self._rate
            return self._free


@functools.cache
def host_memory(bytes_per_second: float) -> Link:
    """Returns the host memory of this process, which loads and CPU experts share."""
    return Link(bytes_per_second)


LOADS, COMPUTATIONS = Kept(), Kept()  # of this process


def counted() -> dict[str, float]:
    """Returns all counters of this process by name."""
    kinds = {"load": LOADS, "cpu": COMPUTATIONS}
    return {f"{kind}_{name}": value for kind, kept in kinds.items() for name, value in asdict(kept).items()}
