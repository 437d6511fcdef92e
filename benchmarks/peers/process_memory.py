"""Memory of processes: what they take, and a limit that counts the pages of mapped files, by a control group."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from vllm_spac.tools.tuning.measurer import MeasuringError

_GROUPS = Path("/sys/fs/cgroup")


class LimitError(MeasuringError):
    """This machine does not let this user limit the memory of a process."""


class MemoryLimit:
    """A control group whose processes may take at most ``limit`` bytes, the page cache of their files included.

    Raises:
        LimitError: there is no memory controller, or this user may not use it.
    """

    def __init__(self, name: str, limit: int) -> None:
        self.limit = limit
        old = _GROUPS / "memory"
        self._old = old.is_dir()
        self.folder = (old if self._old else _GROUPS) / f"spac-{name}-{os.getpid()}"
        try:
            self.folder.mkdir()
            (self.folder / ("memory.limit_in_bytes" if self._old else "memory.max")).write_text(str(limit))
            if not self._old:
                (self.folder / "memory.swap.max").write_text("0")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            raise LimitError(
                f"memory cannot be limited here: {error}; run as root where control groups have a memory controller"
            ) from error

    def join(self) -> None:
        """Puts the calling process into the group; for ``preexec_fn``."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self) -> None:
        """Removes the group, whose processes must have ended."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def forget_file(path: Path) -> None:
    """Drops a file from the page cache, so that whoever reads it next pays for it."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def tree(process: int) -> list[int]:
    """Returns a process and its descendants."""
    found = [process]
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in children.read_text().split():
                found += tree(int(child))
    return found


def taken(process: int) -> dict[str, int]:
    """Returns the bytes of memory of a process and its descendants, shared pages in parts: total, anonymous, files."""
    total = {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0}
    for each in tree(process):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in total:
                    total[name] += int(rest.split()[0]) << 10
    return {"total": total["Pss"], "anonymous": total["Pss_Anon"], "files": total["Pss_File"]}


def used(process: int) -> dict[str, float]:
    """Returns CPU seconds and bytes read from disks so far, of a process and its descendants."""
    ticks, read = 0, 0
    for each in tree(process):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            lines = Path(f"/proc/{each}/io").read_text().splitlines()
            read += next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
    return {"cpu_seconds": ticks / os.sysconf("SC_CLK_TCK"), "read_bytes": read}


@contextlib.contextmanager
def read_ahead(path: Path, kibibytes: int | None) -> Iterator[int | None]:
    """Sets the read-ahead of the disk of ``path`` inside the block; yields what is in force, None if it is not known.

    Raises:
        LimitError: it cannot be set.
    """
    device = os.stat(path).st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    queue = next((each / "queue/read_ahead_kb" for each in (block, block.parent) if (each / "queue").is_dir()), None)
    if queue is None:
        if kibibytes is not None:
            raise LimitError(f"the disk of {path} has no read-ahead to set")
        yield None
        return
    before = int(queue.read_text())
    try:
        if kibibytes is not None and kibibytes != before:
            queue.write_text(str(kibibytes))
        yield int(queue.read_text())
    except PermissionError as error:
        raise LimitError(f"{queue} cannot be set: run as root, or leave --read-ahead-kib out") from error
    finally:
        if int(queue.read_text()) != before:
            queue.write_text(str(before))
