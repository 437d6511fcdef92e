"""The study of shadows: rounding, runs beside another model, alignment, and what is counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "toy"))
export = importlib.import_module("export")
nets = importlib.import_module("nets")
shadow = importlib.import_module("shadow")

SHAPE = nets.Shape(vocab=96, hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, experts=8, top_k=2, intermediate=32)
PROMPT, NEW = 6, 9
EXACT = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("toy") / "source"
    export.write_moe(nets.CausalLM(SHAPE), made)
    return made


@pytest.fixture(scope="module")
def model(folder: Path):
    return export.load_moe(folder)


@pytest.fixture(scope="module")
def ids(model) -> torch.Tensor:
    prompts = torch.randint(96, (3, PROMPT), generator=torch.Generator().manual_seed(1))
    return shadow.written(model, prompts, NEW)


@pytest.fixture(scope="module")
def other():
    """A model that writes something else."""
    torch.manual_seed(5)
    return nets.CausalLM(SHAPE)


@pytest.mark.parametrize("rounding", shadow.SHADOWS.values(), ids=str)
def test_rounded_weights_are_within_half_a_step(rounding) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    found = shadow.dequantised(rounding.tensors(weight), rounding)
    step = weight.abs().amax(1, keepdim=True) / (127 if rounding.codes == "int8" else 7.5)
    assert found.shape == weight.shape and ((found - weight).abs() <= step * 0.51).all()
    assert not torch.equal(found, weight)


def test_a_shadow_keeps_its_routers_and_rounds_the_rest(folder: Path, model) -> None:
    copy = dict(shadow.shadow_of(folder, shadow.SHADOWS["int8"]).named_parameters())
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, copy[name])}
    assert changed and all("proj" in name or name.endswith(("w13", "w2")) for name in changed)
    assert any("self_attn" in name for name in changed) and any(name.endswith("w2") for name in changed)


def test_a_run_is_the_network_s_forward(model, ids: torch.Tensor) -> None:
    with torch.no_grad():
        logits, _, states = model(ids, hidden_states=True)
    found = shadow.run(model, ids)
    torch.testing.assert_close(found.logits, logits, **EXACT)
    for layer, block in enumerate(model.blocks()):
        block(states[layer], nets.rotary_table(ids.shape[1], SHAPE.head_dim))
        torch.testing.assert_close(found.routers[layer].softmax(-1).flatten(0, 1), block.mlp.probabilities, **EXACT)


def test_own_keys_taken_from_another_run_change_nothing(model, ids: torch.Tensor) -> None:
    plain = shadow.run(model, ids)
    for taken in (torch.arange(ids.shape[1]), torch.zeros(ids.shape[1]).long(), torch.arange(ids.shape[1]) // 2):
        torch.testing.assert_close(shadow.run(model, ids, plain.cached, taken).logits, plain.logits, **EXACT)


def test_keys_of_another_model_are_used_as_they_are(model, other, ids: torch.Tensor) -> None:
    """A twin, position by position: a sequence whose first keys and values are the other model's."""
    theirs, at = shadow.run(other, ids), PROMPT + 2
    taken = torch.full((ids.shape[1],), at)
    taken[:at] = 0
    found = shadow.run(model, ids, theirs.cached, taken)
    plain = shadow.run(model, ids)
    torch.testing.assert_close(found.logits[:, :at], plain.logits[:, :at], **EXACT)
    assert not torch.allclose(found.logits[:, at], plain.logits[:, at], **EXACT)
    block = next(iter(model.blocks()))
    table = nets.rotary_table(ids.shape[1], SHAPE.head_dim)
    x = model.embed_tokens(ids)
    query, key, value = block.self_attn.project(block.input_layernorm(x), table)
    keys = torch.cat([theirs.cached[0][0][:, :, :at], key[:, :, at : at + 1]], 2)
    values = torch.cat([theirs.cached[0][1][:, :, :at], value[:, :, at : at + 1]], 2)
    heads = torch.nn.functional.scaled_dot_product_attention(query[:, :, at : at + 1], keys, values)
    hidden = block.post_attention_layernorm(x[:, at : at + 1] + block.self_attn.merge(heads))
    torch.testing.assert_close(found.routers[0][:, at], block.mlp.gate(hidden)[:, 0], **EXACT)


@pytest.mark.parametrize("period", shadow.PERIODS)
def test_an_unrounded_shadow_is_the_model(model, ids: torch.Tensor, period: int | None) -> None:
    theirs = shadow.run(model, ids)
    routers = shadow.followed(model, ids, PROMPT, theirs, period)
    torch.testing.assert_close(routers, theirs.routers, **EXACT)
    found = shadow.recall(theirs.routers, routers, PROMPT, SHAPE.top_k)
    assert found["recall_at_k"] == found["recall_at_2k"] == 1


@pytest.mark.parametrize("period", [3, None])
def test_between_alignments_a_shadow_follows_its_own_tokens(
    model, other, ids: torch.Tensor, period: int | None
) -> None:
    """A twin that goes on token by token, beside what another model writes."""
    ids = shadow.written(other, ids[:, :PROMPT], NEW)
    theirs = shadow.run(other, ids)
    found = shadow.followed(model, ids, PROMPT, theirs, period)
    own = ids[:, :PROMPT]
    for at in range(PROMPT, ids.shape[1]):
        since = at - PROMPT
        offset = since + 1 if period is None else since % period
        taken = torch.zeros(at, dtype=torch.int64)
        if period is not None:  # of every position before, what it had when it was processed
            steps = torch.arange(at) - PROMPT
            taken = torch.where(steps >= 0, steps - steps % period + PROMPT, 0)
        following = shadow.run(model, own, theirs.cached, taken).logits[:, -1:].argmax(-1)
        own = torch.cat([own, following if offset else ids[:, at : at + 1]], 1)
    taken = torch.zeros(ids.shape[1], dtype=torch.int64)
    if period is not None:
        steps = torch.arange(ids.shape[1]) - PROMPT
        taken = torch.where(steps >= 0, steps - steps % period + PROMPT, 0)
    assert not torch.equal(own, ids), "it writes something else"
    torch.testing.assert_close(found, shadow.run(model, own, theirs.cached, taken).routers, **EXACT)


def test_recall_is_of_what_follows_the_prompt_and_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right in the first two written tokens of three, wrong in the last one and in the prompt."""
    monkeypatch.setattr(shadow, "BLOCK", 2)
    true = torch.zeros(1, 2, 5, 4)  # a layer, two texts, two tokens of a prompt and three written
    true[..., 1] = 9
    named = true.clone()
    named[:, :, [0, 1, 4]] = torch.tensor([9.0, 0, 0, 0])
    found = shadow.recall(true, named, 2, 1)
    assert found["recall_at_k"] == pytest.approx(2 / 3) and found["by_token"] == [1.0, 0.0]
