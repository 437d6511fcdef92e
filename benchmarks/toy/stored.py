"""Unpacks models and traces, and brings back the files that the tree no longer has, bit by bit, from the history.

    python benchmarks/toy/stored.py             # unpacks; `make setup` does
    python benchmarks/toy/stored.py local       # the model with local routing, its draft and its EAGLE-3 head
    python benchmarks/toy/stored.py pack FILE   # writes FILE.xz, which is what the tree keeps, beside FILE

vLLM and the simulator read no compressed files, so ``NAME.xz`` is unpacked to ``NAME`` beside it. Of bfloat16 weights,
``NAME.halves.xz``, all lower bytes come before all upper ones: they compress by a few percent more.
"""

from __future__ import annotations

import lzma
import os
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1]
LOCAL = BENCHMARKS / "toy" / "models" / "local"
HISTORY = "cc065867b1084e427f670580f67988792b754b43"  # the last commit with all files
HALVES = ".halves"


class StoredError(RuntimeError):
    """A file is not in the history of this checkout."""


def unpack() -> list[Path]:
    """Unpacks what is missing or older than its packed file; returns the files written."""
    written = []
    for packed in sorted(BENCHMARKS.rglob("*.xz")):
        path = packed.with_name(packed.name.removesuffix(".xz").removesuffix(HALVES))
        if path.exists() and path.stat().st_mtime >= packed.stat().st_mtime:
            continue
        partial = path.with_name(f"{path.name}.{os.getpid()}")  # others may be unpacking as well
        partial.write_bytes(content(packed))
        partial.replace(path)
        written.append(path)
    return written


def content(packed: Path) -> bytes:
    """Returns the bytes of the file that ``packed`` is unpacked to."""
    data = lzma.decompress(packed.read_bytes())
    if not packed.name.endswith(f"{HALVES}.xz"):
        return data
    joined, lower = bytearray(len(data)), (len(data) + 1) // 2
    joined[::2], joined[1::2] = data[:lower], data[lower:]
    return bytes(joined)


def pack(path: Path) -> Path:
    """Writes and returns the packed file of ``path``; that of bfloat16 weights is ``model.safetensors.halves.xz``."""
    data, halves = path.read_bytes(), path.name == "model.safetensors"
    packed = path.with_name(f"{path.name}{HALVES * halves}.xz")
    packed.write_bytes(lzma.compress(data[::2] + data[1::2] if halves else data, preset=9 | lzma.PRESET_EXTREME))
    return packed


def restore(path: Path) -> None:
    """Brings ``path`` back, which git ignores; ``StoredError``: this is no checkout, or a shallow one."""
    command = ["git", "restore", f"--source={HISTORY}", "--worktree", "--", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    if done.returncode:
        raise StoredError(f"{done.stderr.strip()}; a full clone has it: git fetch --unshallow")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["pack", file]:
            print(f"packed {pack(Path(file))}")
        case [] | ["local"]:
            for path in unpack():
                print(f"unpacked {path.relative_to(BENCHMARKS)}")
            try:
                for name in sys.argv[1:]:
                    restore(LOCAL)
                    print(f"restored {name}")
            except StoredError as error:
                sys.exit(f"error: {error}")
        case ["--help"]:
            print(__doc__)
        case _:
            sys.exit(f"usage: {Path(__file__).name} [local | pack FILE]")
