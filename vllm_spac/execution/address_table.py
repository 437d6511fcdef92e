"""Our kernels over tables of addresses: the table of all experts, what the kernels compute, their launches."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.base import LayerFacts
from vllm_spac.kernels.formats import activation_of
from vllm_spac.kernels.types import Early, Fills, Pieces, Quantised
from vllm_spac.storage.base import ExpertStore

if TYPE_CHECKING:
    from vllm_spac.kernels.formats import Format

_DEVICE_POINTER = 3  # CU_POINTER_ATTRIBUTE_DEVICE_POINTER
ALIGNMENT = 16  # bytes; what the kernels promise the compiler about addresses in the table
# Average rows per expert from which a forward copies what it misses (``borrowed_slots``): with fewer, many experts are
# not needed, and those that are cross once when they are read in place. Reasoned, not measured.
MANY_ROWS = 16
MAX_EXPERTS = 1024  # per layer; the limit of the kernels' routing
_TENSORS = ("w13_weight", "w2_weight", "w13_bias", "w2_bias")
_SCALES = ("w13_scale", "w2_scale")


class AddressTable:
    """Slots, host copies, and the table of their addresses.

    Args:
        store: stores experts in memory that the device can address; of others there is no address.
        slots: name -> tensor of shape [slots, ...].
        keys: number of experts.

    Attributes:
        device: device of the slots.
        sizes: bytes of each tensor of an expert.
        addresses: int64 [names, keys] on the device: addresses at which kernels read each expert's tensors.
        hosts: int64 [names, keys] on the device: addresses of their host copies; of settled experts, of their slots; of
            experts that are not in reach what ``expert_delivery`` has written last, 0 at first.
        table, host_table: the rows of ``addresses`` and of ``hosts``, by name.
        slot_addresses: int64 [names, slots], on the host.
    """

    def __init__(self, store: ExpertStore, slots: Mapping[str, Tensor], keys: int) -> None:
        self.sizes = [tensor[0].nbytes for tensor in slots.values()]
        self.device = next(iter(slots.values())).device
        assert all(size % ALIGNMENT == 0 for size in self.sizes), "experts must keep the alignment"
        self.slot_addresses = np.array([[slot.data_ptr() for slot in slots[name]] for name in slots])
        views = [store.view(key) if store.in_reach(key) else None for key in range(keys)]
        hosts = np.array([[address_of(view[name], self.device) if view else 0 for view in views] for name in slots])
        assert not (hosts % ALIGNMENT).any() and not (self.slot_addresses % ALIGNMENT).any()
        self.addresses = torch.from_numpy(hosts).to(self.device, copy=True)
        self.hosts = self.addresses.clone()
        self.table = dict(zip(slots, self.addresses, strict=True))
        self.host_table = dict(zip(slots, self.hosts, strict=True))
        settled = np.isin(np.arange(keys), list(store.settled))
        self._settled = torch.from_numpy(settled).to(self.device) if settled.any() else None

    def resident(self, keys: slice) -> Tensor:
        """Returns bool [keys] on the device: experts whose pointers are at slots. At most two launches."""
        found = self.addresses[0, keys] != self.hosts[0, keys]
        return found if self._settled is None else found | self._settled[keys]

    def write(self, keys: Sequence[int], slots: Sequence[int]) -> None:
        """Writes the pointers of ``keys``, to these slots: one small copy to the device and one launch."""
        rows = np.concatenate([np.asarray(keys)[None], self.slot_addresses[:, np.asarray(slots)]])
        written = self.sent(torch.from_numpy(rows))
        self.addresses.index_copy_(1, written[0], written[1:])

    def write_home(self, keys: Tensor) -> None:
        """Writes the pointers of ``keys``, int64 [n] on the device, to their host copies."""
        self.addresses.index_copy_(1, keys, self.hosts.index_select(1, keys))

    def sent(self, tensor: Tensor) -> Tensor:
        """Returns ``tensor``, from the host, on the device, for work launched from now on; does not wait for it."""
        if self.device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)  # torch keeps it until it has been read


def address_of(tensor: Tensor, device: torch.device) -> int:
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
            f"spac: plane=pointers needs host memory that the GPU can read, which this one cannot (error {status}: "
            "no pinned memory or no unified addressing); use --spac-plane slots"
        )
    return address.value


class Kernels(NamedTuple):
    """The launches of ``vllm_spac.kernels``, or their torch twins.

    Attributes:
        rows_to_compile: (most rows, top_k, experts, their format) -> numbers of rows, one for each variant that is
            compiled.
    """

    grouped_gemm: Callable[..., Tensor]
    admit: Callable[..., None]
    wait_for_experts: Callable[..., None]
    read_early: Callable[..., None]
    rows_to_compile: Callable[[int, int, int, Format | None], Sequence[int]]


def check_layer(layer: LayerFacts) -> None:
    """Refuses a layer that the kernels do not compute; raises as ``Execution.check_layer``."""
    if layer.quantised is not None and not layer.packed:
        raise _refusal(f"the quantised experts ({layer.quantised}) of {layer.name}")
    reason = None
    if activation_of(layer.activation, layer.limit, layer.alpha, layer.beta) is None:
        given = {"limit": layer.limit, "alpha": layer.alpha, "beta": layer.beta}
        told = " and ".join(f"{name} {value}" for name, value in given.items() if value is not None)
        reason = f"{layer.activation} with {told}" if told else f"the activation {layer.activation}"
    elif layer.weighs_input:
        reason = "router weights on the input"
    if reason is not None:
        raise _refusal(f"{reason} of {layer.name}")


def check_shape(shape: MoEShape) -> None:
    """Refuses experts that the kernels cannot read; raises as ``Execution.check_shape``."""
    d, ff = sizes(shape)
    gated = (2 * ff, d) if shape.packed is None else shape.packed.code_shape(2 * ff, d)
    odd = [name for name, spec in shape.tensors.items() if spec.nbytes % ALIGNMENT]
    reason = None
    scales = () if shape.packed is None else _SCALES
    if set(shape.tensors) not in ({*_TENSORS[:2], *scales}, {*_TENSORS, *scales}):
        reason = f"experts of {', '.join(sorted(shape.tensors))}"
    elif shape.tensors["w13_weight"].shape != gated:
        reason = f"experts whose activation has no gate (w13 is {list(shape.tensors['w13_weight'].shape)})"
    elif odd:
        reason = f"experts whose {odd[0]} is no multiple of {ALIGNMENT} bytes"
    elif shape.experts > MAX_EXPERTS:
        reason = f"layers of more than {MAX_EXPERTS} experts"
    elif 2 * ff * d >= 2**31:
        reason = "experts of 2**31 weights and more"
    if reason is not None:
        raise _refusal(reason)


def _refusal(reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"spac: the kernel of plane=table and plane=pointers (--spac-plane) cannot run {reason}; use --spac-plane "
        "slots, which runs vLLM's own"
    )


def sizes(shape: MoEShape) -> tuple[int, int]:
    """Returns (d, ff)."""
    d, stored = shape.tensors["w2_weight"].shape
    return d, stored * (1 if shape.packed is None else shape.packed.per_byte)


def grouped_gemm_over(
    kernels: Kernels,
    shape: MoEShape,
    tables: Mapping[str, Tensor],
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    activation: str,
    out: Tensor,
    *,
    counts: Tensor | None = None,
    live: Tensor | None = None,
    pieces: Pieces | None = None,
    fills: Fills | None = None,
    early: tuple[int, Early] | None = None,
) -> Tensor:
    """Computes the routed experts of one layer; returns ``out``.

    Args:
        kernels: the launches.
        shape: of the experts.
        tables: by the names of ``shape.tensors``: int64 [experts], the address of each.
        x, weights, ids, activation, out, counts, live, pieces, fills, early: as of ``kernels.grouped_gemm``.
    """
    (_, ff), (w13, w2, b13, b2) = sizes(shape), map(tables.get, _TENSORS)
    quantised = None if shape.packed is None else Quantised(shape.packed, *(tables[name] for name in _SCALES))
    of_rows = x, w13, w2, weights, ids, ff, b13, b2, activation
    of_launch = {"pieces": pieces, "fills": fills, "early": early}
    given = {name: value for name, value in of_launch.items() if value is not None}
    return kernels.grouped_gemm(*of_rows, out=out, counts=counts, live=live, quantised=quantised, **given)


def fills_from(sources: Tensor, hosts: Mapping[str, Tensor]) -> Fills:
    """Returns what a layer's launch copies into slots.

    Args:
        sources: int32 [experts], as of ``Fills``.
        hosts: by the names of an expert's tensors: int64 [experts], the address of each host copy.
    """
    (w13, w2, *biases), scales = _TENSORS, _SCALES
    return Fills(sources, hosts[w13], hosts[w2], *map(hosts.get, (*biases, *scales)))


def kernels_for(device: torch.device) -> Kernels:
    """Returns the launches for ``device``."""
    return _twins() if device.type == "cpu" else _launches()


def _twins() -> Kernels:
    from vllm_spac.kernels.reference.admit import admit
    from vllm_spac.kernels.reference.fetch import read_early
    from vllm_spac.kernels.reference.grouped_gemm import grouped_gemm
    from vllm_spac.kernels.reference.mailbox import wait_for_experts

    return Kernels(grouped_gemm, admit, wait_for_experts, read_early, lambda *_: ())


def _launches() -> Kernels:
    from vllm_spac.kernels.admit import admit
    from vllm_spac.kernels.fetch import read_early
    from vllm_spac.kernels.grouped_gemm import grouped_gemm, rows_to_compile
    from vllm_spac.kernels.mailbox import wait_for_experts

    return Kernels(grouped_gemm, admit, wait_for_experts, read_early, rows_to_compile)
