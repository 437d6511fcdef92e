"""Hooks of vLLM's routers and MoE layers: budgets cut, listeners and predictors observe; CUDA graphs are split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.custom_routing_router import CustomRoutingRouter
from vllm.platforms import current_platform

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.layers.custom_ops import layer_argument, moe_layer
from vllm_spac.methods.moe_spec.settings import RoutingRule

if TYPE_CHECKING:
    from vllm_spac.integration.layers.managed_experts import ManagedExperts

_SCORINGS = ("softmax", "sigmoid")
# Modules of vLLM's models that read the weights of a layer of experts themselves, where they expect all of them.
_READERS = {"FlintBf16DecodeMoE": "Flint's decode kernel for a GPU of compute capability 10"}


def install(model: torch.nn.Module, layers: Iterable[ManagedExperts]) -> None:
    """Makes every router of a managed layer pass its choice through ``layer.spac_route``.

    Where CUDA graphs are possible, the layer also becomes an op that graphs can be split at. Not on a CPU: there vLLM
    compiles the layer with the rest of the model instead of running an op, and an op would change the numbers.

    Raises:
        UnsupportedError: a layer is routed by the code of transformers, whose choice vLLM's router only passes on; or
            is of a class that is not managed, and would hold all of its experts; or the model reads its weights.
    """
    managed = {id(layer): layer for layer in layers}
    runner: Any
    for runner in model.modules():
        if (reader := _READERS.get(type(runner).__name__)) is not None:
            raise UnsupportedError(
                f"spac: {reader} reads experts past vLLM's fused layer, where slots are; serve this model without "
                "--plugin spac"
            )
        found = getattr(runner, "routed_experts", None)
        layer = managed.get(id(found))
        if layer is None and isinstance(found, RoutedExperts):
            raise UnsupportedError(
                f"spac: {found.layer_name} is of vLLM's class {type(found).__name__}, whose experts the plugin does "
                "not manage; serve this model without --plugin spac"
            )
        if layer is not None:
            if hasattr(runner, "_moe_state"):  # of vLLM's Transformers backend
                raise UnsupportedError(
                    f"spac: transformers routes {layer.layer_name} itself, and the plugin needs vLLM's router; use an "
                    "architecture that vLLM builds, or whose experts its Transformers backend routes"
                )
            layer.spac_rule = rule_of(runner.router)
            runner.router._compute_routing = _budgeted(runner.router._compute_routing, layer)
            if not current_platform.is_cpu():
                assert callable(runner._forward_entry)  # without this attribute vLLM would still call its own op
                runner._forward_entry = moe_layer(shared=runner.shared_experts is not None)


def observe(runner: Any, chosen: Callable[[Tensor, Tensor], None]) -> None:
    """Passes what the router of a layer that is not managed chooses on to ``chosen``: weights and ids [rows, k].

    Args:
        runner: vLLM's ``MoERunner`` of the layer, before the first forward of its model.
    """
    layer = runner.routed_experts

    def route(hidden: Tensor, logits: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        chosen(weights, ids)
        return weights, ids

    layer.spac_route = route
    runner.router._compute_routing = _budgeted(runner.router._compute_routing, layer)


def _budgeted(compute: Callable[..., tuple[Tensor, Tensor]], layer: Any):
    @functools.wraps(compute)
    def routing(hidden_states: Tensor, router_logits: Tensor, indices_type: torch.dtype | None, **kwargs: Any):
        weights, ids = compute(hidden_states, router_logits, indices_type, **kwargs)
        if not torch.compiler.is_compiling():
            return layer.spac_route(hidden_states, router_logits, weights, ids)
        out = torch.empty_like(weights), torch.empty_like(ids)
        name = layer_argument(layer.layer_name)
        torch.ops.vllm.spac_route(hidden_states, router_logits, weights, ids, *out, name)
        return out

    return routing


def rule_of(router: Any) -> RoutingRule:
    """Derives the routing rule of a vLLM router from its attributes; an unknown scoring counts as custom."""
    grouped = getattr(router, "use_grouped_topk", hasattr(router, "num_expert_group"))
    scoring = getattr(router, "scoring_func", "softmax")
    known = scoring in _SCORINGS and getattr(router, "_hash_indices_table", None) is None
    custom = isinstance(router, CustomRoutingRouter) or getattr(router, "custom_routing_function", None) is not None
    return RoutingRule(
        scoring=scoring if known else "softmax",
        renormalize=bool(getattr(router, "renormalize", True)),
        scale=float(getattr(router, "routed_scaling_factor", 1.0)),
        bias=getattr(router, "e_score_correction_bias", None),
        groups=router.num_expert_group if grouped else None,
        top_groups=router.topk_group if grouped else None,
        custom=custom or not known,
    )
