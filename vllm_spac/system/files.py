"""Files that others may write beside us: owners, rights, locks, and writing all or nothing.

**Owners.** Files and folders that another user has made or may write are refused where their content decides what is
computed. Checksums in such files find damage, not forgery: whoever writes a file writes its checksum too. So trust
follows from who may write it: this user, root, and nobody else. The folder that has the file is looked at as well,
since who may write to it can put another file in its place (unless it is sticky, as ``/tmp``). Folders further up are
not: what is put in the place of a whole folder belongs to whoever put it there, and is refused for that at the next
start. Folders that we make are this user's alone, whatever the umask is.

**Writing.** A reader finds the old content or all of the new one, also after a kill. The new content is written to a
*partial* file in the same folder, ``NAME.PID.partial``, and then renamed. A process that is killed meanwhile leaves its
partial file behind; the process id shows whether it is still being written. In a folder that others may write to, a
link or a file that they put in the way is neither followed nor written.

**Locks.** A lock is a file that its user alone may open, and so hold, and which says who holds it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import mmap
import os
import pwd
import re
import shlex
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import psutil

from vllm_spac.errors import ConfigError, printable

FILE, FOLDER = 0o600, 0o700


def prepare_folder(path: Path) -> None:
    """Creates a folder and those above it that are missing, each ``FOLDER``; leaves one that exists as it is.

    Raises:
        OSError: it cannot be created, or something else has its name.
    """
    if path.is_dir():
        return
    if not path.parent.is_dir():
        prepare_folder(path.parent)
    try:
        os.mkdir(path, FOLDER)
    except FileExistsError:  # another process was faster
        if not path.is_dir():
            raise


_ACL = "system.posix_acl_access"


def refusal(path: Path) -> str | None:
    """Returns why what is at ``path`` is not used, and the command that mends that; None if it may be used.

    Args:
        path: a file or a folder, without what is in it; need not exist.
    """
    try:
        if path.exists() and (found := problem(path, path.stat())):
            return found
        folders = dict.fromkeys([path.absolute().parent, path.resolve().parent])
        found_there = (problem(folder, folder.stat(), around=True) for folder in folders if folder.exists())
        return next(filter(None, found_there), None)
    except OSError as error:
        return f"{path} cannot be looked at: {error.strerror}"


def problem(path: Path, facts: os.stat_result, *, around: bool = False) -> str | None:
    """As ``refusal`` of ``path`` alone.

    Args:
        facts: what ``os.stat`` says of it.
        around: it is a folder, of which only those files count that other users cannot replace.
    """
    me, owner = os.geteuid(), facts.st_uid
    deep = "-R " if stat.S_ISDIR(facts.st_mode) and not around else ""
    name, as_root = shlex.quote(str(path)), "" if me == 0 else " as root"
    if owner not in (0, me):
        mend = f"`chown {deep}{_user(me)} {name}`{as_root}"
        return (
            f"{path} belongs to {_shown(owner)}, not to {_shown(me)} or root; if you trust it, run {mend} or use a copy"
        )
    if around and facts.st_mode & stat.S_ISVTX:
        return None
    who = []
    if facts.st_mode & stat.S_IWGRP and not _has_one_member(path, facts):
        who.append(f"the group {_group(facts.st_gid)}")
    if facts.st_mode & stat.S_IWOTH:
        who.append("every user")
    if not who:
        return None
    mend = f"`chmod {deep}go-w {name}`{as_root if owner != me else ''}"
    return f"{path} of {_shown(owner)} may be written by {' and '.join(who)}; if you trust it, run {mend}"


def _has_one_member(path: Path, facts: os.stat_result) -> bool:
    """Whether the group is the owner's own: many systems give each user one, and make files group-writable.

    With access control lists the group's bits are those of every user that a list names.
    """
    try:
        owner, group = pwd.getpwuid(facts.st_uid).pw_name, grp.getgrgid(facts.st_gid)
        return group.gr_name == owner and set(group.gr_mem) <= {owner} and _ACL not in os.listxattr(path)
    except (KeyError, OSError):  # not known here, so it may have any number of members
        return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _shown(uid: int) -> str:
    return f"{_user(uid)} (uid {uid})"


def _group(gid: int) -> str:
    try:
        return f"{grp.getgrgid(gid).gr_name} (gid {gid})"
    except KeyError:
        return f"of gid {gid}"


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


def write_text(path: Path, text: str, *, durable: bool = True, mode: int = _MODE) -> None:
    """Replaces ``path`` with ``text`` in UTF-8; arguments and errors as of ``replacing``."""
    with replacing(path, durable=durable, mode=mode) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(what: object, remedy: str = "name another file") -> Iterator[None]:
    """Context in which a file or folder ``what``, which a user named, is written; ``ConfigError`` if it cannot be."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{what} cannot be written: {error.strerror or error}; {remedy}") from error


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


def reads_directly(path: Path) -> bool:
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


def probe(folder: Path) -> tuple[str, bool | None]:
    """Writes a page to ``folder``, which is made if it is missing, and removes it at once.

    Returns:
        Why that is not possible, empty if it is; and whether files there can be read with O_DIRECT, None if not known.
    """
    try:
        prepare_folder(folder)
        with tempfile.NamedTemporaryFile(prefix=".probe-", dir=folder) as page:
            page.write(bytes(mmap.PAGESIZE))  # not empty: an empty file fits on a full disk
            page.flush()
            return "", reads_directly(Path(page.name))
    except OSError as error:
        return error.strerror or str(error), None


def open_log(path: Path) -> BinaryIO:
    """Opens a log to append to, for this user alone; created if there is none. Links are not followed.

    Raises:
        OSError: it cannot be opened, or is no regular file of one name that this user has made.
    """
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
    try:
        if _strange(os.fstat(file)):
            raise OSError(errno.EINVAL, "it is not a log but was put there; remove it", str(path))
        os.fchmod(file, FILE)
    except BaseException:
        os.close(file)
        raise
    return open(file, "ab")


_MOST = 300  # bytes of what a holder writes
_POLL, _QUIET = 0.05, 1.0  # seconds between two attempts to take a lock, and until it is said that there is a wait


class LockFile:
    """A lock file, created if there is none. Links are not followed, and what another user put there is not written.

    Args:
        read_only: open one that exists in a folder that cannot be written to.

    Raises:
        OSError: it cannot be opened, or is no regular file of one name.
    """

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
        self._path, self._writes, self._alone = path, not read_only, False
        self._file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, FILE)
        facts = os.fstat(self._file)
        if not stat.S_ISREG(facts.st_mode) or facts.st_nlink > 1:
            os.close(self._file)
            raise OSError(errno.EINVAL, "it is not a lock file but was put there; remove it", str(path))

    def take(self, *, wait: float = 0.0, announce: Callable[[str], object] | None = None) -> bool:
        """Takes the lock alone, and writes who has it; False, and without any lock, if others have it.

        Args:
            wait: seconds until it is given up.
            announce: called once if that takes a second or more, with ``holder_text``.
        """
        began = time.monotonic()
        while not self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB):
            waited = time.monotonic() - began
            if waited >= wait:
                return False
            if announce is not None and waited >= _QUIET:
                announce(self.holder_text())
                announce = None
            time.sleep(_POLL)
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

    def holder_text(self) -> str:
        """Returns a few words for who has it alone."""
        known = self.holder()
        where = shlex.quote(str(self._path))
        return f"process {known[0]} on {known[1]}" if known else f"another process (`fuser {where}` names it)"

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
