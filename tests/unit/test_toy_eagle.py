"""The unrolled training forward of the toy EAGLE-3 head equals drafting token by token."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "toy"))
eagle = importlib.import_module("eagle")
nets = importlib.import_module("nets")

SHAPE = nets.Shape(vocab=96, hidden=32, layers=3, heads=4, kv_heads=2, head_dim=8, experts=4, top_k=2, intermediate=16)


@pytest.fixture
def pair():
    torch.manual_seed(0)
    target = nets.CausalLM(SHAPE)
    with torch.no_grad():
        target.lm_head.weight *= 10  # an untrained head is close to uniform, which leaves nothing to learn
    head = eagle.Head(eagle.head_shape(SHAPE), aux_layers=(1, 2, 3))
    head.start_from(target)
    return target, head


def one_by_one(head, embeds, features, base: int, steps: int) -> list[torch.Tensor]:
    """Residual streams of the chain from ``base``, each step a plain causal pass over all rows so far."""
    rows = head.fc(features[:, : base + 1])
    outputs = []
    for _ in range(steps):
        length = rows.shape[1]
        table = nets.rotary_table(length, SHAPE.head_dim)
        q, k, v = head.midlayer.project(embeds[:, :length], rows, table)
        x = head.midlayer.finish(rows, F.scaled_dot_product_attention(q, k, v, is_causal=True))[:, -1:]
        outputs.append(x)
        rows = torch.cat([rows, x], 1)
    return outputs


def test_unrolled_steps_equal_drafting_one_by_one(pair):
    target, head = pair
    ids = torch.randint(0, SHAPE.vocab, (2, 20))
    _, features, embeds = eagle.teacher(target, ids, head.aux_layers)
    steps, bases = 4, torch.tensor([0, 3, 7, 14])
    with torch.no_grad():
        unrolled = [x for _, x in head.unroll(embeds[:, 1:], features[:, :15], steps, bases)]
        unrolled[0] = unrolled[0][:, bases]
        for column, base in enumerate(bases.tolist()):
            expected = one_by_one(head, embeds[:, 1:], features, base, steps)
            for x, y in zip(unrolled, expected, strict=True):
                torch.testing.assert_close(x[:, column], y[:, 0], rtol=1e-4, atol=1e-5)


def test_loss_falls(pair):
    target, head = pair
    target.requires_grad_(False)
    ids = torch.randint(0, SHAPE.vocab, (4, 24))
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = eagle.unrolled_loss(head, target, ids, steps=3, bases_per_step=12)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_simulation_counts_every_new_token_once(pair):
    """Accepted tokens plus one per round are the tokens walked over, up to the tail that is left out."""
    target, head = pair
    ids = torch.randint(0, SHAPE.vocab, (40,))
    rounds, accepted = eagle.simulate(head, target, ids, prompt_length=8, drafts=3)
    walked = rounds + accepted
    assert 40 - 3 - 8 <= walked <= 40 - 8


def test_exported_head_has_the_names_stock_vllm_loads(pair, tmp_path):
    _, head = pair
    eagle.write_head(head, tmp_path)
    load_file = importlib.import_module("safetensors.torch").load_file
    names = set(load_file(tmp_path / "model.safetensors"))
    assert {"fc.weight", "norm.weight", "lm_head.weight", "midlayer.hidden_norm.weight"} <= names
    assert "midlayer.self_attn.q_proj.weight" in names and "midlayer.mlp.down_proj.weight" in names
    assert not any("embed_tokens" in name or "q_norm" in name for name in names)
