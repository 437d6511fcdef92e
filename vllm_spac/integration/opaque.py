"""Our experts as one custom op that writes into a caller-allocated output.

torch.compile does not look inside, and a graph that is split at the op keeps its addresses.
"""

from __future__ import annotations

import torch
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.utils.torch_utils import direct_register_custom_op

LAYER_NAME = moe_runner._layer_name_type


def _run(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    layer_name: LAYER_NAME,
) -> None:
    runner = moe_runner.get_layer_from_name(moe_runner._resolve_layer_name(layer_name))
    out.copy_(runner.routed_experts.spac_forward(hidden_states, topk_weights, topk_ids))


def _fake(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    out: torch.Tensor,
    layer_name: LAYER_NAME,
) -> None:
    return None


if not hasattr(torch.ops.vllm, "spac_experts"):
    # Resolved here, because annotations are strings in this module and the op's schema is made from them.
    for function in (_run, _fake):
        function.__annotations__ = {
            **{name: torch.Tensor for name in ("hidden_states", "topk_weights", "topk_ids", "out")},
            "layer_name": LAYER_NAME,
            "return": None,
        }
    direct_register_custom_op(op_name="spac_experts", op_func=_run, mutates_args=["out"], fake_impl=_fake)


def run_experts(hidden_states, topk_weights, topk_ids, out, layer_name: str) -> None:
    """``out[:] = experts(hidden_states)``, opaque to the compiler; shapes as in ``spac_forward``."""
    torch.ops.vllm.spac_experts(hidden_states, topk_weights, topk_ids, out, layer_argument(layer_name))


def layer_argument(layer_name: str):
    """A layer's name as vLLM passes it to its own MoE op."""
    return moe_runner.LayerName(layer_name) if moe_runner._USE_LAYERNAME else layer_name
