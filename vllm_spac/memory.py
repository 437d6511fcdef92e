"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes() -> int:
    """Bytes that can be allocated without swapping: of the machine, and of the container it runs in."""
    available = psutil.virtual_memory().available
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    return available if limit is None or used is None else max(0, min(available, limit - used))


def gib(count: int | float) -> str:
    """Bytes for people: KiB, MiB or GiB."""
    for limit, unit in ((2**20, "KiB"), (2**30, "MiB")):
        if count < limit:
            return f"{count / (limit >> 10):.1f} {unit}"
    return f"{count / 2**30:.2f} GiB"


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:  # no such limit on this system
        return None
    return int(text) if text.isdigit() else None
