"""A dictionary: the template for new stores, and the double in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.errors import StoreError
from vllm_spac.tiers.base import ExpertStore


class MemoryStore(ExpertStore):
    """Keeps clones of the tensors."""

    offline: ClassVar[str] = "it is the double of a store in tests"

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self._experts: dict[int, dict[str, Tensor]] = {}

    def holds(self, key: int) -> bool:
        return key in self._experts

    def reserve(self, experts: int) -> None:
        """A dictionary has room for any number."""

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        self._experts[key] = {name: tensors[name].clone() for name in self.shape.tensors}

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for name, tensor in self.view(key).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def view(self, key: int) -> dict[str, Tensor]:
        if key not in self._experts:
            raise StoreError(f"expert {self.shape.split(key)} was never packed")
        return self._experts[key]

    def describe(self) -> str:
        return "memory"
