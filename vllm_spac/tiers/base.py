"""The contract of a store of packed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError


class ExpertStore(ABC):
    """Keeps every expert of a ``MoEShape``, byte for byte as it was packed.

    Written once while the model is loaded, read-only from then on. ``put`` is called by one thread,
    ``read`` by many at once.

    Attributes:
        addressable: experts lie in memory that the CPU and the GPU can read: ``view`` and ``layer`` find them.
        persistent: experts outlive the process, in a folder and under a fingerprint.
        tensors: the slots themselves, [all experts, ...] by name, of the store that has one for each expert.
        offline: why no engine is served with it by name; empty if one can be.

    Args:
        shape: layers, experts and tensors; the layout of every expert.
        fingerprint: names the checkpoint and the kernel layout; experts of another one are never returned. Empty for
            one that is not persistent.
        folder: where a persistent store keeps its files; None for the others.
    """

    addressable: ClassVar[bool] = False
    persistent: ClassVar[bool] = False
    offline: ClassVar[str] = ""
    tensors: Mapping[str, Tensor] | None = None

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        self.shape = shape
        self.fingerprint = fingerprint

    @abstractmethod
    def holds(self, key: int) -> bool:
        """Whether expert ``key`` was packed, now or in an earlier run."""

    @abstractmethod
    def reserve(self, experts: int) -> None:
        """Make sure that ``experts`` more experts will fit, before any work is done for them.

        Raises:
            StoreError: there is too little room; says how much is needed and where.
        """

    @abstractmethod
    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep a copy of the CPU tensors of expert ``key``.

        Raises:
            StoreError: they could not be written completely.
        """

    @abstractmethod
    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        """Copy expert ``key`` into the tensors of one slot; returns the bytes moved.

        Raises:
            StoreError: the expert is missing or is not what was packed. ``into`` is then undefined.
        """

    @property
    def suspect(self) -> bool:
        """Whether experts that an earlier run packed may be damaged, so that ``verify`` should come before ``read``."""
        return False

    def verify(self, threads: int) -> Iterator[str | None]:
        """Read every expert that it holds, ``threads`` at a time; ``holds`` is false for the damaged ones from then on.

        Yields for each what is wrong with it, or None.

        Raises:
            StoreError: a damaged one cannot be given up.
        """
        return iter(())

    def drop(self, key: int) -> None:
        """Give up expert ``key``, which is not what it should be: no later run finds it."""

    def sweep(self) -> None:
        """Remove what processes that were killed while they packed have left; nobody may be packing."""

    def view(self, key: int) -> Mapping[str, Tensor]:
        """The tensors of expert ``key`` where they lie, contiguous, not to be written; of addressable stores.

        Raises:
            StoreError: this store has none, or the expert was never packed.
        """
        raise StoreError(f"spac: experts in {self.describe()} have no address")

    def layer(self, number: int) -> Mapping[str, Tensor]:
        """All experts of a layer where they lie: name -> CPU tensor [experts, ...], always the same object.

        Raises:
            StoreError: this store is not addressable.
        """
        raise StoreError(f"spac: experts in {self.describe()} have no address")

    @abstractmethod
    def describe(self) -> str:
        """A few words for the start-up line."""

    def close(self) -> None:
        """Give back memory and handles; the store is not used afterwards."""


def allocate(specs: Mapping[str, TensorSpec], count: int, device: torch.device | str) -> dict[str, Tensor]:
    """``count`` experts' worth of memory, uninitialised: name -> tensor of shape [count, ...]."""
    return {name: torch.empty((count, *spec.shape), dtype=spec.dtype, device=device) for name, spec in specs.items()}


def copy_bytes(target: Tensor, source: Tensor) -> None:
    """Fill one tensor of a slot with ``source`` (uint8 on the CPU, as long); complete when it returns."""
    if target.device.type == "cpu":  # numpy's copy takes no OpenMP threads away from the kernels
        np.copyto(target.reshape(-1).view(torch.uint8).numpy(), source.numpy())
    else:
        target.view(-1).view(torch.uint8).copy_(source)
