"""Runs single MoE layers of a loaded model outside of a step."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def run_layer(vllm_config: Any, module: Any, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Returns the output [rows, d] of a managed layer's routed experts, by the layer's own kernel.

    Args:
        vllm_config: of the engine.
        module: the managed layer.
        hidden: [rows, d].
        weights, ids: [rows, k]; k may differ from the model's.
    """
    from vllm.forward_context import set_forward_context

    with set_forward_context(None, vllm_config):
        return module.spac_forward(hidden, weights, ids)
