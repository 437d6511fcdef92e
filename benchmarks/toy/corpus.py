"""Texts of the toy model, from files of every Python installation: the standard library's source and documentation.

One file in twenty, chosen by the checksum of its path, is held out: the models were never trained on it.
"""

from __future__ import annotations

import sysconfig
import zlib
from pathlib import Path

_SKIP = {"site-packages", "encodings", "lib2to3", "idlelib", "turtledemo", "distutils"}


def files() -> list[Path]:
    """Returns the Python files of the running interpreter's standard library, in a stable order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _SKIP.intersection(path.relative_to(root).parts) and path.stat().st_size < 400_000
    )


def is_held_out(path: Path) -> bool:
    """Returns whether a file is for validation: one library file in twenty, never the library's tests."""
    relative = path.relative_to(sysconfig.get_paths()["stdlib"])
    return "test" not in relative.parts and zlib.crc32(str(relative).encode()) % 20 == 0


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")
