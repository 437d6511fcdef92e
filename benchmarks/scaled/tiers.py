"""Host memory behind a link of the scaled machine's rate: the store of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.pacing import LOADS, Link, Pace
from vllm_spac.core import MoEShape
from vllm_spac.storage.host import HostStore


class PacedStore(HostStore):
    """Host memory whose reads, by whatever thread, pass over one link in the order in which they begin.

    Raises:
        ConfigError: there is no scaled machine for these experts, see ``ScaledMachine.of_environment``.
    """

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        self._link = Link(ScaledMachine.of_environment(shape.expert_bytes).link_bytes_per_second)
        self._pace = Pace(LOADS)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        end = self._link.book(self.shape.expert_bytes)
        moved = super().read(key, into)
        self._pace.until(end)
        return moved

    def describe(self) -> str:
        return f"paced {super().describe()}"
