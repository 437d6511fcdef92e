"""Store in plain memory: the double of a store in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.storage.base import ExpertStore, allocate


class MemoryStore(ExpertStore):
    """Stores copies of the tensors, one block per layer."""

    addressable: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self._layers: dict[int, dict[str, Tensor]] = {}
        self._packed: set[int] = set()

    def holds(self, key: int) -> bool:
        return key in self._packed

    def reserve(self, experts: int) -> None:
        """Does nothing: memory is allocated when needed."""

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        layer, expert = self.shape.split(key)
        if layer not in self._layers:
            self._layers[layer] = allocate(self.shape.tensors, self.shape.experts, "cpu")
        for name, block in self._layers[layer].items():
            block[expert].copy_(tensors[name])
        self._packed.add(key)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for name, tensor in self.view(key).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        layer, expert = self.shape.split(key)
        if key not in self._packed:
            raise StoreError(f"expert {self.shape.split(key)} was never packed")
        return {name: block[expert] for name, block in self._layers[layer].items()}

    def layer(self, number: int) -> Mapping[str, Tensor]:
        return self._layers[number]

    def describe(self) -> str:
        return "memory"
