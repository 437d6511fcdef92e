"""CPU experts of the scaled machine: vLLM's kernel on a core of its own, at the scaled machine's pace."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from torch import Tensor

from benchmarks.scaled.machine import ScaledMachine
from benchmarks.scaled.pacing import COMPUTATIONS, Pace, host_memory
from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.cpu_kernels.native import Native


class PacedExperts(Native):
    """The kernel of the slots on the scaled machine's other core; each expert takes the scaled machine's seconds.

    Loads read host memory, too: a computation ends no earlier than memory has served both.

    Only the arithmetic excludes the kernels of the layers: while it sleeps they run, as they would on a GPU.

    Raises:
        ConfigError: as ``Native``, or there is no scaled machine for these experts.
    """

    def __init__(self, shape: MoEShape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        super().__init__(shape, threads, activation, kernel)
        self.machine = ScaledMachine.of_environment(shape.expert_bytes)
        self._pace = Pace(COMPUTATIONS)
        self._memory = host_memory(self.machine.memory_bytes_per_second)
        self._bound = False

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        if not self._bound:  # its thread has inherited the forward's core
            os.sched_setaffinity(0, {self.machine.core})
            self._bound = True
        computed = len(ids[weights != 0].unique())
        end = time.perf_counter() + computed * self.machine.cpu_seconds
        end = max(end, self._memory.book(computed * self.machine.expert_bytes))
        out = super().run(x, weights, ids, experts)
        self.released.set()
        self._pace.until(end)
        return out

    def describe(self) -> str:
        return f"paced {super().describe()}"
