"""Host memory: what is free, huge pages, and blocks that are registered with CUDA if the GPU copies from or reads them.

Blocks have exactly the size that is needed: torch rounds its own pinned memory up to powers of two, 1 GiB for 768 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, SupportsInt

import psutil
import torch
from torch import Tensor

from vllm_spac.core import TensorSpec
from vllm_spac.errors import StoreError

if TYPE_CHECKING:
    from torch import Tensor

_CGROUP = Path("/sys/fs/cgroup")
_MADV_PAGEOUT = 21


def available_host_bytes() -> int:
    """Returns the bytes that can be allocated without swapping, within the limits of machine and container."""
    available = psutil.virtual_memory().available
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if limit is None or used is None:
        return available
    return max(0, min(available, limit - used + _reclaimable()))


def _reclaimable() -> int:
    """Returns the bytes of page cache that count as used by the container but are reclaimed under memory pressure."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:  # no such file on this system
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


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


HUGE_PAGE = 2**21  # bytes


def huge_pages(nbytes: int, *, inherited: bool = True) -> Tensor:
    """Allocates zeros, uint8 [nbytes], in huge pages as far as they fill them; the rest has the usual pages.

    A direct read from a disk is split where physical addresses are not consecutive, and pages of 4 KiB are scattered
    the more, the longer a machine runs: one expert can then be hundreds of pieces.

    Args:
        inherited: forked processes have a copy of the memory.

    Raises:
        OSError: the system refuses.
    """
    mapped = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps the mapping
    start = -everything.data_ptr() % HUGE_PAGE
    if nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a kernel without huge pages; `vllm-spac doctor` says so
            mapped.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    if not inherited:
        mapped.madvise(mmap.MADV_DONTFORK)
    return everything[start : start + nbytes]


_INSTEAD = "use --spac-store disk --spac-disk-dir DIR"


def block_bytes(specs: Iterable[TensorSpec], count: int) -> int:
    """Returns the bytes of a block of ``count`` experts: each tensor begins on a page."""
    return sum(_pages(count * spec.nbytes) for spec in specs)


class HostBlock:
    """``count`` experts' tensors in one anonymous mapping.

    Attributes:
        tensors: name -> zeros [count, ...], valid as long as they are referenced.
        nbytes: size of the mapping, whole pages.

    Args:
        specs: the tensors of one expert.
        count: number of experts.
        pin: register the mapping with CUDA: its pages are locked, and the GPU can read them in place.

    Raises:
        StoreError: the system or the driver refuses; the message names a remedy.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], count: int, pin: bool) -> None:
        self.nbytes = block_bytes(specs.values(), count)
        try:
            # a pinned block is not inherited: after copy-on-write the GPU would keep the old pages
            everything = huge_pages(self.nbytes, inherited=not pin)
        except OSError as error:
            raise StoreError(
                f"spac: cannot allocate {gib(self.nbytes)} of host memory for store=host ({error}); {_INSTEAD}"
            ) from error
        self._address: int | None = None
        if pin:
            self._register(everything.data_ptr())
        self.tensors: dict[str, Tensor] = {}
        start = 0
        for name, spec in specs.items():
            stop = start + count * spec.nbytes
            self.tensors[name] = everything[start:stop].view(spec.dtype).view(count, *spec.shape)
            start += _pages(count * spec.nbytes)

    def _register(self, address: int) -> None:
        error = torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0)
        if int(error) != 0:
            raise StoreError(
                f"spac: cannot pin {gib(self.nbytes)} of host memory for store=host (cudaHostRegister: "
                f"{_words(error)}); raise the limit of locked memory (ulimit -l unlimited; in a container "
                f"--ulimit memlock=-1), or {_INSTEAD}"
            )
        self._address = address

    def close(self) -> None:
        """Unregisters the mapping, which no copy and no kernel may be using; a second call does nothing.

        Raises:
            StoreError: the driver refuses.
        """
        address, self._address = self._address, None
        if address is None:
            return
        error = torch.cuda.cudart().cudaHostUnregister(address)
        if int(error) != 0:
            raise StoreError(f"spac: host memory cannot be unpinned (cudaHostUnregister: {_words(error)})")


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _words(error: SupportsInt) -> str:
    return f"{torch.cuda.cudart().cudaGetErrorString(error)}, error {int(error)}"
