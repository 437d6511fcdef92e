"""Slots must be in huge pages: a disk reads an expert into scattered pages of 4 KiB in hundreds of pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_spac.core import TensorSpec
from vllm_spac.storage.base import allocate
from vllm_spac.system import host_blocks as module
from vllm_spac.system.host_blocks import HUGE_PAGE, HostBlock, huge_pages

MIB = 2**20


def advised(tensor: torch.Tensor) -> int:
    """Returns how many bytes of a tensor, from its first on, the kernel was asked to back with huge pages."""
    start, stop, until = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.data_ptr()
    first = last = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            first, last = (int(part, 16) for part in words[0].split("-"))
        elif words[0] == "VmFlags:" and "hg" in words and first <= until < last:
            until = min(last, stop)
    return until - start


@pytest.mark.parametrize("nbytes", [HUGE_PAGE, 5 * MIB, 5 * MIB + 1])
def test_whole_huge_pages_are_asked_for_and_the_rest_is_not(nbytes: int) -> None:
    memory = huge_pages(nbytes)
    assert memory.data_ptr() % HUGE_PAGE == 0
    assert len(memory) == nbytes and not memory.any()
    assert advised(memory) == nbytes // HUGE_PAGE * HUGE_PAGE


@pytest.mark.parametrize("nbytes", [0, 1, HUGE_PAGE - 1])
def test_less_than_a_huge_page_has_the_usual_pages(nbytes: int) -> None:
    memory = huge_pages(nbytes)
    assert len(memory) == nbytes
    assert advised(memory) == 0


def test_slots_and_host_memory_are_in_huge_pages() -> None:
    spec = {"w13_weight": TensorSpec((3, MIB), torch.uint8)}
    block = HostBlock(spec, 2, pin=False)
    for tensors in (allocate(spec, 2, "cpu"), block.tensors):
        assert advised(tensors["w13_weight"]) == 6 * MIB


def test_a_kernel_without_huge_pages_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.mmap, "MADV_HUGEPAGE", -1)  # EINVAL
    memory = huge_pages(3 * MIB)
    memory.fill_(1)
    assert memory.sum() == 3 * MIB
    assert advised(memory) == 0


def test_a_tensor_keeps_the_mapping() -> None:
    memory = huge_pages(3 * MIB)[MIB:].view(torch.int64)
    memory.fill_(7)
    assert memory.sum() == 7 * len(memory)
