"""Reads of whole files submitted together to io_uring, by the binding ``liburing`` (``pip install liburing``)."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from vllm_spac.errors import ConfigError

ENTRIES = 32  # reads in flight
_KNOB, _REMEDY = "spac: io_submit=io_uring (--spac-io-submit)", "use --spac-io-submit threads"


def available() -> bool:
    """Whether a ``Ring`` can be made: the binding is installed, and the kernel agrees."""
    try:
        Ring().close()
    except ConfigError:
        return False
    return True


class Ring:
    """A submission and a completion queue, for one thread.

    Python's lock is free while a read is waited for: completions are announced by an eventfd, because the binding holds
    the lock in its own calls.

    Raises:
        ConfigError: the binding is not installed, or the kernel refuses.
    """

    def __init__(self) -> None:
        try:
            self._uring: Any = importlib.import_module("liburing")
        except ImportError as error:
            raise ConfigError(
                f"{_KNOB} needs the package liburing ({error}): pip install 'vllm-spac[io-uring]', or {_REMEDY}"
            ) from error
        self._ring, self._entry = self._uring.Ring(), self._uring.Cqe()
        try:
            self._uring.io_uring_queue_init(ENTRIES, self._ring)
        except OSError as error:
            raise ConfigError(
                f"{_KNOB}: the kernel refuses ({error.strerror}); containers often forbid it, and so may the sysctl "
                f"kernel.io_uring_disabled: allow it, or {_REMEDY}"
            ) from error
        self._event = os.eventfd(0)
        self._uring.io_uring_register_eventfd(self._ring, self._event)
        self._in_flight: dict[int, Any] = {}  # number -> the kernel's list of where a read goes

    def submit(self, reads: Sequence[tuple[int, int, Sequence[np.ndarray]]]) -> None:
        """Begins to read files from their beginning, by one system call.

        Args:
            reads: at most ``ENTRIES`` of (number, file descriptor, consecutive parts of memory). Both belong to the
                kernel until ``completed`` has named the number.
        """
        assert len(reads) + len(self._in_flight) <= ENTRIES
        for number, file, parts in reads:
            entry, vector = self._uring.io_uring_get_sqe(self._ring), self._uring.Iovec([part.data for part in parts])
            self._uring.io_uring_prep_readv(entry, file, vector, 0)
            entry.user_data = number
            self._in_flight[number] = vector
        left = len(reads)
        while left:
            try:
                left -= self._uring.io_uring_submit(self._ring)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EBUSY, errno.EINTR):  # this ring is lost
                    for number, _, _ in reads[len(reads) - left :]:
                        del self._in_flight[number]
                    raise
                time.sleep(0.001)  # the kernel lacks memory for the moment

    def completed(self) -> Iterator[tuple[int, int]]:
        """Waits until a read has ended and yields (number, bytes read) of all that have; -1 for one that failed.

        It may yield nothing: an event may be that of a read which was named before.
        """
        if not self._uring.io_uring_cq_ready(self._ring):
            os.eventfd_read(self._event)
        for _ in range(self._uring.io_uring_cq_ready(self._ring)):
            self._uring.io_uring_peek_cqe(self._ring, self._entry)
            done = self._entry[0]
            number = done.user_data
            try:
                size = done.res
            except OSError:  # so the binding tells of a negative result
                size = -1
            self._in_flight.pop(number, None)  # it is named again if this thread is interrupted here
            self._uring.io_uring_cq_advance(self._ring, 1)
            yield number, size

    def drain(self) -> None:
        """Waits until no read is in flight, even if interrupted: the memory of each is the caller's again."""
        while self._in_flight:
            with contextlib.suppress(KeyboardInterrupt):  # the first one is already being raised
                for _ in self.completed():
                    pass

    def close(self) -> None:
        """Waits for reads in flight and releases the queues."""
        self.drain()
        self._uring.io_uring_queue_exit(self._ring)
        os.close(self._event)
