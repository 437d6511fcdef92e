"""The store of an engine whose layers belong to workers: experts are packed here and kept there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.distributed.client import WorkerClient
from vllm_spac.tiers.base import ExpertStore


class WorkerStore(ExpertStore):
    """Sends experts to the workers that serve their layers, and reads them there.

    Args:
        client: the workers; owned, opened here.
    """

    persistent: ClassVar[bool] = True
    offline: ClassVar[str] = "it is taken with --spac-executor processes"

    def __init__(self, shape: MoEShape, fingerprint: str, client: WorkerClient, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self.client = client
        client.open()

    def holds(self, key: int) -> bool:
        return self.client.holds(key)

    def reserve(self, experts: int) -> None:
        """Does nothing: each worker has its own disk."""

    def put(self, key: int, tensors: Mapping[str, Tensor]) -> None:
        self.client.put(key, tensors)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        for name, tensor in self.client.fetch(key).items():
            into[name].copy_(tensor)
        return self.shape.expert_bytes

    def drop(self, key: int) -> None:
        self.client.drop(key)

    def verify(self, threads: int) -> Iterator[str | None]:
        """Asks the workers again: what one could not read, it holds no more."""
        self.client.refresh()
        yield None

    def describe(self) -> str:
        return f"workers: {self.client.describe()}"

    def close(self) -> None:
        self.client.close()
