"""The kernel of the slots (on a CPU machine vLLM's fused MoE), applied to experts without a slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import CpuExperts, Kernel
from vllm_spac.errors import ConfigError


class Native(CpuExperts):
    """The layer's own kernel: the result of a row whose experts all run here is bitwise equal to that of the slots.

    vLLM's CPU kernels share one scratch buffer per process, which the larger call reallocates: two concurrent calls
    overwrite each other's data, and one may crash. Hence ``exclusive``.
    """

    layout: ClassVar[Literal["plain", "kernel"]] = "kernel"
    exclusive: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        super().__init__(shape, threads, activation, kernel)
        if kernel is None:
            raise ConfigError("spac: cpu_kernel=native needs layers whose kernel runs on the CPU; use simd")
        self._kernel = kernel

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        return self._kernel(x, weights, ids, experts)

    def describe(self) -> str:
        return "native (the kernel of the slots)"
