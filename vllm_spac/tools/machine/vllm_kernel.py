"""vLLM's fused MoE kernel for CPUs, for ``vllm-spac profile``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vllm_spac.integration.hooks import device
from vllm_spac.tools.machine import measure


def cpu_kernel() -> measure.Kernel | None:
    """The kernel for unquantised experts on this machine; None if vLLM was not built for the CPU."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if not hasattr(torch.ops._C, "cpu_fused_moe"):
        return None
    device.request_amx()
    special = (cpu_moe.X86CPUUnquantizedExperts, cpu_moe.ArmCPUUnquantizedExperts, cpu_moe.PowerCPUUnquantizedExperts)
    isa = next((cls.isa for cls in special if cls._supports_current_device()), cpu_moe.CPUUnquantizedExperts.isa)

    def prepare(w13: Tensor, w2: Tensor) -> Callable[[Tensor, Tensor, Tensor], object]:
        w13, w2 = (ops.cpu_prepack_moe_weight(weight, isa) for weight in (w13, w2))

        def run(x: Tensor, weights: Tensor, ids: Tensor) -> None:
            ops.cpu_fused_moe(torch.empty_like(x), x, w13, w2, None, None, weights, ids, "silu", isa)

        return run

    return measure.Kernel(f"vLLM's fused MoE kernel ({isa})", prepare)
