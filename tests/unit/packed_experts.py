"""Experts of random numbers, packed on a disk, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.storage.base import allocate
from vllm_spac.storage.disk import DiskStore

FINGERPRINT = "a" * 32


def expert(shape: MoEShape, key: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(key)
    return {name: torch.randn(spec.shape, generator=rng).to(spec.dtype) for name, spec in shape.tensors.items()}


def blank(shape: MoEShape, slots: int | None = None) -> dict[str, Tensor]:
    """NaN in the place of a slot, or of several; allocated as slots are."""
    block = allocate(shape.tensors, slots or 1, "cpu")
    return {
        name: tensor.fill_(float("nan")) if slots else tensor[0].fill_(float("nan")) for name, tensor in block.items()
    }


def packed(folder: Path, shape: MoEShape, fingerprint: str = FINGERPRINT) -> DiskStore:
    store = DiskStore(shape, fingerprint, folder)
    for key in range(shape.total):
        store.put(key, expert(shape, key))
    return store
