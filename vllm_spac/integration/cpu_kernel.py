"""vLLM's fused MoE kernel of a CPU machine, over any experts in its layout and from any thread."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_spac.cpu_experts.base import Kernel
from vllm_spac.errors import UnsupportedError


def of(layer) -> Kernel | None:
    """The kernel that serves the slots of ``layer``, without its state; None where it runs on a GPU.

    Raises:
        UnsupportedError: it runs on the CPU, but is one that the plugin cannot call by itself.
    """
    if layer.spac.device.type != "cpu":
        return None
    from vllm import _custom_ops as ops

    serves = layer.quant_method.moe_kernel.fused_experts
    isa, activation = getattr(serves, "isa", None), layer.activation.value
    if isa is None or getattr(serves, "_use_zentorch", False):
        raise UnsupportedError(
            f"spac: cpu_experts (--spac-cpu-experts) does not know the kernel {type(serves).__name__} of "
            f"{layer.layer_name}; use off"
        )

    def run(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        out = torch.empty_like(x)
        biases = experts.get("w13_bias"), experts.get("w2_bias")
        ops.cpu_fused_moe(
            out, x, experts["w13_weight"], experts["w2_weight"], *biases, weights, ids, activation, isa, False
        )
        return out

    return run
