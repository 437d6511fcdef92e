"""Measures and releases host memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:  # the command line starts without torch
    from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")
_RELEASE = Path("/proc/sys/kernel/osrelease")
LOCK_REMEDY = "ulimit -l unlimited; in a container --ulimit memlock=-1"
WSL_REMEDY = "raise memory= in %UserProfile%\\.wslconfig, then wsl --shutdown"
SYSTEM_RESERVE = 6 << 30  # bytes left to the system and to vLLM's processes, which take 4 to 6 GiB
_OWN_GROUPS = Path("/proc/self/cgroup")
_MADV_PAGEOUT = 21


class _Names(NamedTuple):
    """The files of a memory group, and the lines of its statistics."""

    limit: str
    used: str
    reclaimable: str


_V2 = _Names("memory.max", "memory.current", "inactive_file")
_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_host_bytes() -> int:
    """Returns the bytes that can be allocated without swapping.

    The machine's, within the limits of each control group of this process, of both versions: its own group may have no
    limit and be inside of one that has (a job of Slurm, a scope of systemd).
    """
    rooms = (_room(group, _V2 if second else _V1) for group, second in control_groups("memory"))
    return max(0, min([psutil.virtual_memory().available, *(room for room in rooms if room is not None)]))


def host_limit() -> int | None:
    """Returns the bytes of the tightest control group around this process; None: none has less than the machine."""
    limits = (_read(group / (_V2 if second else _V1).limit) for group, second in control_groups("memory"))
    total = psutil.virtual_memory().total
    return min((limit for limit in limits if limit is not None and limit < total), default=None)


def is_wsl() -> bool:
    """Whether this is Linux under Windows, whose driver lets about half of the memory be pinned."""
    try:
        return "microsoft" in _RELEASE.read_text().lower()
    except OSError:  # no such file on this system
        return False


def pin_remedy() -> str:
    """What helps where memory cannot be pinned."""
    if is_wsl():
        return f"Windows lets about half of WSL's memory be pinned: {WSL_REMEDY}"
    return f"raise the limit of locked memory ({LOCK_REMEDY})"


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yields the folders of the process's control groups that limit ``controller``, each from its own up to the root.

    The second value is whether its files are those of version 2. Where a container shows its own group as the root, the
    path that the process is said to be in does not exist there, and the root alone counts.
    """
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:  # no control groups on this system
        lines = []
    yield _CGROUP, True
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            if folder == root:
                break
            yield folder, not controllers
        if controllers:
            yield root, False


def _room(group: Path, names: _Names) -> int | None:
    """Returns what a group may take, counting page cache that is reclaimed under pressure as free; None: no limit."""
    limit, used = _read(group / names.limit), _read(group / names.used)
    if limit is None or used is None:
        return None
    return limit - used + _reclaimable(group / "memory.stat", names.reclaimable)


def _reclaimable(statistics: Path, name: str) -> int:
    try:
        lines = statistics.read_text().splitlines()
    except OSError:  # no such file on this system
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


def gib(count: int | float) -> str:
    """Formats a number of bytes as KiB, MiB or GiB."""
    for limit, unit in ((2**20, "KiB"), (2**30, "MiB")):
        if count < limit:
            return f"{count / (limit >> 10):.1f} {unit}"
    return f"{count / 2**30:.2f} GiB"


def release_file_pages(suffix: str = ".safetensors") -> None:
    """Releases pages of mapped checkpoint files that were read; they count towards this process's memory.

    Clean pages are dropped (they can be read again), dirty ones stay. On a kernel without ``MADV_PAGEOUT`` (before 5.4)
    the pages are reclaimed only when memory is short.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].endswith(suffix):
            start, stop = (int(part, 16) for part in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_PAGEOUT)


def release_freed_memory() -> None:
    """Returns freed heap memory to the system; allocators would keep that of staged and converted weights.

    vLLM recommends tcmalloc on a CPU, by ``LD_PRELOAD``: memory is then not glibc's to return. Does nothing with an
    allocator that has neither function.
    """
    libc = ctypes.CDLL(None)
    if (release := getattr(libc, "MallocExtension_ReleaseFreeMemory", None)) is not None:  # tcmalloc
        release()
    if (trim := getattr(libc, "malloc_trim", None)) is not None:  # glibc
        trim(0)


def release_zeros(tensor: Tensor) -> None:
    """Returns the pages of a tensor to the system; it has zeros, and takes memory again where it is written to.

    Args:
        tensor: zeros, contiguous, in private memory of this process on a CPU. Parts of pages at its ends stay.
    """
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < stop:  # fails where pages are locked, and then they stay
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)


def own_memory() -> int:
    """Returns the bytes of memory that this process takes, of pages shared with others its part."""
    return psutil.Process().memory_full_info().pss


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such limit on this system
        return None
    return int(text) if text.isdigit() else None
