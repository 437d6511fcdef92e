"""Our layers as custom ops that write into caller-allocated outputs.

The ops are opaque to torch.compile. A CUDA graph after a splitting op is replayed on the input addresses that it was
captured with, so the output of an op that allocates its own memory would be ignored.

On a CPU vLLM compiles the routing, and ``spac_experts`` computes the experts alone; elsewhere vLLM's whole MoE layer is
one op, and so is ours, ``spac_moe_layer``.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_spac.integration.graphs import MOE_LAYER

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
    """Fake implementation of both ops for the compiler: does nothing, since outputs are allocated by the caller."""


if not hasattr(torch.ops.vllm, "spac_experts"):
    # Resolved here, because annotations are strings in this module and the op's schema is made from them.
    _run.__annotations__ = {
        **{name: torch.Tensor for name in ("hidden_states", "topk_weights", "topk_ids", "out")},
        "layer_name": LAYER_NAME,
        "return": None,
    }
    direct_register_custom_op(op_name="spac_experts", op_func=_run, mutates_args=["out"], fake_impl=_fake)


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


if not hasattr(torch.ops.vllm, MOE_LAYER.removeprefix("vllm::")):
    optional = ("shared_experts_input", "input_ids", "shared_out")
    _run_layer.__annotations__ = {  # resolved here, as above
        name: torch.Tensor | None if name in optional else torch.Tensor for name in _run_layer.__annotations__
    } | {"layer_name": LAYER_NAME, "return": None}
    direct_register_custom_op(
        op_name=MOE_LAYER.removeprefix("vllm::"),
        op_func=_run_layer,
        mutates_args=["hidden_states", "out", "shared_out"],
        fake_impl=_fake,
    )


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
