"""The INT8 copy of the toy model is an INT8 rounding, and the same at every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_moe
import torch
from safetensors.torch import load_file

from benchmarks.toy import quantize


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("toy") / "source"
    tiny_moe.write_moe(folder, 4)
    return folder


@pytest.mark.parametrize(("bits", "groups", "most"), [(8, 1, 127), (4, 2, 7)])
def test_rounding_is_within_half_a_step(bits, groups, most):
    weight = torch.randn(7, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    codes, scale = quantize.rounded(weight, bits)
    assert codes.dtype == torch.int8 and scale.shape == (7, groups, 1)
    assert ((codes * scale - weight.view(codes.shape)).abs() <= scale / 2 * 1.001).all()
    assert (codes.abs().amax(-1)[[0, 1, 2, 4, 5, 6]] == most).all()


def test_copy_rounds_experts_and_attention_only(source, tmp_path):
    facts = quantize.rounded_copy(source, tmp_path / "copy")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if quantize.is_rounded(name)}
    assert all(".experts." in name or "_proj" in name for name in changed)
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert json.loads((tmp_path / "copy" / "training.json").read_text()) == facts
    assert (tmp_path / "copy" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_copy_is_deterministic(source, tmp_path):
    for name in ("a", "b"):
        quantize.rounded_copy(source, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert files[0] == files[1]
