"""Atomic replacement of a file: whoever opens it finds the old content or all of the new, also after a kill.

The new content is written to a *partial* file in the same folder, ``NAME.PID.partial``, and then renamed. A process
that is killed meanwhile leaves its partial file behind; the process id tells whether somebody still writes it.
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
    """The partial file of ``path`` that the process ``pid``, by default this one, writes."""
    return path.with_name(f"{path.name}.{os.getpid() if pid is None else pid}.partial")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """A context whose block writes the new content of ``path`` into the file it is given; at its end that file takes
    the place of ``path``. If the block raises, or the disk fails, ``path`` stays as it was and nothing else is left.

    Args:
        path: what is replaced; its folder exists.
        durable: the content reaches the disk before the name does, so that not even a power cut leaves a torn file.

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
        with contextlib.suppress(OSError):  # the error that brought us here says more
            partial.unlink(missing_ok=True)
        raise


def check_replaceable(path: Path) -> None:
    """``OSError`` if ``replacing(path)`` could not write; ``path`` stays as it is."""
    partial = partial_of(path)
    partial.touch()
    partial.unlink()


def leftovers(path: Path) -> list[Path]:
    """Partial files of ``path`` whose processes have ended, by name."""
    found = []
    for name in sorted(os.listdir(path.parent)):
        match = re.fullmatch(re.escape(path.name) + r"\.(\d{1,9})\.partial", name)
        if match and not psutil.pid_exists(int(match[1])):
            found.append(path.with_name(name))
    return found


def remove_leftovers(path: Path) -> None:
    """Delete the partial files of ``path`` whose processes have ended."""
    for partial in leftovers(path):
        partial.unlink(missing_ok=True)
