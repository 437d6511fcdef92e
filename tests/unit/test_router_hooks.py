"""Hooks of vLLM's routers: layers that transformers routes by itself, and those that are not managed, are refused."""

from __future__ import annotations

import importlib

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
    routers.install(torch.nn.Sequential(Runner(Layer())), [layer])  # of another kind


@pytest.mark.parametrize("module, name", [("dbrx", "DbrxExperts"), ("gpt_oss", "GptOssRoutedExperts")])
def test_a_layer_of_vllm_that_is_not_managed_is_refused(module: str, name: str) -> None:
    """It would keep all its experts in fast memory beside managed layers, and without one the reason would be lost."""
    cls = getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name)
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    layer.layer_name = "model.layers.0.mlp.experts"
    with pytest.raises(UnsupportedError, match=rf"model\.layers\.0\.mlp\.experts is of vLLM's class {name}"):
        routers.install(torch.nn.Sequential(Runner(layer)), [])


def test_vllm_s_runner_for_such_layers_has_what_the_check_looks_at() -> None:
    from vllm.model_executor.models.transformers.moe import TransformersMoERunner

    assert "_moe_state" in TransformersMoERunner.__init__.__code__.co_names


def test_a_model_that_reads_experts_past_the_layer_is_refused() -> None:
    """Flint of vLLM 0.33, which 0.32 does not have: its decode kernel takes the layer's parameters for all experts."""
    reader = type("FlintBf16DecodeMoE", (torch.nn.Module,), {})
    with pytest.raises(UnsupportedError, match="Flint's decode kernel .* reads experts past vLLM's fused layer"):
        routers.install(torch.nn.Sequential(reader()), [])
