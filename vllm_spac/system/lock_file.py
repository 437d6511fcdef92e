"""A lock between processes: a file that its user alone may open, and so hold, and which says who holds it alone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

import psutil

from vllm_spac.system.printable import printable
from vllm_spac.system.private_files import FILE

_MOST = 300  # bytes of what a holder writes


class LockFile:
    """A lock file, created if there is none. Links are not followed, and what another user put there is not written.

    Args:
        path: of the file.
        read_only: open one that exists in a folder that cannot be written to.

    Raises:
        OSError: it cannot be opened, or is no regular file of one name.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._writes, self._alone = not read_only, False
        self._file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
        facts = os.fstat(self._file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(self._file)
            raise OSError(errno.EINVAL, "it is not a lock file but was put there; remove it", str(path))

    def take(self) -> bool:
        """Takes the lock alone, and writes who has it; False, and without any lock, if others have it."""
        if not self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
        self._alone = True
        self._write(f"{os.getpid()} {socket.gethostname()}\n")
        return True

    def share(self, *, wait: bool = True) -> bool:
        """Takes the lock with others, also instead of alone; False if one has it alone and this is not to ``wait``."""
        self._yield()
        return self._flock(fcntl.LOCK_SH | (0 if wait else fcntl.LOCK_NB))

    def holder(self) -> tuple[int, str] | None:
        """Returns process id and host of who has it alone, if that can be told."""
        pid, _, host = os.pread(self._file, _MOST, 0).decode(errors="replace").strip().partition(" ")
        if not pid.isdecimal() or len(pid) > 9 or not host:
            return None
        ended = host == socket.gethostname() and not psutil.pid_exists(int(pid))
        return None if ended else (int(pid), printable(host))

    def close(self) -> None:
        """Releases the lock."""
        self._yield()
        os.close(self._file)

    def _flock(self, how: int) -> bool:
        try:
            fcntl.flock(self._file, how)
        except BlockingIOError:
            return False
        return True

    def _yield(self) -> None:
        if self._alone:
            self._write("")
        self._alone = False

    def _write(self, text: str) -> None:
        if self._writes:
            with contextlib.suppress(OSError):  # of a full disk: then a wait cannot tell whom it waits for
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, text.encode(), 0)
