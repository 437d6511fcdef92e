"""Store in host memory, pinned if there is a GPU: one block per layer, in the layout of the kernel.

Where kernels read experts in place, all layers are pinned before any is packed, so that a driver that refuses is known
before weights are read. Where experts are only copied, layers are pinned in the order in which they are packed, until
the driver refuses one. That one and those after it are pageable: the driver copies through a buffer of its own. All
layers are read as often, so no order is better.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, Slot, rows_of
from vllm_spac.system.host_blocks import HostBlock, block_bytes
from vllm_spac.system.host_memory import available_host_bytes, gib, pin_remedy

logger = logging.getLogger("vllm.spac")

_RESERVE = 1 << 30  # left to the rest of the machine


class HostStore(ExpertStore):
    """Experts in blocks ``[experts, ...]`` per tensor and layer; a read is one copy per tensor."""

    addressable: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self._layers: dict[int, HostBlock] = {}
        self._memory: dict[int, dict[str, np.ndarray]] = {}  # the same as bytes, [experts, bytes]
        self._packed: set[int] = set()
        self._pin = torch.cuda.is_available()
        self._refused = False  # the driver has pinned as much as it does

    def holds(self, key: int) -> bool:
        return key in self._packed

    def reserve(self, experts: int) -> None:
        layers = -(-experts // self.shape.experts)
        needed, available = layers * self._layer_bytes, available_host_bytes()
        if experts and needed + _RESERVE > available:
            raise StoreError(
                f"spac: store=host needs {gib(needed)} of host memory for {experts} experts, "
                f"{gib(available)} are available (1 GiB is left to the system); "
                "use --spac-store disk --spac-disk-dir DIR, or a machine with more memory"
            )

    def pin(self) -> None:
        if self._pin and self.in_place:
            for layer in range(len(self.shape.layers)):
                self._add(layer)

    @property
    def host_bytes(self) -> dict[str, int]:
        blocks = self._layers.values()
        pinned = sum(block.nbytes for block in blocks if block.pinned)
        return {"pinned": pinned, "pageable": sum(block.nbytes for block in blocks) - pinned}

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        layer, expert = self.shape.split(key)
        if layer not in self._layers:
            self._add(layer)
        for name, block in self._layers[layer].tensors.items():
            block[expert].copy_(tensors[name])
        self._packed.add(key)

    def _add(self, layer: int) -> None:
        """Allocates a layer, pinned unless the driver has refused one."""
        pin = self._pin and not self._refused
        block = HostBlock(self.shape.tensors, self.shape.experts, pin, self.in_place)
        if block.refused:
            pinned, total = len(self._layers) * block.nbytes, len(self.shape.layers) * block.nbytes
            logger.warning(
                "spac: %s of %s of experts in host memory are pinned (%s), the first layers; the others are copied "
                "from pageable memory, which is slower; %s",
                *(gib(pinned), gib(total), block.refused, pin_remedy()),
            )
        self._refused |= bool(block.refused)
        self._layers[layer], self._memory[layer] = block, rows_of(block.tensors)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        layer, expert = self._place(key)
        slot = Slot.of(into)
        for name, rows in self._memory[layer].items():
            slot.fill(name, rows[expert])
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        layer, expert = self._place(key)
        return {name: block[expert] for name, block in self._layers[layer].tensors.items()}

    def _place(self, key: int) -> tuple[int, int]:
        if key not in self._packed:
            raise StoreError(f"expert {self.shape.split(key)} was never packed")
        return self.shape.split(key)

    def layer(self, number: int) -> Mapping[str, Tensor]:
        return self._layers[number].tensors

    def describe(self) -> str:
        kind = "pinned host memory" if self._pin else "host memory"
        pageable = f", of which {gib(self.host_bytes['pageable'])} could not be pinned" if self._refused else ""
        return f"host ({kind}, {gib(len(self.shape.layers) * self._layer_bytes)}{pageable})"

    @property
    def _layer_bytes(self) -> int:
        return block_bytes(self.shape.tensors.values(), self.shape.experts)

    def close(self) -> None:
        blocks = [block for _, block in sorted(self._layers.items())]
        self._layers.clear()
        self._memory.clear()
        self._packed.clear()
        if self._pin and blocks:
            torch.cuda.synchronize()  # kernels may read experts in place
        for block in blocks:
            block.close()
