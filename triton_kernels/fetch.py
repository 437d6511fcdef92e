"""Copies the experts that ``admit`` has admitted from host memory into their slots, read by the device itself.

For i = 0 ... n - 1 and each tensor t::

    slot copies[1 + N + i] of t   <-   host copy of expert copies[1 + i] of t

The host copy is pinned and in the device's address space. No copy engine and no host call is involved, so the launch
may be part of a CUDA graph. Only the device knows how much is copied: the grid is always the same, and with nothing to
copy each program reads one number. The programs share the experts' chunks evenly; a few dozen of them keep enough bytes
in flight to cover the latency of the bus.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .types import Experts

_PROGRAMS = 64  # per tensor, each with _WORDS * 8 bytes in flight: 512 KB; PCIe 5 needs about 100 KB. Not measured.
_WORDS = 1024


@triton.jit
def _fetch_kernel(
    copies: tl.tensor,
    hosts: tl.tensor,
    places: tl.tensor,
    words: tl.tensor,
    n_experts: tl.tensor,
    n_keys: tl.tensor,
    n_slots: tl.tensor,
    PROGRAMS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Program (p, t) copies chunks p, p + PROGRAMS, ... of tensor t, counted over all experts."""
    n = tl.load(copies)
    name = tl.program_id(1)
    size = tl.multiple_of(tl.load(words + name), 2)  # else the mask would apply to single words
    chunks = tl.cdiv(size, WORDS)
    for chunk in range(tl.program_id(0), n * chunks, PROGRAMS):
        number = chunk // chunks
        key = tl.load(copies + 1 + number)
        slot = tl.load(copies + 1 + n_experts + number)
        source = tl.load(hosts + name * n_keys + key).to(tl.pointer_type(tl.int64), bitcast=True)
        target = tl.load(places + name * n_slots + slot).to(tl.pointer_type(tl.int64), bitcast=True)
        at = (chunk - number * chunks) * WORDS + tl.arange(0, WORDS)
        word = tl.load(tl.multiple_of(source, 16) + at, mask=at < size, other=0)
        tl.store(tl.multiple_of(target, 16) + at, word, mask=at < size)


def fetch(copies: Tensor, experts: Experts, words: Tensor) -> None:
    """Copies the experts that ``admit`` has admitted. No host synchronisation: may be captured in a CUDA graph.

    Args:
        copies: [1 + 2 N] int32, as ``admit`` wrote it.
        experts: ``hosts`` and ``places`` are read: addresses, multiples of 16 and valid as long as the launch runs.
        words: [names] int32, the size of each of an expert's tensors in words of 8 bytes, multiples of 2.

    Raises:
        AssertionError: a shape, dtype or layout is not as above.
    """
    names, keys = experts.hosts.shape
    assert copies.dtype == words.dtype == torch.int32 and copies.is_contiguous() and words.shape == (names,)
    assert experts.hosts.dtype == experts.places.dtype == torch.int64 and len(experts.places) == names
    assert experts.hosts.is_contiguous() and experts.places.is_contiguous()
    _fetch_kernel[(_PROGRAMS, names)](
        copies, experts.hosts, experts.places, words, len(copies) // 2, keys, experts.places.shape[1],
        PROGRAMS=_PROGRAMS, WORDS=_WORDS, num_warps=4,
    )  # fmt: skip
