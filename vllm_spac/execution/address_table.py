"""The table of expert addresses in device memory, and the copies into the slots that it points to."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm_spac.cache.residency import NOWHERE
from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.base import ExpertStore

_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
ALIGNMENT = 16  # bytes; what the kernels promise the compiler about addresses in the table


class AddressTable:
    """Slots, host copies, and the table of their addresses.

    Args:
        store: stores every expert in memory that the device can address.
        slots: name -> tensor of shape [slots, ...].
        keys: number of experts.

    Attributes:
        device: device of the slots.
        sizes: bytes of each tensor of an expert.
        addresses: int64 [names, keys] on the device: addresses at which kernels read each expert's tensors.
        hosts: int64 [names, keys] on the device: addresses of their host copies.
        table: the rows of ``addresses``, by name.
        slot_addresses: int64 [names, slots], on the host.
        host_addresses: int64 [names, keys], on the host.
    """

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], keys: int) -> None:
        self._store, self._slots = store, slots
        self.sizes = [tensor[0].nbytes for tensor in slots.values()]
        self.device = next(iter(slots.values())).device
        first = store.view(0)
        assert all(first[name].nbytes % ALIGNMENT == 0 for name in slots), "experts must keep the alignment"
        self.slot_addresses = np.array([[slot.data_ptr() for slot in slots[name]] for name in slots])
        views = [store.view(key) for key in range(keys)]
        self.host_addresses = np.array([[_address(view[name], self.device) for view in views] for name in slots])
        assert not (self.host_addresses % ALIGNMENT).any() and not (self.slot_addresses % ALIGNMENT).any()
        self.addresses = torch.from_numpy(self.host_addresses).to(self.device, copy=True)
        self.hosts = self.addresses.clone()
        self.table = dict(zip(slots, self.addresses, strict=True))

    def resident(self, keys: slice) -> Tensor:
        """Returns bool [keys] on the device: experts whose pointers are at slots. One launch."""
        return self.addresses[0, keys] != self.hosts[0, keys]

    def point(self, keys: Sequence[int], slots: Sequence[int]) -> None:
        """As in ``moves.Memory``: one small copy to the device and one launch."""
        pointed, to = np.asarray(keys), np.asarray(slots)
        addresses = np.where(to == NOWHERE, self.host_addresses[:, pointed], self.slot_addresses[:, to])
        written = torch.from_numpy(np.concatenate([pointed[None], addresses]))
        if self.device.type == "cuda":  # pinned, so that it does not wait; torch keeps it until it has been read
            written = written.pin_memory().to(self.device, non_blocking=True)
        self.addresses.index_copy_(1, written[0], written[1:])

    def copy(self, key: int, slot: int) -> None:
        for name, tensor in self._store.view(key).items():
            self._slots[name][slot].copy_(tensor, non_blocking=True)


def _address(tensor: Tensor, device: torch.device) -> int:
    """Returns the address at which kernels on ``device`` read a tensor, which may be in pinned host memory.

    Raises:
        UnsupportedError: the device cannot read it.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.data_ptr()
    address = ctypes.c_uint64()
    ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    status = ask(ctypes.byref(address), _DEVICE_POINTER, ctypes.c_uint64(tensor.data_ptr()))
    if status or not address.value:
        raise UnsupportedError(
            f"spac: execution=pointers needs host memory that the GPU can read, which this one cannot (error {status}: "
            "no pinned memory or no unified addressing); use --spac-execution slots"
        )
    return address.value
