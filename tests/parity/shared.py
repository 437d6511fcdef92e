"""What is computed once per session, by the worker of pytest-xdist that asks first; the others wait for its file."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "SPAC_TESTS_SHARED"  # environment variable, set for each session by ``tests/conftest.py``
PACKAGES = ("vllm", "torch", "transformers", "numpy")
PREFIXES = ("VLLM_", "OMP_", "MKL_", "ONEDNN_", "TORCH", "KMP_")  # of variables that can change what an engine says


def once(what: str, arguments: Any, compute: Callable[[], Any]) -> Any:
    """The value of ``compute``, which JSON can hold, for these ``arguments``, this environment and these versions.

    Folders among the arguments, such as models, count by their contents. An error is not kept.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    environment = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    key = json.dumps([by_content(arguments), environment, versions], sort_keys=True)
    folder = Path(os.environ[FOLDER])
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{what}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with open(kept.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            draft = kept.with_suffix(".draft")
            draft.write_text(json.dumps(compute()))
            draft.rename(kept)
        return json.loads(kept.read_text())


def by_content(value: Any) -> Any:
    """``value`` with each folder replaced by a digest of its files' names and bytes."""
    if isinstance(value, dict):
        return {str(name): by_content(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [by_content(each) for each in value]
    if isinstance(value, (str, Path)):
        return digest(Path(value)) if Path(value).is_absolute() and Path(value).is_dir() else str(value)
    return value


def digest(folder: Path) -> str:
    """Of the names and bytes of all files below ``folder``."""
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            found.update(f"{path.relative_to(folder)}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\0".encode())
    return found.hexdigest()
