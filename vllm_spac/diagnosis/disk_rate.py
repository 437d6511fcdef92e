"""Reads from a disk for a short time to learn its rate."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

_BLOCK = 4 << 20
_SCRATCH = 128 << 20  # bytes of the file that is written where nothing is packed yet
_SECONDS = 2.0


def read_rate(files: Sequence[Path], folder: Path, seconds: float = _SECONDS) -> float:
    """Returns the bytes per second that one thread reads from a disk, without the page cache.

    Args:
        files: read one after the other for at most ``seconds``; if there are none, a file of 128 MiB in ``folder`` is
            written, read and removed.

    Raises:
        OSError: the disk fails, or is full.
    """
    if files:
        return _rate(files, seconds)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as scratch:
        block = os.urandom(_BLOCK)  # a disk that compresses must not be faster than with weights
        for _ in range(_SCRATCH // _BLOCK):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _rate([Path(scratch.name)], seconds)


def read_directly(path: Path) -> bool:
    """Returns whether the first page of ``path`` can be read with O_DIRECT."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:  # EINVAL, e.g. tmpfs
        return False
    try:
        return os.preadv(descriptor, [mmap.mmap(-1, mmap.PAGESIZE)], 0) > 0
    except OSError:  # EINVAL: larger blocks
        return False
    finally:
        os.close(descriptor)


def _rate(files: Sequence[Path], seconds: float) -> float:
    buffer, direct, done = mmap.mmap(-1, _BLOCK), read_directly(files[0]), 0
    begin = time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            if not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            offset = 0
            while (count := os.preadv(descriptor, [buffer], offset)) > 0:
                offset, done = offset + count, done + count
                if count % mmap.PAGESIZE or time.perf_counter() - begin > seconds:
                    break
        finally:
            os.close(descriptor)
        if time.perf_counter() - begin > seconds:
            break
    return done / max(time.perf_counter() - begin, 1e-9)
