"""Collects ``facts`` of this machine, the rate of its disk among them; judges nothing."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from vllm_spac.storage.checkpoint import quantisation
from vllm_spac.storage.checkpoint.packed_folder import MARK, Packed, scan
from vllm_spac.storage.checkpoint.published import NamedModel
from vllm_spac.system import machine, processors
from vllm_spac.system.files import probe, reads_directly
from vllm_spac.system.host_memory import available_host_bytes, host_limit, is_wsl
from vllm_spac.tools.machine.facts import Disk, Model, PackedFolder, System

_BLOCK = 4 << 20
_SCRATCH = 128 << 20  # bytes of the file that is written where nothing is packed yet
_SECONDS = 2.0


def read_rate(files: Sequence[Path], folder: Path, seconds: float = _SECONDS) -> float:
    """Returns the bytes per second that one thread reads from a disk, without the page cache.

    Args:
        files: read one after the other for at most ``seconds``; if there are none, a file of 128 MiB in ``folder`` is
            written, read and removed.

    Raises:
        OSError: the disk fails, or is full.
    """
    if files:
        return _rate(files, seconds)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as scratch:
        block = os.urandom(_BLOCK)  # a disk that compresses must not be faster than with weights
        for _ in range(_SCRATCH // _BLOCK):
            scratch.write(block)
        scratch.flush()
        os.fsync(scratch.fileno())
        os.posix_fadvise(scratch.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return _rate([Path(scratch.name)], seconds)


def _rate(files: Sequence[Path], seconds: float) -> float:
    buffer, direct, done = mmap.mmap(-1, _BLOCK), reads_directly(files[0]), 0
    begin = time.perf_counter()
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            if not direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            offset = 0
            while (count := os.preadv(descriptor, [buffer], offset)) > 0:
                offset, done = offset + count, done + count
                if count % mmap.PAGESIZE or time.perf_counter() - begin > seconds:
                    break
        finally:
            os.close(descriptor)
        if time.perf_counter() - begin > seconds:
            break
    return done / max(time.perf_counter() - begin, 1e-9)


_BINDING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "VLLM_CPU_OMP_THREADS_BIND")
VARIABLES = ("OMP_NUM_THREADS", *_BINDING, *machine.VARIABLES)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_DEVICES = Path("/sys/class/bdi")


def system() -> System:
    """Collects facts about processors and memory."""
    cpus = frozenset(os.sched_getaffinity(0))
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return System(
        cpus=cpus,
        quota=processors.quota(),
        nodes=tuple(n for n, of_node in sorted(processors.nodes().items()) if of_node & cpus),
        wsl=is_wsl(),
        total=psutil.virtual_memory().total,
        available=available_host_bytes(),
        limit=host_limit(),
        memlock=None if limit == resource.RLIM_INFINITY else limit,
        huge_pages=_text(_HUGE_PAGES).partition("[")[2].partition("]")[0],
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def disk(folder: Path, measure: bool) -> Disk:
    """Collects facts about the disk of ``folder``.

    Args:
        folder: of all packed experts; need not exist. Nothing but a file that is removed at once is written.
        measure: read from it for at most two seconds to learn its rate.

    Raises:
        OSError: packed experts cannot be listed, or the disk fails while it is read.
    """
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    folders, (unwritable, direct) = list(scan(folder)), probe(there)
    experts = [path for item in folders for path in item.experts]
    return Disk(
        folder=folder,
        free=psutil.disk_usage(str(there)).free,
        unwritable=unwritable,
        direct=direct,
        read_ahead=_read_ahead(there),
        rate=read_rate(experts, there) if measure and (experts or not unwritable) else None,
        packed=tuple(map(_packed, folders)),
    )


def model(named: NamedModel) -> Model:
    """Collects the sizes of a checkpoint, or why it cannot be served."""
    name, checkpoint = named.name, named.checkpoint()
    if checkpoint.quantisation and (reason := quantisation.refusal(checkpoint.quantisation)):
        return Model(name, refusal=f"{name} has {reason}")
    smallest = sum(count * size for count, size in checkpoint.slots(checkpoint.smallest_percent()))
    return Model(name, "", sum(checkpoint.layer_bytes.values()), smallest, checkpoint.other_bytes)


def _read_ahead(folder: Path) -> int | None:
    device = folder.stat().st_dev
    text = _text(_DEVICES / f"{os.major(device)}:{os.minor(device)}" / "read_ahead_kb")
    return int(text) << 10 if text.isdigit() else None


def _packed(item: Packed) -> PackedFolder:
    by_layer = Counter(path.parent for path in item.experts)
    uneven = len(set(by_layer.values())) > 1 or len(by_layer) < len(item.layers) or not item.experts
    return PackedFolder(
        name=item.folder.name,
        bytes=item.bytes,
        days=max(0.0, time.time() - item.newest) / 86400,
        leftovers=len(item.leftovers),
        unfinished=uneven or (item.folder / MARK).exists(),
        used=_is_locked(item.folder.with_name(f"{item.folder.name}.lock")),
    )


def _is_locked(path: Path) -> bool:
    """Whether another process holds the lock ``path``; does not create it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file: nobody uses the folder; or one that this user may not read
        return False
    return False


def _text(path: Path) -> str:
    """Returns the content of a file of the kernel; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
