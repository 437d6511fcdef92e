"""CPU experts in plain torch: where the compiled kernels are missing, and what tests compare these with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import CpuExperts, Kernel
from vllm_spac.errors import ConfigError
from vllm_spac.kernels.reference.dequantise import dequantise
from vllm_spac.kernels.reference.grouped_gemm import Activation, activate, rounded_rows

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


class Torch(CpuExperts):
    """Computes one expert after the other by matrix products.

    Rounds to the dtype of x where vLLM's kernel does, except that the sum over experts is computed and returned in
    float32. Packed experts become dequantised weights, one after the other, as in the twin of our kernel.
    """

    reads_packed: ClassVar[bool] = True

    def __init__(self, shape: MoEShape, threads: int, activation: str, kernel: Kernel | None = None) -> None:
        super().__init__(shape, threads, activation, kernel)
        if activation not in _ACTIVATIONS:
            raise ConfigError(
                f"spac: CPU experts in torch have no activation {activation!r}, only {', '.join(_ACTIVATIONS)}; "
                "use --spac-cpu-experts off"
            )

    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        counted = ids.masked_fill(weights == 0, -1)
        bias13, bias2 = experts.get("w13_bias"), experts.get("w2_bias")
        for expert in counted.unique().tolist():
            if expert < 0:
                continue
            rows, places = (counted == expert).nonzero(as_tuple=True)
            hidden = self._product(x[rows], experts, "w13", expert, None if bias13 is None else bias13[expert])
            acted = activate(hidden.float(), cast(Activation, self.activation), x.dtype).to(x.dtype)
            out = self._product(acted, experts, "w2", expert, None if bias2 is None else bias2[expert])
            total.index_add_(0, rows, out.float() * weights[rows, places, None].float())
        return total

    def _product(self, x: Tensor, experts: Mapping[str, Tensor], name: str, expert: int, bias: Tensor | None) -> Tensor:
        """Returns x W^T + bias in x's dtype, W being a matrix of an expert."""
        weight, kind = experts[f"{name}_weight"][expert], self.shape.packed
        if kind is None:
            return F.linear(x, weight, bias)
        scales, (rows, columns), dtype = experts[f"{name}_scale"][expert], weight.shape, kind.weight_dtype(x.dtype)
        weight = dequantise(kind, weight, scales, rows, columns * kind.per_byte, dtype)
        return F.linear(rounded_rows(x, kind).to(dtype), weight, None if bias is None else bias.to(dtype)).to(x.dtype)

    def describe(self) -> str:
        return "torch"
