"""vLLM's ``RoutedExperts`` with experts managed by the plugin: same parameters, same kernel, slots as expert ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_spac.cache.sizing import MoEWidths
from vllm_spac.execution.base import Execution
from vllm_spac.integration.layers import quant_schemes, triton_tiles
from vllm_spac.integration.layers.custom_ops import run_experts
from vllm_spac.integration.layers.staged_experts import StagedExperts
from vllm_spac.kernels.formats import activation_of
from vllm_spac.methods.moe_spec.control import BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule


class SlotKernel:
    """vLLM's kernel of one layer as a ``LayerKernel``.

    Args:
        layer: the layer; the kernel reads its map from experts to slots.
        run: (x, weights, ids) -> output, vLLM's ``forward_modular``.
        on_cpu: whether the kernel runs on a CPU.
    """

    def __init__(self, layer: ManagedExperts, run: Callable[[Tensor, Tensor, Tensor], Tensor], on_cpu: bool) -> None:
        self._layer, self._run = layer, run
        self.activation: str = layer.spac_activation or layer.activation.value
        self.takes_slots = on_cpu
        self.by_expert = on_cpu and quant_schemes.is_by_expert(layer)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, slot_of: Tensor | None = None, rows: int = 0) -> Tensor:
        if slot_of is None:
            return self._run(x, weights, ids)
        self._layer._expert_map = slot_of
        with triton_tiles.of_layer(self._layer.spac_execution.shape.experts, rows):
            return self._run(x, weights, ids)


class ManagedExperts(StagedExperts):
    """Mixin placed before ``RoutedExperts`` (or a subclass of it) while a managed model is built.

    ``StagedExperts`` loads the weights; an ``Execution`` decides what the kernel runs, and where.
    """

    spac_execution: Execution  # from ``attach`` on

    def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(layer_name, *args, **kwargs)
        self.spac_rule = RoutingRule()
        self.spac_kernel = SlotKernel(self, super().forward_modular, self.spac.on_cpu)

    @property
    def spac_activation(self) -> str | None:
        """Its activation as our kernels name it, with its limit; None if they do not compute it."""
        return activation_of(self.activation.value, self.swiglu_limit, self.swiglu_alpha, self.swiglu_beta)

    @property
    def spac_widths(self) -> MoEWidths:
        moe = self.moe_config
        return MoEWidths(self.top_k, moe.hidden_dim, moe.intermediate_size_per_partition)

    def attach(self, execution: Execution) -> None:
        """Sets the execution that runs the layer, and makes its slots the parameters of vLLM's kernel.

        If each expert has a slot, these are the slots of this layer alone.
        """
        self.spac_execution = execution
        if not self._converts:
            return
        experts, index = execution.shape.experts, self.spac_index
        own = slice(index * experts, (index + 1) * experts) if execution.holds_all else slice(None)
        if not execution.holds_all:
            self.local_num_experts = execution.residency.slots
            if self.spac.on_cpu:
                self.global_num_experts = execution.residency.slots
        self.spac_conversion.attach({name: slots[own] for name, slots in execution.tensors.items()})

    @property
    def local_of(self) -> Tensor | None:
        """As in ``Execution``."""
        held = self.expert_map_manager.expert_map
        return None if held is None else held.cpu().long()

    def budgeted(self) -> BudgetedLayer:
        """Describes the layer for the budget's control; possible before it is packed."""
        return BudgetedLayer(
            self.layer_name, self.moe_config.num_experts, self.top_k, self.spac_rule, self._resident_experts
        )

    def _resident_experts(self) -> Tensor:
        return self.spac_execution.resident(self.spac_index).to(self.spac.device)

    def spac_route(self, hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Applies the budget to the router's choice; called by the hooked router."""
        runtime = self.spac.runtime
        if runtime is None:
            return weights, ids
        return runtime.rerouter.route(self.spac_number, hidden, logits, weights, ids)

    def forward_modular(
        self,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ):
        """Computes the routed experts for x [tokens, hidden] with weights and ids [tokens, top_k] of the router."""
        if not torch.compiler.is_compiling():
            return self.spac_forward(x, topk_weights, topk_ids)
        out = torch.empty_like(x)
        run_experts(x, topk_weights, topk_ids, out, self.layer_name)
        return out

    def spac_forward(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Returns the layer's output [tokens, hidden], computed by its execution."""
        runtime = self.spac.runtime
        assert runtime is not None, "a layer runs before its weights are loaded"
        return runtime.forward(self.spac_execution, self.spac_index, x, topk_weights, topk_ids, self.spac_kernel)
