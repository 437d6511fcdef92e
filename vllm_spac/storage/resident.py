"""The slots as the store: every expert has a slot and is packed directly into it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, allocate


class ResidentStore(ExpertStore):
    """Owns the slots: ``tensors`` of shape [all experts, ...] on ``device``; expert ``key`` is row ``key``."""

    addressable: ClassVar[bool] = True
    tensors: Mapping[str, Tensor]
    offline: ClassVar[str] = "it is taken where every expert has a slot, by --spac-slots 100%"

    def __init__(
        self, shape: MoEShape, fingerprint: str, folder: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__(shape, fingerprint, folder)
        self.tensors = allocate(shape.tensors, shape.total, device)
        starts = range(0, shape.total, shape.experts)
        self._layers = [{name: t[i : i + shape.experts] for name, t in self.tensors.items()} for i in starts]
        self._packed: set[int] = set()

    def holds(self, key: int) -> bool:
        return key in self._packed

    def reserve(self, experts: int) -> None:
        """Does nothing: the slots are allocated already."""

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        for name, slots in self.tensors.items():
            slots[key].copy_(tensors[name])
        self._packed.add(key)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for name, slot in self.view(key).items():
            if into[name].data_ptr() != slot.data_ptr():
                into[name].copy_(slot)
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        if key not in self._packed:
            raise StoreError(f"expert {self.shape.split(key)} was never packed")
        return {name: slots[key] for name, slots in self.tensors.items()}

    def layer(self, number: int) -> Mapping[str, Tensor]:
        return self._layers[number]

    def describe(self) -> str:
        return "resident (every expert has a slot, nothing is stored elsewhere)"
