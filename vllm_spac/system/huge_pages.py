"""Host memory in huge pages."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

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
