"""Kernels of experts on a CPU: vLLM's fused one, callable from any thread; and ours, for those that a GPU reads."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_spac.core import MoEShape
from vllm_spac.cpu_kernels.base import Kernel
from vllm_spac.cpu_kernels.simd import Simd
from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.layers import quant_schemes

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExpertsModular
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

SIMD = "simd"  # in place of an instruction set: our kernel, for experts that vLLM has none for on a CPU
_OF_SIDE = ("scale", "zp", "bias")  # tensors in vLLM's description of one projection


def of(layer: RoutedExperts) -> Kernel | None:
    """The kernel that ``layer`` runs its slots with, without its state; None if it runs on a GPU.

    Raises:
        UnsupportedError: it runs on the CPU, but the plugin cannot call it on its own.
    """
    if layer.spac.device.type != "cpu":
        return None
    if quant_schemes.is_by_expert(layer):
        return _applied(layer)
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


def of_worker(isa: str, activation: str, shape: MoEShape) -> Kernel:
    """As ``named``; with ``SIMD``, ours, for experts of ``shape`` in the checkpoint's layout or packed.

    It runs in as many threads as torch has, wherever the system puts them: workers share a machine.

    Raises:
        ConfigError: ours has no such activation, or was not compiled.
    """
    if isa != SIMD:
        return named(isa, activation)
    threads = torch.get_num_threads()
    return Simd(shape, threads, activation, cpus=[-1] * threads).run


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


def _applied(layer: RoutedExperts) -> Kernel:
    """The kernel of a layer with quantised experts, by vLLM's own code with other scales, zero points and biases."""
    serves = layer.quant_method.moe_kernel.fused_experts
    settings, activation = serves.quant_config, layer.activation
    names = {id(param): name for name, param in layer.spac_kernel_parameters.items()}
    w1, w2 = (names[id(getattr(layer, f"{name}_weight"))] for name in ("w13", "w2"))
    sides = {side: getattr(settings, side) for side in ("_w1", "_w2")}
    read = {
        side: {f: names[id(t)] for f in _OF_SIDE if (t := getattr(desc, f)) is not None} for side, desc in sides.items()
    }
    applied: dict[int, FusedMoEExpertsModular] = {}  # by mapping of experts, which stays the same for a layer

    def run(x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        out = torch.empty_like(x)
        if not len(x):  # vLLM's kernel ends the process
            return out
        if (kernel := applied.get(id(experts))) is None:
            found = {s: replace(desc, **{f: experts[n] for f, n in read[s].items()}) for s, desc in sides.items()}
            kernel = applied[id(experts)] = copy.copy(serves)
            kernel.quant_config = replace(settings, **found)
        nothing = x.new_empty(0)
        kernel.apply(
            out,
            x,
            experts[w1],
            experts[w2],
            weights,
            ids.int(),
            activation,
            len(experts[w1]),
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=nothing,
            workspace2=nothing,
            expert_tokens_meta=None,
            apply_router_weight_on_input=False,
        )
        return out

    return run
