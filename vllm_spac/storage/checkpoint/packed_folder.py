"""Finds, checks and removes folders of packed experts. Nothing is deleted from a folder that holds other files.

The constants of their format are here too; no torch is imported.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from vllm_spac.errors import StoreError
from vllm_spac.system.files import PARTIAL, LockFile
from vllm_spac.system.untrusted import parse_json

FORMAT = "spac-expert-1"  # of a file's header; changes with the header's content
PAGE = 4096  # alignment that O_DIRECT requires on every common file system
HEADER = PAGE  # bytes before an expert's data
MARK = "damaged"  # a file in the folder: a read failed since all files were checked
MODEL = "model"  # a file in the folder: the name of the model whose experts these are, as it was served first


_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_LAYER = re.compile(r"layer-\d{3,}")
_EXPERT = re.compile(r"expert-(\d{4,})\.safetensors")
_LEFTOVER = re.compile(rf"expert-\d{{4,}}\.(safetensors{PARTIAL}|corrupt)")
_PROBE = re.compile(r"\.probe-\w+")
_BLOCK = 8 << 20
_MOST_NAME = 4096  # bytes of a model's name


@dataclass(frozen=True)
class Packed:
    """The experts of one checkpoint in one layout."""

    folder: Path  # where they are; its name is the fingerprint
    layers: tuple[str, ...]  # name of each layer's experts, in the order of the layers
    experts: tuple[Path, ...]
    leftovers: tuple[Path, ...]  # files set aside as damaged, or left half-written by a killed process
    bytes: int
    newest: float  # when the last one was written, in seconds since the epoch
    model: str = ""  # whose experts they are; empty: unknown, since no engine has used them since names are written


def scan(root: Path) -> Iterator[Packed]:
    """Yields every folder of packed experts directly in ``root``, by name."""
    if not root.is_dir():
        return
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if _FINGERPRINT.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    for name in names:
        yield inspect(root / name)


def inspect(folder: Path) -> Packed:
    """Returns the content of one folder; ignores anything that packing does not write."""
    experts, leftovers, layers, size, newest = [], [], [], 0, folder.lstat().st_mtime
    for layer in _entries(folder):
        if not (_LAYER.fullmatch(layer.name) and layer.is_dir(follow_symlinks=False)):
            continue
        mine = []
        for entry in _entries(Path(layer.path)):
            if not entry.is_file(follow_symlinks=False):
                continue
            if _EXPERT.fullmatch(entry.name):
                mine.append(Path(entry.path))
            elif _LEFTOVER.fullmatch(entry.name):
                leftovers.append(Path(entry.path))
            else:
                continue
            facts = entry.stat(follow_symlinks=False)
            size, newest = size + facts.st_size, max(newest, facts.st_mtime)
        experts += mine
        layers.append(str(_header(mine[0]).get("layer", layer.name)) if mine else layer.name)
    return Packed(folder, tuple(layers), tuple(experts), tuple(leftovers), size, newest, _model(folder))


def write_model(folder: Path, model: str) -> None:
    """Writes whose experts are in ``folder``, unless that is there already; a read-only folder stays unnamed."""
    with contextlib.suppress(OSError):  # ``vllm-spac packed`` then shows that the name is unknown
        descriptor = os.open(folder / MODEL, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(model.encode(errors="replace")[:_MOST_NAME])


def check_file(path: Path, fingerprint: str, step: Callable[[int], object] = lambda count: None) -> str | None:
    """Returns what is wrong with one file, or None; calls ``step`` with the number of bytes read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            step(HEADER)
            metadata = _metadata(file.read(HEADER))
            digest = xxhash.xxh3_128()
            while block := file.read(_BLOCK):
                digest.update(block)
                step(len(block))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if metadata.get("format") != FORMAT:
        return f"has no header of format {FORMAT}"
    if metadata.get("fingerprint") != fingerprint:
        return f"belongs to {metadata.get('fingerprint')}"
    name = _EXPERT.fullmatch(path.name)
    if name is None or metadata.get("expert") != str(int(name[1])):
        return f"holds expert {metadata.get('expert')}"
    if metadata.get("xxh3_128") != digest.hexdigest():
        return "is not what was packed (checksum)"
    return None


def remove(folder: Path) -> None:
    """Deletes a folder of packed experts.

    Raises:
        StoreError: it is in use, or it is not such a folder; nothing was deleted.
    """
    if not _FINGERPRINT.fullmatch(folder.name) or not stat.S_ISDIR(folder.lstat().st_mode):
        raise StoreError(f"{folder} is no folder of packed experts; nothing was deleted")
    with alone(folder) as lock_path:
        files, folders = everything(folder)
        for path in files:
            path.unlink()
        for path in (*folders, folder):
            path.rmdir()
        lock_path.unlink()


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[Path]:
    """Locks ``folder`` against servers and packing processes; yields the path of the lock file."""
    path = folder.with_name(f"{folder.name}.lock")
    with contextlib.closing(LockFile(path)) as lock:
        if not lock.take():
            raise StoreError(f"{folder} is in use by a server or a packing process; nothing was deleted")
        yield path


def everything(folder: Path) -> tuple[list[Path], list[Path]]:
    """Returns (files, sub-folders) of a folder with only what packing writes; raises ``StoreError`` otherwise."""
    files, folders = [], []
    for entry in _entries(folder):
        path = Path(entry.path)
        if (entry.name in (MARK, MODEL) or _PROBE.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False):
            files.append(path)
        elif _LAYER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            folders.append(path)
        else:
            raise StoreError(f"{path} was not written by packing; nothing was deleted")
    for entry in (entry for layer in folders for entry in _entries(layer)):
        known = _EXPERT.fullmatch(entry.name) or _LEFTOVER.fullmatch(entry.name)
        if not known or not entry.is_file(follow_symlinks=False):
            raise StoreError(f"{entry.path} was not written by packing; nothing was deleted")
        files.append(Path(entry.path))
    experts = [path for path in files if _EXPERT.fullmatch(path.name)]
    if files and not any(_header(path).get("fingerprint") == folder.name for path in experts):
        raise StoreError(f"no file in {folder} says that packing wrote it; nothing was deleted")
    return files, folders


def _model(folder: Path) -> str:
    try:
        with open(os.open(folder / MODEL, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            return file.read(_MOST_NAME).decode(errors="replace")
    except OSError:  # not named yet
        return ""


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _metadata(header: bytes) -> dict:
    """Returns the metadata of an expert's header; empty if it cannot be parsed."""
    try:
        metadata = parse_json(header[8:].decode())["__metadata__"]
    except (ValueError, KeyError, TypeError):  # the caller reports a header without a format
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _header(path: Path) -> dict:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return _metadata(file.read(HEADER))
