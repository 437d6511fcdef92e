"""Host memory behind a link of the scaled machine's rate: the store of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.pacing import LOADS, Link, Pace, host_memory
from vllm_spac.core import MoEShape
from vllm_spac.storage.host import HostStore


class PacedStore(HostStore):
    """Host memory whose reads, by whatever thread, pass over one link in the order in which they begin.

    CPU experts read it, too: a load ends no earlier than memory has served both.

    Raises:
        ConfigError: there is no scaled machine for these experts, see ``ScaledMachine.of_environment``.
    """

    def __init__(self, shape: MoEShape, fingerprint: str, folder: Path | None = None) -> None:
        super().__init__(shape, fingerprint, folder)
        machine = ScaledMachine.of_environment(shape.expert_bytes)
        self._channels = Link(machine.link_bytes_per_second), host_memory(machine.memory_bytes_per_second)
        self._pace = Pace(LOADS)

    def read(self, key: int, into: Mapping[str, Tensor]) -> int:
        end = max(channel.book(self.shape.expert_bytes) for channel in self._channels)
        moved = super().read(key, into)
        self._pace.until(end)
        return moved

    def describe(self) -> str:
        return f"paced {super().describe()}"
