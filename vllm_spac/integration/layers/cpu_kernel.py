"""vLLM's fused MoE kernel for CPUs, callable on any experts in its layout and from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.errors import UnsupportedError
from vllm_spac.executors.base import Kernel
from vllm_spac.integration import compat
from vllm_spac.profiling import measure

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts


def of(layer: RoutedExperts) -> Kernel | None:
    """The kernel that ``layer`` runs its slots with, without its state; None if it runs on a GPU.

    Raises:
        UnsupportedError: it runs on the CPU, but the plugin cannot call it on its own.
    """
    if layer.spac.device.type != "cpu":
        return None
    if (isa := isa_of(layer)) is None:
        kernel = type(layer.quant_method.moe_kernel.fused_experts).__name__
        raise UnsupportedError(
            f"spac: cpu_experts (--spac-cpu-experts) does not support the kernel {kernel} of "
            f"{layer.layer_name}; use off"
        )
    return named(isa, layer.activation.value)


def isa_of(layer: RoutedExperts) -> str | None:
    """The instruction set that the CPU kernel of ``layer`` uses; None for a kernel that is not vLLM's fused one."""
    serves = layer.quant_method.moe_kernel.fused_experts
    return None if getattr(serves, "_use_zentorch", False) else getattr(serves, "isa", None)


def named(isa: str, activation: str) -> Kernel:
    """vLLM's fused kernel for an instruction set and an activation; no layer need exist in this process."""
    from vllm import _custom_ops as ops

    def run(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        out = torch.empty_like(x)
        biases = experts.get("w13_bias"), experts.get("w2_bias")
        ops.cpu_fused_moe(
            out, x, experts["w13_weight"], experts["w2_weight"], *biases, weights, ids, activation, isa, False
        )
        return out

    return run


def to_profile() -> measure.Kernel | None:
    """The kernel for unquantised experts on this machine; None if vLLM was not built for the CPU."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        return None
    compat.request_amx()
    special = (cpu_moe.X86CPUUnquantizedExperts, cpu_moe.ArmCPUUnquantizedExperts, cpu_moe.PowerCPUUnquantizedExperts)
    isa = next((cls.isa for cls in special if cls._supports_current_device()), cpu_moe.CPUUnquantizedExperts.isa)

    def prepare(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], object]:
        w13, w2 = (ops.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2))

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> None:
            ops.cpu_fused_moe(torch.empty_like(x), x, w13, w2, None, None, weights, ids, "silu", isa)

        return run

    return measure.Kernel(f"vLLM's fused MoE kernel ({isa})", prepare)
