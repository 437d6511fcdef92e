"""Store in host memory, pinned if there is a GPU: one block per layer, in the layout of the kernel.

Where kernels read experts in place, all layers are pinned before any is packed, so that a driver that refuses is known
before weights are read. Then as many layers as it does are pinned, beside a block for the experts of one: threads read
what a layer needs of the others to it (``execution.expert_delivery``). Where experts are only copied, layers are pinned
in the order in which they are packed, until the driver refuses one. That one and those after it are pageable: the
driver copies through a buffer of its own. All layers are read as often, so no order is better.

Where it has no room for all experts that kernels read in place, some *settle*: they have slots for good, and no copy in
host memory. They are the last ones of each layer, whose part of its block is never written, and so takes no memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm_spac.core import MoEShape, settled_experts
from vllm_spac.errors import PinError, StoreError
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
        self._refused = ""  # why the driver pins no more
        self._held = [shape.experts] * len(shape.layers)  # experts of each layer in host memory: the first ones
        self._slot_of: dict[int, int] = {}  # of those that have settled

    def reserve_slots(self, count: int, slots: Mapping[str, Tensor]) -> None:
        layers, experts = len(self.shape.layers), self.shape.experts
        self.tensors, self.settled = slots, settled_experts(layers, experts, count)
        self._slot_of = {key: slot for slot, key in enumerate(self.settled)}
        for key in self.settled:
            self._held[key // experts] -= 1

    def holds(self, key: int) -> bool:
        return key in self._packed

    def reserve(self, experts: int) -> None:
        ranks = -(-experts // self.shape.total)
        needed, available = ranks * self._bytes, available_host_bytes()
        if experts and needed + _RESERVE > available:
            raise StoreError(
                f"spac: store=host needs {gib(needed)} of host memory for {experts} experts, "
                f"{gib(available)} are available (1 GiB is left to the system); "
                "use --spac-store disk --spac-disk-dir DIR, or a machine with more memory"
            )

    def pin(self) -> None:
        if not (self._pin and self.in_place):
            return
        for layer in range(len(self.shape.layers)):
            self._add(layer)
        if not self._refused:
            return
        pinned = [layer for layer, block in self._layers.items() if block.pinned]
        while self._staging is None:
            try:
                self._staging = HostBlock.staging(self.shape.tensors, self.shape.experts)
            except PinError:
                if not pinned:
                    raise
                self._layers[pinned.pop()].close()  # in its place
        self._warn()

    def in_reach(self, key: int) -> bool:
        return self._staging is None or key in self._slot_of or self._layers[key // self.shape.experts].pinned

    def staging(self) -> Mapping[str, Tensor]:
        return super().staging() if self._staging is None else self._staging.tensors

    @property
    def host_bytes(self) -> dict[str, int]:
        blocks = self._layers.values()
        pinned = sum(block.nbytes for block in blocks if block.pinned)
        pageable = sum(block.nbytes for block in blocks) - pinned
        return {"pinned": pinned + (0 if self._staging is None else self._staging.nbytes), "pageable": pageable}

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        layer, expert = self.shape.split(key)
        if key not in self._slot_of and layer not in self._layers:
            self._add(layer)
        self._packed.add(key)
        for name, there in self.view(key).items():
            there.copy_(tensors[name])

    def _add(self, layer: int) -> None:
        """Allocates a layer, pinned unless the driver has refused one."""
        pin = self._pin and not self._refused
        block = HostBlock(self.shape.tensors, self.shape.experts, pin, self._held[layer])
        self._refused = self._refused or block.refused
        self._layers[layer], self._memory[layer] = block, rows_of(block.tensors)
        if block.refused and not self.in_place:
            self._warn()

    def _warn(self) -> None:
        pinned = sum(block.nbytes for block in self._layers.values() if block.pinned)
        logger.warning(
            "spac: %s of %s of experts in host memory are pinned (%s), the first layers; the others are copied from "
            "pageable memory, which is slower; %s",
            *(gib(pinned), gib(self._bytes), self._refused, pin_remedy()),
        )

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        layer, expert = self._place(key)
        assert key not in self._slot_of, f"expert {key} has its slot for good"
        slot = Slot.of(into)
        for name, rows in self._memory[layer].items():
            slot.fill(name, rows[expert])
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        layer, expert = self._place(key)
        if (slot := self._slot_of.get(key)) is not None:
            assert self.tensors is not None
            return {name: slots[slot] for name, slots in self.tensors.items()}
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
        settled = f", {len(self.settled)} experts have slots for good" if self.settled else ""
        return f"host ({kind}, {gib(self._bytes)}{pageable}{settled})"

    @property
    def _bytes(self) -> int:
        return sum(block_bytes(self.shape.tensors.values(), held) for held in self._held)

    def close(self) -> None:
        blocks = [block for _, block in sorted(self._layers.items())]
        blocks += [] if self._staging is None else [self._staging]
        self._layers.clear()
        self._memory.clear()
        self._packed.clear()
        if self._pin and blocks:
            torch.cuda.synchronize()  # kernels may read experts in place
        for block in blocks:
            block.close()
