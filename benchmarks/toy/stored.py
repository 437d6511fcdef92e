"""Unpacks the toy model's weights, and brings back the files that the tree no longer has, bit by bit, from the history.

    python benchmarks/toy/stored.py          # unpacks; `make setup` does
    python benchmarks/toy/stored.py local    # the model with local routing, its draft and its EAGLE-3 head

Weights are stored as ``model.safetensors.xz``: vLLM reads no compressed file, so they are unpacked beside it.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

MODELS = Path(__file__).resolve().parent / "models"
LOCAL = MODELS / "local"
HISTORY = "cc065867b1084e427f670580f67988792b754b43"  # the last commit with all files


class StoredError(RuntimeError):
    """A file is not in the history of this checkout."""


def unpack() -> list[Path]:
    """Unpacks what is missing or older than its packed file; returns the files written."""
    written = []
    for packed in sorted(MODELS.rglob("*.xz")):
        path = packed.with_suffix("")
        if path.exists() and path.stat().st_mtime >= packed.stat().st_mtime:
            continue
        partial = path.with_name(f"{path.name}.{os.getpid()}")  # others may be unpacking as well
        with lzma.open(packed) as source, open(partial, "wb") as target:
            shutil.copyfileobj(source, target)
        partial.replace(path)
        written.append(path)
    return written


def restore(path: Path) -> None:
    """Brings ``path`` back, which git ignores.

    Raises:
        StoredError: this is no checkout, or a shallow one.
    """
    command = ["git", "restore", f"--source={HISTORY}", "--worktree", "--", path.name]
    done = subprocess.run(command, cwd=path.parent, capture_output=True, text=True)
    if done.returncode:
        raise StoredError(f"{done.stderr.strip()}; a full clone has it: git fetch --unshallow")


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["local"]):
        sys.exit(f"usage: {Path(__file__).name} [local]")
    for path in unpack():
        print(f"unpacked {path.relative_to(MODELS)}")
    if sys.argv[1:]:
        try:
            restore(LOCAL)
        except StoredError as error:
            sys.exit(f"error: {error}")
        print(f"restored {LOCAL.relative_to(MODELS)}")
