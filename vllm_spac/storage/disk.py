"""Store on disk: one file per expert, in the layout of the kernel, read without the page cache.

The header of a file (``packed_file``) contains the fingerprint, the layer, the expert and the checksum of the data. A
read returns exactly what was packed, or is tried again, or fails. A file that fails the check each time is moved aside
and the folder is marked, so that the next start checks all files and repacks the damaged ones from the checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, Slot
from vllm_spac.storage.checkpoint.packed_file import FileBuffer, FileFormat
from vllm_spac.storage.checkpoint.packed_folder import MARK, PAGE
from vllm_spac.system import files
from vllm_spac.system.files import FILE, prepare_folder, replacing
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import reset_affinity

logger = logging.getLogger("vllm.spac")  # below "vllm", so that vLLM's handlers and levels apply
PAUSES = (0.02, 0.1, 0.5)  # seconds before the second, third and fourth try
_LASTING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP}  # no other try helps


class Failure(NamedTuple):
    """Why a file could not be used: ``error`` of reading it, or None if it was read and is not what was packed."""

    what: str
    error: OSError | None = None

    @property
    def lasts(self) -> bool:
        """Whether the next try would fail alike."""
        return self.error is not None and self.error.errno in _LASTING


class Retries:
    """Tries reads again; threads may call it at once.

    Attributes:
        count: tries after a first one that failed.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logged: set[Path] = set()
        self._lock = threading.Lock()  # protects both

    def run(self, path: Path, attempt: Callable[[], Failure | None]) -> Failure | None:
        """Calls ``attempt`` until it succeeds, at most once more than there are ``PAUSES``; returns the last failure.

        Args:
            path: the file; the first retry of each one is logged.
            attempt: reads it once; returns None if that succeeded.
        """
        failure = attempt()
        for pause in PAUSES:
            if failure is None or failure.lasts:
                break
            self._begin(path, failure.what)
            time.sleep(pause)
            failure = attempt()
        return failure

    def _begin(self, path: Path, what: str) -> None:
        """Counts another try to read ``path``, after ``what`` happened."""
        with self._lock:
            self.count += 1
            first = path not in self._logged
            self._logged.add(path)
        if first:
            logger.warning(
                "spac: %s, which is tried again up to %d times; look at the disk if it happens often: read_retries of "
                "the statistics counts, and this file is not logged again (%s)",
                what,
                len(PAUSES),
                path.name,
            )


_RESERVE = 256 << 20  # left free on the disk


class DiskStore(ExpertStore):
    """Experts in files ``folder/<fingerprint>/layer-003/expert-0042.safetensors``."""

    persistent: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        assert folder is not None, "a store on disk needs a folder"
        super().__init__(shape, fingerprint, folder)
        self.folder = folder / fingerprint
        self._format = FileFormat(shape, fingerprint)
        self._paths: dict[int, Path] = {}
        self._local = threading.local()
        self._refuse_if(files.refusal(self.folder))
        self._retries = Retries()
        self._held = {key for key in range(shape.total) if self._intact(key)}
        self._read_only, direct = files.probe(self.folder)
        if self._read_only and len(self._held) < shape.total:
            raise StoreError(
                f"spac: cannot write to {self.folder}: {self._read_only}, and {shape.total - len(self._held)} of "
                f"{shape.total} experts are not packed there; name a writable folder with --spac-disk-dir DIR"
            )
        self.direct = files.reads_directly(self.path(0)) if direct is None else direct  # reported in the start-up line

    def path(self, key: int) -> Path:
        """Returns the path of an expert's file."""
        if key not in self._paths:  # a new Path interns its parts, and Python's table of these is rebuilt ever again
            layer, expert = self.shape.split(key)
            self._paths[key] = self.folder / f"layer-{layer:03d}" / f"expert-{expert:04d}.safetensors"
        return self._paths[key]

    def holds(self, key: int) -> bool:
        return key in self._held

    def reserve(self, experts: int) -> None:
        check_room(self.folder, experts, experts * self._format.bytes)

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        header, data = self._format.encode(key, tensors)
        path = self.path(key)
        try:
            prepare_folder(path.parent)
            # Not synced to disk: the checksum in the header detects files that a power failure left incomplete.
            with replacing(path, durable=False, mode=FILE) as partial, open(partial, "wb") as file:
                file.write(header)
                file.write(data)
        except OSError as error:
            raise StoreError(
                f"spac: cannot write {path}: {error.strerror}; check --spac-disk-dir and the room on that disk"
            ) from error
        self._held.add(key)

    def remove_partial(self) -> None:
        for pattern in ("layer-*/expert-*.partial", ".probe-*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        buffer, slot = self._buffer(), Slot.of(into)
        if (tensors := self._readable(slot)) is not None:  # straight to where they belong
            self._check(key, [buffer.header, *tensors, buffer.rest], buffer.header, tensors)
        else:
            self._check(key, [buffer.whole], buffer.header, list(buffer.tensors.values()))
            for name, source in buffer.tensors.items():
                slot.fill(name, source)
        return self.shape.expert_bytes

    @property
    def retries(self) -> int:
        return self._retries.count

    @property
    def suspect(self) -> bool:
        """As in ``ExpertStore``: after a failed read, or if some but not all experts are missing."""
        return (self.folder / MARK).exists() or 0 < len(self._held) < self.shape.total

    def verify(self, threads: int) -> Iterator[str | None]:
        keys = sorted(self._held)
        with ThreadPoolExecutor(threads, thread_name_prefix="spac-check", initializer=reset_affinity) as pool:
            for key, problem in zip(keys, pool.map(self._problem, keys), strict=True):
                if problem is not None:
                    self._held.discard(key)
                    self._set_aside(self.path(key))  # also what cannot be read
                yield problem
        if not self._read_only:
            (self.folder / MARK).unlink(missing_ok=True)

    def drop(self, key: int) -> None:
        self._held.discard(key)
        self.path(key).unlink(missing_ok=True)

    def describe(self) -> str:
        how = "direct I/O" if self.direct else "buffered I/O, pages dropped: this file system has no direct I/O"
        how += ", read-only" if self._read_only else ""
        return f"disk ({self.folder}, {gib(self.shape.total * self._format.bytes)}, {how})"

    def _intact(self, key: int) -> bool:
        path = self.path(key)
        try:
            if key % self.shape.experts == 0:
                self._refuse_if(files.problem(path.parent, path.parent.stat()))
            facts = path.stat()
        except OSError:  # absent, or unreadable: it will be packed again, and that reports what is wrong
            return False
        self._refuse_if(files.problem(path, facts))
        return facts.st_size == self._format.bytes

    def _refuse_if(self, problem: str | None) -> None:
        if problem:
            raise StoreError(f"spac: {problem}, or name another folder with --spac-disk-dir DIR")

    def _problem(self, key: int) -> str | None:
        buffer = self._buffer()
        try:
            self._check(key, [buffer.whole], buffer.header, list(buffer.tensors.values()))
        except StoreError as error:
            return str(error)
        return None

    def _readable(self, slot: Slot) -> list[np.ndarray] | None:
        """Returns the tensors of a slot as bytes, in the order of a file, if the file can be read into them."""
        if slot.memory is None or (self.direct and not slot.whole_pages):  # O_DIRECT refuses
            return None
        return [slot.memory[name] for name in self._format.offsets]

    def _check(self, key: int, parts: Sequence[np.ndarray], header: np.ndarray, tensors: Sequence[np.ndarray]) -> None:
        """Reads the file of an expert into consecutive ``parts`` and checks the header and tensors in them.

        What fails is tried again, as ``Retries`` does.

        Raises:
            StoreError: it cannot be read, or is not what was packed.
        """
        failure = self._retries.run(self.path(key), lambda: self._attempt(key, parts, header, tensors))
        if failure is not None:
            self._mark()
            if failure.error is None:
                self._set_aside(self.path(key))
            tried = "" if failure.lasts else f", tried {1 + len(PAUSES)} times"
            raise StoreError(f"spac: {failure.what}{tried}; {self._remedy(key)}") from failure.error

    def _attempt(
        self, key: int, parts: Sequence[np.ndarray], header: np.ndarray, tensors: Sequence[np.ndarray]
    ) -> Failure | None:
        """Reads as ``_check``, once; returns what is wrong."""
        path = self.path(key)
        try:
            size = self._read_file(path, parts)
        except OSError as error:
            return Failure(f"cannot read {path}: {error.strerror}", error)
        if size != self._format.bytes:
            return Failure(f"{path} has {size} bytes, not {self._format.bytes}")
        if not self._format.matches(key, header, tensors):
            return Failure(f"{path} is not what was packed (checksum or header differ)")
        return None

    def _mark(self) -> None:
        with contextlib.suppress(OSError):  # the error being handled is more informative
            (self.folder / MARK).touch(FILE)

    def _read_file(self, path: Path, parts: Sequence[np.ndarray]) -> int:
        """Reads ``path`` into consecutive parts; returns the bytes read."""
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if self.direct else 0))
        try:
            left, done = [part.data for part in parts], 0
            while left:
                count = os.preadv(descriptor, left, done)
                done += count
                if count == 0 or (self.direct and done % PAGE):  # the end of the file
                    break
                left = _after(left, count)
            if not self.direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return done
        finally:
            os.close(descriptor)

    def _buffer(self) -> FileBuffer:
        """Returns this thread's buffer."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = FileBuffer(self._format)
        return self._local.buffer

    def _remedy(self, key: int) -> str:
        layer, expert = self.shape.split(key)
        return (
            f"expert {expert} of {self.shape.layers[layer]} cannot be used: restart to pack it again from the "
            f"checkpoint, or delete {self.folder}"
        )

    def _set_aside(self, path: Path) -> None:
        try:
            os.replace(path, path.with_suffix(".corrupt"))
        except FileNotFoundError:  # another thread or process did
            pass
        except OSError as error:
            raise StoreError(
                f"spac: {path} is damaged and cannot be moved aside: {error.strerror}; run `vllm-spac packed --repair` "
                "where it can be written to, or name another folder with --spac-disk-dir DIR"
            ) from error


def check_room(folder: Path, experts: int, needed: int) -> None:
    """Raises ``StoreError`` if the disk of ``folder``, which exists, has no room for ``needed`` bytes."""
    free = shutil.disk_usage(folder).free
    if experts > 0 and needed + _RESERVE > free:
        raise StoreError(
            f"spac: packing {experts} experts needs {gib(needed + _RESERVE)} in {folder}, {gib(needed)} for them and "
            f"{gib(_RESERVE)} that stay free, and {gib(free)} are free; free some room, or name another disk with "
            "--spac-disk-dir DIR"
        )


def _after(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Returns what of consecutive parts follows the first ``count`` bytes."""
    left = []
    for part in parts:
        if count < len(part):
            left.append(part[count:])
        count = max(0, count - len(part))
    return left
