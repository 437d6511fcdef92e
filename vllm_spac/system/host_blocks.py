"""Blocks of host memory of exactly the size that is needed, in huge pages, registered with CUDA if the GPU uses them.

torch rounds its own pinned memory up to powers of two: 1 GiB for 768 MiB.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections.abc import Iterable, Mapping
from typing import SupportsInt

import torch
from torch import Tensor

from vllm_spac.core import TensorSpec
from vllm_spac.errors import PinError, Remedy, StoreError, use
from vllm_spac.system import processors
from vllm_spac.system.host_memory import gib, pin_remedy

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
        with contextlib.suppress(OSError):  # a kernel without huge pages; `vllm-spac check` says so
            mapped.madvise(mmap.MADV_HUGEPAGE, start, nbytes // HUGE_PAGE * HUGE_PAGE)
    if not inherited:
        mapped.madvise(mmap.MADV_DONTFORK)
    return everything[start : start + nbytes]


_NO_MORE = (2, 304)  # cudaErrorMemoryAllocation, cudaErrorOperatingSystem: no more memory can be locked
_INSTEAD = "use --spac-store disk --spac-disk-dir DIR"


def block_bytes(specs: Iterable[TensorSpec], count: int) -> int:
    """Returns the bytes of a block of ``count`` experts: each tensor begins on a page."""
    return sum(_pages(count * spec.nbytes) for spec in specs)


class HostBlock:
    """``count`` experts' tensors in one anonymous mapping.

    Attributes:
        tensors: name -> zeros [count, ...], valid as long as they are referenced.
        nbytes: bytes of memory of the first ``held`` experts, whole pages.
        pinned: whether it is registered with CUDA.
        refused: why it is not pinned though it should be; empty if it is, or need not be.

    Args:
        pin: register the mapping with CUDA: its pages are locked, and the GPU can read them in place. They are on the
            GPU's NUMA node while that has room.
        held: experts that are written; default: all. The others have addresses, and no memory.

    Raises:
        StoreError: the system or the driver refuses, for another reason than that no more can be pinned.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], count: int, pin: bool, held: int | None = None) -> None:
        held = count if held is None else held
        self.nbytes = block_bytes(specs.values(), held)
        try:
            # a pinned block is not inherited: after copy-on-write the GPU would keep the old pages
            everything = huge_pages(block_bytes(specs.values(), count), inherited=not pin)
        except OSError as error:
            raise StoreError(
                f"spac: cannot allocate {gib(self.nbytes)} of host memory for store=host ({error}); {_INSTEAD}"
            ) from error
        self._unpin: list[weakref.finalize] = []
        if pin and (node := processors.gpu_node()) is not None:
            processors.prefer_node(everything, node)  # before the driver touches the pages
        self.tensors: dict[str, Tensor] = {}
        start, parts = 0, []
        for name, spec in specs.items():
            stop = start + count * spec.nbytes
            self.tensors[name] = everything[start:stop].view(spec.dtype).view(count, *spec.shape)
            parts.append(everything[start : start + _pages(held * spec.nbytes)])
            start += _pages(count * spec.nbytes)
        self.refused = ""
        for part in (parts if held < count else [everything]) if pin else ():
            self.refused = self.refused or self._register(part.data_ptr(), part.nbytes)
        self.pinned = pin and not self.refused

    @classmethod
    def staging(cls, specs: Mapping[str, TensorSpec], count: int) -> HostBlock:
        """Returns memory where kernels find what threads have read: pinned, if there is a GPU.

        Raises:
            PinError: no more memory can be pinned.
        """
        block = cls(specs, count, torch.cuda.is_available())
        if block.refused:
            raise PinError.refused(
                f"spac: cannot pin {gib(block.nbytes)} of host memory, where layers find what they miss "
                f"({block.refused})",
                Remedy(pin_remedy()),
                use(plane="table"),
            )
        return block

    @property
    def host_bytes(self) -> dict[str, int]:
        """As ``ExpertStore.host_bytes``."""
        pinned = self.nbytes if self.pinned else 0
        return {"pinned": pinned, "pageable": self.nbytes - pinned}

    def _register(self, address: int, nbytes: int) -> str:
        """Pins a part; returns why the driver refuses to pin as much, or ``""``."""
        error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
        if int(error) in _NO_MORE:
            _forget_error()
            return f"cudaHostRegister: {_words(error)}"
        if int(error) != 0:
            problem = f"spac: cannot pin {gib(self.nbytes)} of host memory for store=host (cudaHostRegister: "
            remedies = Remedy(pin_remedy()), use(store="disk", disk_dir="DIR")
            raise StoreError.refused(f"{problem}{_words(error)})", *remedies)
        # a mapping that ends while it is registered would stay so, and another at its address could not be pinned
        self._unpin.append(weakref.finalize(self, _unregister, address))
        self._unpin[-1].atexit = False  # the driver may be gone by then, and the process with its memory is going
        return ""

    def close(self) -> None:
        """Unregisters the mapping, which no copy and no kernel may be using; a second call does nothing.

        Raises:
            StoreError: the driver refuses.
        """
        for unpin in self._unpin:
            unpin()
        self.pinned = False


def _unregister(address: int) -> None:
    error = torch.cuda.cudart().cudaHostUnregister(address)
    if int(error) != 0:
        raise StoreError(f"spac: host memory cannot be unpinned (cudaHostUnregister: {_words(error)})")


def _forget_error() -> None:
    """Clears the error that the runtime keeps of this thread's last call: the next launch would report it as its own.

    torch loads the runtime's symbols for all of the process.
    """
    ctypes.CDLL(None).cudaGetLastError()


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _words(error: SupportsInt) -> str:
    return f"{torch.cuda.cudart().cudaGetErrorString(error)}, error {int(error)}"
