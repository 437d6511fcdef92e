"""The contract of a store of packed experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, TensorSpec
from vllm_spac.errors import StoreError
from vllm_spac.storage.checkpoint.packed_folder import PAGE
from vllm_spac.system.host_blocks import HostBlock, huge_pages


class ExpertStore(ABC):
    """Stores every expert of a ``MoEShape``, byte for byte as it was packed.

    Written once while the model is loaded, read-only from then on. ``put`` is called by one thread,
    ``read`` by several concurrently.

    Attributes:
        addressable: experts are in memory that the CPU and the GPU can read: ``view`` and ``layer`` return them.
        tensors: name -> slots [slots, ...], if the store has experts in them; else None.
        settled: experts that are in the first of these slots for good, in this order, and nowhere else.

    Args:
        shape: layers, experts and tensors; the layout of every expert.
        fingerprint: identifies the checkpoint and the kernel layout; experts of another one are never returned. Empty
            for a store that is not persistent.
        folder: where a persistent store keeps its files; None for the others.
    """

    addressable: ClassVar[bool] = False
    persistent: ClassVar[bool] = False  # experts outlive the process, in a folder and under a fingerprint
    in_place: bool = True  # kernels on the GPU read experts where they are stored; set before the first ``put``
    offline: ClassVar[str] = ""  # why no engine can select it by name; empty if one can
    tensors: Mapping[str, Tensor] | None = None
    settled: Sequence[int] = ()
    _staging: HostBlock | None = None

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        self.shape = shape
        self.fingerprint = fingerprint

    @abstractmethod
    def holds(self, key: int) -> bool:
        """Whether expert ``key`` was packed, in this run or an earlier one."""

    @abstractmethod
    def reserve(self, experts: int) -> None:
        """Checks that ``experts`` more experts will fit, before any work is done for them.

        Raises:
            StoreError: there is too little room; the message states how much is needed and where.
        """

    def reserve_slots(self, count: int, slots: Mapping[str, Tensor]) -> None:
        """Keeps ``count`` experts in the first ``slots`` for good, and nowhere else; before anything is reserved.

        Raises:
            StoreError: this store keeps all of them.
        """
        raise StoreError(f"spac: {self.describe()} keeps every expert itself")

    def pin(self) -> None:
        """Pins the memory of experts that kernels read in place; once it is reserved, before any ``put``.

        Those for which the driver pins no more are not ``in_reach``.

        Raises:
            PinError: the driver pins not even what ``staging`` has.
        """
        if self.in_place and not self.addressable:
            self.staging()

    @property
    def host_bytes(self) -> dict[str, int]:
        """Bytes of host memory that the store takes: ``pinned``, and ``pageable``."""
        return {"pinned": 0, "pageable": 0} if self._staging is None else self._staging.host_bytes

    @abstractmethod
    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        """Stores a copy of the CPU tensors of expert ``key``; ``StoreError``: they could not be written completely."""

    @abstractmethod
    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        """Copies expert ``key`` into the tensors of one slot; returns the bytes moved.

        ``Slot.of(into).fill`` copies bytes without torch on a CPU: several threads read at once, and each call into
        torch may wait for the interpreter's lock.

        Raises:
            StoreError: the expert is missing or differs from what was packed. ``into`` is then undefined.
        """

    @property
    def retries(self) -> int:
        """Reads that failed and were tried again, since the store was opened."""
        return 0

    @property
    def suspect(self) -> bool:
        """Whether experts that an earlier run packed may be damaged, so that ``verify`` should come before ``read``."""
        return False

    def verify(self, threads: int) -> Iterator[str | None]:
        """Reads every stored expert, ``threads`` at a time; ``holds`` is false for the damaged ones from then on.

        Yields:
            For each expert a description of the damage, or None.

        Raises:
            StoreError: a damaged expert cannot be removed from the store.
        """
        return iter(())

    def drop(self, key: int) -> None:
        """Removes expert ``key``, whose content is wrong, so that no later run finds it."""

    def remove_partial(self) -> None:
        """Removes the partial files of processes that were killed while packing; no process may be packing."""

    def view(self, key: int) -> Mapping[str, Tensor]:
        """Returns the stored tensors of expert ``key``, without a copy, contiguous and read-only.

        Raises:
            StoreError: this store is not addressable, or the expert was never packed.
        """
        raise StoreError(f"spac: experts in {self.describe()} have no address")

    def in_reach(self, key: int) -> bool:
        """Whether kernels read expert ``key`` where it is, which ``view`` returns; all are packed or have room."""
        return self.addressable

    def staging(self) -> Mapping[str, Tensor]:
        """Returns memory that kernels read in place, for the experts of a layer that are not ``in_reach``.

        Name -> CPU tensor [experts, ...]; the same in every call, owned by the store.

        Raises:
            PinError: the driver refuses.
            StoreError: all experts are in reach.
        """
        if self.addressable:
            raise StoreError(f"spac: all experts in {self.describe()} are in reach")
        if self._staging is None:
            self._staging = HostBlock.staging(self.shape.tensors, self.shape.experts)
        return self._staging.tensors

    def layer(self, number: int) -> Mapping[str, Tensor]:
        """Returns the stored tensors of a layer, without a copy: name -> CPU tensor [experts, ...].

        Every call for a layer returns the same object.

        Raises:
            StoreError: this store is not addressable.
        """
        raise StoreError(f"spac: experts in {self.describe()} have no address")

    @abstractmethod
    def describe(self) -> str:
        """Returns a few words for the start-up line."""

    def close(self) -> None:
        """Releases memory and handles; the store is not used afterwards."""
        if self._staging is not None:
            self._staging.close()


def allocate(specs: Mapping[str, TensorSpec], count: int, device: torch.device | str) -> dict[str, Tensor]:
    """Allocates uninitialised memory for ``count`` experts: name -> tensor of shape [count, ...].

    On a CPU each tensor begins on a page, so that files can be read into it with O_DIRECT, and is in huge pages.
    """
    return {name: _on_a_page(spec, count, device) for name, spec in specs.items()}


def _on_a_page(spec: TensorSpec, count: int, device: torch.device | str) -> Tensor:
    if torch.device(device).type != "cpu":
        return torch.empty((count, *spec.shape), dtype=spec.dtype, device=device)
    nbytes = count * spec.nbytes
    return huge_pages(nbytes).view(spec.dtype).view(count, *spec.shape)


class Slot(dict[str, Tensor]):
    """The tensors of one slot by name.

    Attributes:
        memory: name -> uint8 [bytes], the same memory; None on a GPU.
        whole_pages: each tensor on a CPU begins and ends with a page, so files can be read into it with O_DIRECT.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.memory: dict[str, np.ndarray] | None = None
        self.whole_pages = False
        if all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors.values()):
            self.memory = {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()}
            ends = (end for tensor in tensors.values() for end in (tensor.data_ptr(), tensor.nbytes))
            self.whole_pages = all(end % PAGE == 0 for end in ends)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Slot:
        """Returns ``tensors`` as a slot."""
        return tensors if isinstance(tensors, Slot) else cls(tensors)

    def fill(self, name: str, source: np.ndarray) -> None:
        """Copies bytes, uint8 of equal size in CPU memory, into one tensor; complete when it returns."""
        if self.memory is not None:  # numpy's copy uses no OpenMP threads, which the kernels need
            np.copyto(self.memory[name], source)
        else:
            self[name].view(-1).view(torch.uint8).copy_(torch.from_numpy(source))


def rows_of(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Returns contiguous CPU tensors [rows, ...] as bytes, uint8 [rows, bytes]: the same memory."""
    return {name: tensor.reshape(len(tensor), -1).view(torch.uint8).numpy() for name, tensor in tensors.items()}


class Slots:
    """The slots of tensors [slots, ...], each made when it is first needed. Threads may ask at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._made: dict[int, Slot] = {}

    def __getitem__(self, number: int) -> Slot:
        slot = self._made.get(number)
        if slot is None:
            slot = self._made[number] = Slot({name: tensor[number] for name, tensor in self._tensors.items()})
        return slot
