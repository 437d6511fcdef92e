"""Hooks of vLLM's routers: layers that transformers routes by itself are refused."""

from __future__ import annotations

import pytest
import torch

from vllm_spac.errors import UnsupportedError
from vllm_spac.integration.layers import routers


class Layer(torch.nn.Module):
    layer_name = "model.layers.0.mlp.experts"


class Runner(torch.nn.Module):
    def __init__(self, routed_experts: Layer) -> None:
        super().__init__()
        self.routed_experts = routed_experts
        self._moe_state = None


def test_a_layer_that_transformers_routes_is_refused() -> None:
    """Its router's logits are the chosen experts' weights, which a budget would take for scores of all experts."""
    layer = Layer()
    with pytest.raises(UnsupportedError, match=r"transformers routes model\.layers\.0\.mlp\.experts itself"):
        routers.install(torch.nn.Sequential(Runner(layer)), [layer])
    routers.install(torch.nn.Sequential(Runner(Layer())), [layer])  # a stock layer's


def test_vllm_s_runner_for_such_layers_has_what_the_check_looks_at() -> None:
    from vllm.model_executor.models.transformers.moe import TransformersMoERunner

    assert "_moe_state" in TransformersMoERunner.__init__.__code__.co_names
