"""Times a job: the median of its repeats."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

ROWS = (1, 2, 4, 8, 16, 32, 64)  # numbers of rows at which computing an expert is measured
_REPEATS = 5  # at least


def median(job: Callable[[], object], seconds: float) -> float:
    """Returns the median duration of ``job`` in seconds, over as many runs as fit in ``seconds`` and at least five."""

    def timed() -> float:
        start = time.perf_counter()
        job()
        return time.perf_counter() - start

    return median_of(timed, seconds)


def median_of(measurement: Callable[[], float], seconds: float) -> float:
    """Returns the median of what ``measurement`` returns, over as many runs as ``median`` makes."""
    found: list[float] = []
    begin = time.perf_counter()
    while len(found) < _REPEATS or time.perf_counter() - begin < seconds:
        found.append(measurement())
    return statistics.median(found)
