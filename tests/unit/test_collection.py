"""Collecting samples from a model, and reading its routers from the checkpoint, without an engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "contracts"))
import imagined as made

from vllm_spac.decisions.predictors._trained import Gates
from vllm_spac.errors import ConfigError, UnsupportedError
from vllm_spac.methods.moe_spec.control import BudgetedLayer
from vllm_spac.methods.moe_spec.settings import RoutingRule
from vllm_spac.storage.checkpoint import router_weights
from vllm_spac.tools.evaluation import collection
from vllm_spac.tools.evaluation.collection import Collection, chosen_by, gates_of

CONFIG = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))


class Layer:
    """An MoE layer whose expert e multiplies its input by e + 1."""

    spac = SimpleNamespace(device="cpu")
    moe_config = SimpleNamespace(hidden_dim=made.WIDTH)

    def spac_forward(self, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return (hidden[:, None] * (ids[:, :, None] + 1) * weights[:, :, None]).sum(1)


@pytest.fixture(autouse=True)
def without_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "run_layer", lambda config, module, *rows: module.spac_forward(*rows))


def layers(experts: int = made.EXPERTS) -> list[BudgetedLayer]:
    return [BudgetedLayer(name, experts, made.TOP_K, RoutingRule()) for name in made.NAMES]


def collected(texts: int, with_outputs: int) -> tuple[Collection, list]:
    found = Collection(CONFIG, layers(), [Layer()] * made.LAYERS, 200)
    every = made.samples(texts)
    for number in range(texts):
        text = every.texts(number, number + 1)
        for layer in range(made.LAYERS):
            found.route(layer, text.hidden[layer], text.logits[layer], text.weights[layer], text.ids[layer])
        assert found.end_text(text.rows, number < with_outputs) == (number + 1) * text.rows
    return found, [every, every.texts(0, with_outputs)]


def test_what_routers_read_and_chose_is_kept() -> None:
    found, (every, _) = collected(3, 2)
    samples = found.result().samples
    assert samples.starts == every.starts
    for name in ("hidden", "logits", "ids", "weights"):
        assert torch.equal(getattr(samples, name), getattr(every, name))


def test_outputs_are_means_over_the_rows_that_selected_an_expert() -> None:
    """Of the texts that are fitted to alone."""
    found, (_, fitted) = collected(3, 2)
    outputs = found.result().outputs
    for layer in range(made.LAYERS):
        for expert in range(made.EXPERTS):
            rows = (fitted.ids[layer] == expert).any(1)
            mean = fitted.hidden[layer][rows].mean(0) * (expert + 1) if rows.any() else torch.zeros(made.WIDTH)
            torch.testing.assert_close(outputs[layer, expert], mean, rtol=1e-4, atol=1e-4)


def test_scores_order_experts_as_the_router_does() -> None:
    logits = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    assert chosen_by(RoutingRule(), logits) is logits
    bias = torch.linspace(-1, 1, 8)
    biased = chosen_by(RoutingRule(scoring="sigmoid", bias=bias), logits)
    expected = (logits.sigmoid() + bias).clamp(min=1e-6)
    torch.testing.assert_close(biased, expected.log())


def test_more_tokens_than_memory_for_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collection, "available_host_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="use at most --limit-tokens ([0-9]+)") as caught:
        Collection(CONFIG, layers(), [Layer()] * made.LAYERS, 1 << 20)
    most = int(str(caught.value).split()[-1])
    Collection(CONFIG, layers(), [Layer()] * made.LAYERS, most)
    with pytest.raises(ConfigError):
        Collection(CONFIG, layers(), [Layer()] * made.LAYERS, most + 1)


def test_layers_of_different_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="differ in size"):
        Collection(CONFIG, layers()[:1] + layers(7)[1:], [Layer()] * made.LAYERS, 10)


# -- the checkpoint's routers ------------------------------------------------------------------------------------------


def write(folder: Path, gate="gate", norm="post_attention_layernorm", prefix="model.", bias=False) -> Gates:
    model, tensors = made.gates(bias=float(bias)), {}
    for layer in range(made.LAYERS):
        block = f"{prefix}layers.{layer}"
        tensors[f"{block}.mlp.{gate}.weight"] = model.weight[layer].clone()
        tensors[f"{block}.{norm}.weight"] = model.norm[layer].clone()
        if bias:
            tensors[f"{block}.mlp.{gate}.bias"] = model.bias[layer].clone()
    half = len(tensors) // 2  # in two files, as large checkpoints are
    save_file(dict(list(tensors.items())[:half]), folder / "a.safetensors")
    save_file(dict(list(tensors.items())[half:]), folder / "b.safetensors")
    return model


@pytest.mark.parametrize(
    "names",
    [{}, {"gate": "router", "bias": True}, {"norm": "pre_feedforward_layernorm"}, {"prefix": ""}],
    ids=str,
)
def test_routers_are_read(tmp_path: Path, names: dict) -> None:
    model = write(tmp_path, **names)
    for found, expected in zip(router_weights.read(tmp_path, made.NAMES), vars(model).values(), strict=True):
        assert torch.equal(found, expected)
    samples = made.samples(model=model)
    gates = gates_of(str(tmp_path), made.NAMES, samples)
    assert not isinstance(gates, str)


def test_why_routers_cannot_be_used(tmp_path: Path) -> None:
    write(tmp_path)
    samples = made.samples()
    other = made.samples(model=made.gates(seed=4))
    assert "not its gate times its input" in gates_of(str(tmp_path), made.NAMES, other)
    assert "no router for model.layers.9" in gates_of(str(tmp_path), ["model.layers.9.mlp.experts"], samples)
    assert "is not named" in gates_of(str(tmp_path), ["experts"], samples)
    assert "other sizes" in gates_of(str(tmp_path), made.NAMES[:2], samples)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    assert "cannot be read" in gates_of(str(tmp_path), made.NAMES, samples)
    assert "not a folder" in gates_of(str(tmp_path / "none"), made.NAMES, samples)
