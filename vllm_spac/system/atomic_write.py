"""Atomic replacement of a file: a reader finds the old content or all of the new one, also after a kill.

The new content is written to a *partial* file in the same folder, ``NAME.PID.partial``, and then renamed. A process
that is killed meanwhile leaves its partial file behind; the process id shows whether it is still being written. In a
folder that others may write to, a link or a file that they put in the way is neither followed nor written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil

PARTIAL = r"\.\d{1,9}\.partial"  # regular expression: what is appended to a file's name
_MODE = 0o644  # nobody else may write: what a group may is not trusted where it is read


def partial_of(path: Path, pid: int | None = None) -> Path:
    """Returns the partial file of ``path`` that the process ``pid``, by default this one, writes."""
    return path.with_name(f"{path.name}.{os.getpid() if pid is None else pid}.partial")


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True, mode: int = _MODE, by_name: bool = False) -> Iterator[Path]:
    """Context manager that replaces ``path`` with the file that its block writes.

    Yields a path under which the block opens the new partial file, and no other, whatever happens to its name; the file
    is renamed to ``path`` at the end of the block. If the block raises, or the disk fails, ``path`` stays as it was and
    no partial file is left. Links are not followed: one that has the name ``path`` is itself replaced.

    Args:
        path: the file to replace; its folder exists.
        durable: sync the content before the rename, so that not even a power cut leaves a torn file.
        mode: rights of the new file, less those that the umask takes.
        by_name: yield the partial file's name, for a writer that makes a new file and renames it, as safetensors does.

    Raises:
        OSError: the file cannot be written or replaced, or its partial file was taken away or made by others.
    """
    partial = partial_of(path)
    descriptor = _created(partial, mode)
    try:
        yield partial if by_name else Path(f"/proc/{os.getpid()}/fd/{descriptor}")
        if by_name:
            descriptor = _remade(partial, descriptor)
        if durable:
            os.fsync(descriptor)
        if not _is(partial, descriptor):
            raise OSError(errno.ESTALE, "another process took its partial file away", str(partial))
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the original error is more useful
            if by_name or _is(partial, descriptor):
                partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def check_replaceable(path: Path) -> None:
    """Raises ``OSError`` if ``replacing(path)`` could not write; does not change ``path``."""
    partial = partial_of(path)
    os.close(_created(partial, _MODE))
    partial.unlink()


def _created(partial: Path, mode: int) -> int:
    """Creates a partial file and opens it; one that an ended process of this user and number left is removed first."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(partial, flags, mode)
    except FileExistsError:
        if _strange(partial.lstat()):
            raise FileExistsError(errno.EEXIST, "in the way, and not made here; remove it", str(partial)) from None
    partial.unlink()
    return os.open(partial, flags, mode)


def _remade(partial: Path, created: int) -> int:
    """Opens the file that a writer has put in the place of the one ``created``, and gives it the same rights."""
    descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _strange(os.fstat(descriptor)):
            raise OSError(errno.ESTALE, "another process took its partial file away", str(partial))
        os.fchmod(descriptor, stat.S_IMODE(os.fstat(created).st_mode))
    except BaseException:
        os.close(descriptor)
        raise
    os.close(created)
    return descriptor


def _strange(facts: os.stat_result) -> bool:
    """Whether a file is none that this user has made under one name."""
    return not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1 or facts.st_uid != os.geteuid()


def _is(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is the open file itself, and no link to it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
