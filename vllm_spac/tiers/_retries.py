"""Reads of files that are tried again when they fail: disks, networks and transfers fail for a moment."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply
PAUSES = (0.02, 0.1, 0.5)  # seconds before the second, third and fourth try
_LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}  # no other try helps


class Failure(NamedTuple):
    """Why a file could not be used: ``error`` of reading it, or None if it was read and is not what was packed."""

    what: str
    error: OSError | None = None

    @property
    def lasts(self) -> bool:
        """Whether the next try would fail alike."""
        return self.error is not None and self.error.errno in _LASTING


class Retries:
    """Tries reads again; threads may call it at once.

    Attributes:
        count: tries after a first one that failed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[Path] = set()
        self._lock = threading.Lock()  # protects both

    def run(self, path: Path, attempt: Callable[[], Failure | None]) -> Failure | None:
        """Calls ``attempt`` until it succeeds, at most once more than there are ``PAUSES``; returns the last failure.

        Args:
            path: the file; the first retry of each one is logged.
            attempt: reads it once; returns None if that succeeded.
        """
        failure = attempt()
        for pause in PAUSES:
            if failure is None or failure.lasts:
                break
            self.begin(path, failure.what)
            time.sleep(pause)
            failure = attempt()
        return failure

    def begin(self, path: Path, what: str) -> None:
        """Counts another try to read ``path``, after ``what`` happened."""
        with self._lock:
            self.count += 1
            first = path not in self._logged
            self._logged.add(path)
        if first:
            logger.warning(
                "spac: %s, which is tried again up to %d times; look at the disk if it happens often: read_retries of "
                "the statistics counts, and this file is not logged again (%s)",
                what,
                len(PAUSES),
                path.name,
            )
