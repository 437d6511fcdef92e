"""Our layers as custom ops that write into caller-allocated outputs.

The ops are opaque to torch.compile. A CUDA graph after a splitting op is replayed on the input addresses that it was
captured with, so the output of an op that allocates its own memory would be ignored.

On a CPU vLLM compiles the routing, and ``spac_experts`` computes the experts alone; elsewhere vLLM's whole MoE layer is
one op, and so is ours, ``spac_moe_layer``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_spac.integration.hooks.graphs import MOE_LAYER

LAYER_NAME = moe_runner._layer_name_type


def _run(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    layer_name: Any,  # LAYER_NAME, which depends on vLLM's version
) -> None:
    runner = moe_runner.get_layer_from_name(moe_runner._resolve_layer_name(layer_name))
    out.copy_(runner.routed_experts.spac_forward(hidden_states, topk_weights, topk_ids))


def _fake(*arguments: Any) -> None:
    """Fake implementation of all ops for the compiler: does nothing, since outputs are allocated by the caller."""


def _register(name: str, function: Callable[..., None], mutates: list[str], optional: tuple[str, ...] = ()) -> None:
    """Registers ``function``, whose arguments are tensors and ``layer_name``, as the op ``vllm::name``, once."""
    if hasattr(torch.ops.vllm, name):
        return
    # Resolved here, because annotations are strings in this module and the op's schema is made from them.
    function.__annotations__ = {
        argument: torch.Tensor | None if argument in optional else torch.Tensor for argument in function.__annotations__
    } | {"layer_name": LAYER_NAME, "return": None}
    direct_register_custom_op(op_name=name, op_func=function, mutates_args=mutates, fake_impl=_fake)


_register("spac_experts", _run, ["out"])


def run_experts(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor, layer_name: str
) -> None:
    """``out[:] = experts(hidden_states)``, opaque to the compiler; shapes as in ``spac_forward``."""
    torch.ops.vllm.spac_experts(hidden_states, topk_weights, topk_ids, out, layer_argument(layer_name))


def layer_argument(layer_name: str):
    """Returns a layer's name in the form that vLLM passes to its own MoE op."""
    return moe_runner.LayerName(layer_name) if moe_runner._USE_LAYERNAME else layer_name


def _run_layer(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    shared_experts_input: torch.Tensor | None,
    input_ids: torch.Tensor | None,
    out: torch.Tensor,
    shared_out: torch.Tensor | None,
    layer_name: Any,  # LAYER_NAME, which depends on vLLM's version
) -> None:
    runner = moe_runner.get_layer_from_name(moe_runner._resolve_layer_name(layer_name))
    result = runner._forward_impl(hidden_states, router_logits, shared_experts_input, input_ids)
    if shared_out is not None:
        shared, result = result
        shared_out.copy_(shared)
    out.copy_(result)


_register(
    MOE_LAYER.removeprefix("vllm::"),
    _run_layer,
    ["hidden_states", "out", "shared_out"],
    optional=("shared_experts_input", "input_ids", "shared_out"),
)


def _route(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out_weights: torch.Tensor,
    out_ids: torch.Tensor,
    layer_name: Any,  # LAYER_NAME, which depends on vLLM's version
) -> None:
    layer = moe_runner.get_layer_from_name(moe_runner._resolve_layer_name(layer_name)).routed_experts
    weights, ids = layer.spac_route(hidden_states, router_logits, topk_weights, topk_ids)
    out_weights.copy_(weights)
    out_ids.copy_(ids)


_register("spac_route", _route, ["out_weights", "out_ids"])


def _choose(hidden: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    scores = torch.nn.functional.linear(hidden.to(gate.dtype), gate.flatten(0, 1), bias.flatten())
    out[: len(hidden)] = scores.unflatten(1, bias.shape).topk(out.shape[2])[1]


_register("spac_choose", _choose, ["out"])


def write_choice(hidden: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the experts that several routers score highest, the best first; opaque to the compiler.

    Args:
        hidden: [rows, d].
        gate, bias: [routers, experts, d] and [routers, experts], of the routers.
        out: int [at least rows, routers, k].
    """
    torch.ops.vllm.spac_choose(hidden, gate, bias, out)


def moe_layer(shared: bool):
    """Returns a replacement for ``MoERunner._forward_entry``, with its arguments and results; may be compiled.

    Args:
        shared: whether the layer has shared experts.
    """

    def forward(
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None,
        input_ids: torch.Tensor | None,
        layer_name: Any,
        hidden_dim_unpadded: int,
    ):
        width = hidden_dim_unpadded or hidden_states.shape[-1]
        out = hidden_states.new_empty((*hidden_states.shape[:-1], width))
        shared_out = None
        if shared:
            shared_out = torch.empty_like(hidden_states if shared_experts_input is None else shared_experts_input)
        torch.ops.vllm.spac_moe_layer(
            hidden_states, router_logits, shared_experts_input, input_ids, out, shared_out, layer_name
        )
        return (shared_out, out) if shared else out

    return forward
