"""Reads untrusted files and paths: everything is validated before memory is allocated for it."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vllm_spac.errors import ConfigError

_MOST_TEXT = 16 << 20  # bytes of a JSON file
_MOST_HEADER = 100_000_000  # the limit that the safetensors library sets itself
_MOST_AXES = 16
_LONGEST_PATH, _LONGEST_NAME = 4095, 255  # bytes, of Linux


def path_of(value: Any) -> Path:
    """Returns a path with ``~`` expanded; raises ``ValueError`` for one that no file system can have."""
    if not isinstance(value, str | Path):
        raise ValueError("use a path")
    if value == "":
        raise ValueError("the path is empty; leave the knob out, or name a path")
    if "\0" in str(value):
        raise ValueError("a path cannot hold a NUL character")
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:
        problem = "this machine does not know whose home folder that is; write the path out, or set HOME"
        raise ValueError(problem) from error
    try:
        names = [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError as error:
        raise ValueError("a path cannot hold lone surrogates") from error
    if len(os.fsencode(path)) > _LONGEST_PATH or max(map(len, names), default=0) > _LONGEST_NAME:
        raise ValueError(f"the path is too long: at most {_LONGEST_PATH} bytes, {_LONGEST_NAME} in each name")
    return path


def path_named(value: Any, option: str) -> Path:
    """``path_of``; ``ConfigError`` that names the option of a command."""
    try:
        return path_of(value)
    except ValueError as error:
        raise ConfigError(f"{option} {value}: {error}") from error


def open_file(path: str | Path) -> BinaryIO:
    """Opens a file for reading; raises ``OSError`` also for a pipe, a device, a folder or an impossible name."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer does not block then
    except ValueError as error:
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_text(path: str | Path, most: int = _MOST_TEXT) -> str:
    """Returns the UTF-8 text of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8, or has more than ``most`` bytes.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"it has {size} bytes, more than {most}")
        return file.read(size).decode()  # without what is appended meanwhile


def parse_json(text: str, *, strict: bool = True) -> Any:
    """Parses JSON; raises ``ValueError`` also for nesting that is too deep.

    Args:
        strict: refuse NaN and infinities too, which are not JSON although Python writes them.
    """
    try:
        return json.loads(text, parse_constant=_refuse if strict else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_header(path: str | Path) -> tuple[dict[str, str], dict[str, dict]]:
    """Returns the header of a safetensors file: its metadata, and per tensor ``dtype``, ``shape`` and ``data_offsets``.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file, or its header does not fit its size.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = parse_json(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata is no mapping of texts")
    for name, entry in header.items():
        if not _is_entry(entry, size - 8 - length):
            raise ValueError(f"its header says of {name!r} what a file of {size} bytes cannot hold")
    return metadata, header


def _is_entry(entry: Any, nbytes: int) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(shape, list) or not isinstance(offsets, list) or len(offsets) != 2 or len(shape) > _MOST_AXES:
        return False
    if not all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, *offsets)):
        return False
    return offsets[0] <= offsets[1] <= nbytes and math.prod(shape) <= 8 * (offsets[1] - offsets[0])  # 1 bit at least


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
