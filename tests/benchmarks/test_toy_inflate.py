"""An inflated model computes the same function and chooses the same experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_moe
import torch
from transformers import Qwen3MoeForCausalLM

from benchmarks.toy import inflate

SIZES = [  # hidden, intermediate
    pytest.param(None, 40, id="wider-experts"),
    pytest.param(128, None, id="hidden-times-4"),
    pytest.param(64, 24, id="hidden-times-2"),
    pytest.param(256, 48, id="hidden-times-8"),
    pytest.param(72, 20, id="hidden-no-power-of-two"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "source"
    tiny_moe.write_moe(folder, 8)
    # A large epsilon, so that a wrong one would show.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-2}))
    return folder


def logits_and_routes(folder: Path) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """float32 logits [batch, length, vocab], and for each layer the sorted expert ids [tokens, top_k]."""
    model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(0, tiny_moe.VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_router_logits=True)
    return out.logits, [layer.topk(tiny_moe.TOP_K, -1).indices.sort(-1).values for layer in out.router_logits]


@pytest.mark.parametrize(("hidden", "intermediate"), SIZES)
def test_same_logits_and_routes(source, tmp_path, hidden, intermediate):
    plan = inflate.inflate(source, tmp_path / "out", intermediate=intermediate, hidden=hidden)
    before, routes_before = logits_and_routes(source)
    after, routes_after = logits_and_routes(tmp_path / "out")
    # Powers of two leave every bf16 weight exact: only the order of float32 sums differs, some 1e-6 for
    # each of a few dozen sums. Otherwise norm weights, queries and keys are rounded to bf16 once more, 2^-9.
    exact = torch.tensor(plan.norm_scale).log2() % 1 == 0
    assert (after - before).abs().max() < (1e-4 if exact else 2**-5) * before.abs().max()
    if exact:
        for one, other in zip(routes_before, routes_after, strict=True):
            assert torch.equal(one, other)


def test_sizes_are_what_was_promised(source, tmp_path):
    plan = inflate.inflate(source, tmp_path / "out", expert_bytes=40_000, hidden=64)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["moe_intermediate_size"] % 32 == 0
    assert abs(plan.expert_bytes() - 40_000) <= 32 * 3 * 64
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    on_disk = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert 0 <= on_disk - index["metadata"]["total_size"] < 0.2 * on_disk
    assert len(set(index["weight_map"].values())) == tiny_moe.LAYERS + 1


def test_same_bytes_every_time(source, tmp_path):
    for name in ("a", "b"):
        inflate.inflate(source, tmp_path / name, intermediate=24)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)


def test_refuses_a_full_disk(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(inflate.TooLittleRoom):
        inflate.inflate(source, tmp_path / "out", intermediate=24)
    assert not list((tmp_path / "out").iterdir())


def test_refuses_to_shrink_or_to_overwrite(source, tmp_path):
    with pytest.raises(ValueError, match="only grow"):
        inflate.inflate(source, tmp_path / "out", intermediate=8)
    with pytest.raises(FileExistsError):
        inflate.inflate(source, source, intermediate=24)


@pytest.mark.parametrize(("text", "expected"), [("9.4MB", 9_400_000), ("8 MiB", 8 << 20), ("123", 123)])
def test_sizes_are_parsed(text, expected):
    assert inflate.parse_bytes(text) == expected
