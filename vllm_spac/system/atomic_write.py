"""Atomic replacement of a file: a reader finds the old content or all of the new one, also after a kill.

The new content is written to a *partial* file in the same folder, ``NAME.PID.partial``, and then renamed. A process
that is killed meanwhile leaves its partial file behind; the process id shows whether it is still being written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

PARTIAL = r"\.\d{1,9}\.partial"  # regular expression: what is appended to a file's name


def partial_of(path: Path, pid: int | None = None) -> Path:
    """Returns the partial file of ``path`` that the process ``pid``, by default this one, writes."""
    return path.with_name(f"{path.name}.{os.getpid() if pid is None else pid}.partial")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Context manager that replaces ``path`` with the file that its block writes.

    Yields the partial file to write, which is renamed to ``path`` at the end of the block. If the block raises, or the
    disk fails, ``path`` stays as it was and no partial file is left.

    Args:
        path: the file to replace; its folder exists.
        durable: sync the content before the rename, so that not even a power cut leaves a torn file.

    Raises:
        OSError: the file cannot be written or replaced.
    """
    partial = partial_of(path)
    try:
        yield partial
        if durable:
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the original error is more useful
            partial.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """Raises ``OSError`` if ``replacing(path)`` could not write; does not change ``path``."""
    partial = partial_of(path)
    partial.touch()
    partial.unlink()


def leftovers(path: Path) -> list[Path]:
    """Returns the partial files of ``path`` whose processes have ended, by name."""
    found = []
    for name in sorted(os.listdir(path.parent)):
        match = re.fullmatch(re.escape(path.name) + r"\.(\d{1,9})\.partial", name)
        if match and not psutil.pid_exists(int(match[1])):
            found.append(path.with_name(name))
    return found


def remove_leftovers(path: Path) -> None:
    """Deletes the partial files of ``path`` whose processes have ended."""
    for partial in leftovers(path):
        partial.unlink(missing_ok=True)
