"""``vllm-spac quantise``: what is read back is within half a step of what was there, and the rest is untouched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner
from vllm_spac.kernels.reference.dequantise import dequantise

from vllm_spac.cli.main import app
from vllm_spac.errors import StoreError, UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, quantisation, quantising, repacking
from vllm_spac.storage.checkpoint.headers import read_checkpoint

CONFIG = {"model_type": "toy", "num_hidden_layers": 2, "num_experts": 2, "num_experts_per_tok": 1}
EXPERTS = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(2) for e in range(2)]
OTHERS = {"model.layers.0.self_attn.q_proj": (16, 32), "model.layers.0.mlp.gate": (2, 64), "lm_head": (24, 64)}


@pytest.fixture
def source(tmp_path) -> Path:
    """Two files and an index; the second layer is in the second."""
    rng, folder = torch.Generator().manual_seed(0), tmp_path / "source"
    folder.mkdir()
    shapes = dict.fromkeys(EXPERTS, (24, 64)) | OTHERS
    weights = {f"{name}.weight": torch.randn(shape, generator=rng).bfloat16() for name, shape in shapes.items()}
    weights[f"{EXPERTS[0]}.weight"][3] = 0
    weights["model.norm.weight"] = torch.ones(64).bfloat16()
    files = {name: "b.safetensors" if ".1.mlp" in name else "a.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: t for name, t in weights.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def run(*arguments, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["quantise", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def loaded(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def read_back(tensors: dict[str, Tensor], module: str, codes: str) -> tuple[Tensor, Tensor]:
    """The weight [N, K], and the step of each: by the packing of our kernels, and their twin."""
    own = {n.removeprefix(f"{module}."): t[None] for n, t in tensors.items() if n.startswith(f"{module}.")}
    found = repacking.scaled(own, None, 1) if codes == "int8" else repacking.compressed(own, 4, 32)
    rows, stored = found.codes.shape[1:]
    columns = stored * found.kind.per_byte
    weight = dequantise(found.kind, found.codes[0], found.scales[0], rows, columns, torch.bfloat16)
    step = own["weight_scale"][0].float()
    return weight.float(), step.repeat_interleave(columns // step.shape[1], 1)


@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("linears", ["experts", "all"])
def test_round_trip(source, tmp_path, codes, linears):
    target = tmp_path / "copy"
    said = run(source, "--format", codes, "--group", 32, "--linears", linears, "--output", target)
    assert "vllm-spac inspect" in said
    before, after = loaded(source), loaded(target)
    taken = [*EXPERTS, "model.layers.0.self_attn.q_proj"] if linears == "all" else EXPERTS
    for module in taken:
        weight, step = read_back(after, module, codes)
        given = before.pop(f"{module}.weight").float()
        assert ((weight - given).abs() <= (0.5 if codes == "int8" else 0.52) * step + weight.abs() / 256).all()
        assert weight.unique().numel() > 12
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not (read_back(after, EXPERTS[0], codes)[0][3]).any()
    config = json.loads((target / "config.json").read_text())
    found = quant_config.of(config)
    assert quantisation.refusal(found) is None and not quant_config.spares_experts(found, 2)
    assert set(found["ignore"]) == {n.removesuffix(".weight") for n, t in before.items() if t.dim() == 2}
    assert (target / "tokenizer.json").exists() and not (target / "quantise.json").exists()
    checkpoint = read_checkpoint(target)
    assert checkpoint.expert_bytes[0] < 24 * 64 * (1.2 if codes == "int8" else 0.7)


def test_it_goes_on_where_it_was_stopped(source, tmp_path, monkeypatch):
    """A copy without config.json is no checkpoint; what is there is not written again."""
    target, arguments = tmp_path / "copy", ["--format", "int8"]
    with monkeypatch.context() as patch:
        patch.setattr(quantising.Copy, "_put_all", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert "No space left; the same command goes on" in run(source, *arguments, "--output", target, code=1)
    assert not (target / "config.json").exists()
    (target / "b.safetensors").unlink()
    stamp = (target / "a.safetensors").stat().st_mtime_ns
    assert "holds something else" in run(source, "--format", "int4", "--output", target, "--group", 32, code=1)
    run(source, *arguments, "--output", target)
    assert (target / "a.safetensors").stat().st_mtime_ns == stamp
    assert read_checkpoint(target).total == 4
    assert "holds something else" in run(source, *arguments, "--output", target, code=1)


def test_what_cannot_be_quantised(source, tmp_path):
    rounding = quantising.Rounding("int4", 48)
    with pytest.raises(UnsupportedError, match="no multiple of 48 columns; use another --group"):
        quantising.Copy(source, tmp_path / "copy", rounding)
    run(source, "--format", "int8", "--output", tmp_path / "copy")
    with pytest.raises(UnsupportedError, match="is quantised already"):
        quantising.Copy(tmp_path / "copy", tmp_path / "again", rounding)
    (source / "model.safetensors.index.json").unlink()
    for path in source.glob("*.safetensors"):
        path.unlink()
    save_file({"model.layers.0.mlp.experts.up_proj": torch.ones(2, 8, 8)}, source / "a.safetensors")
    with pytest.raises(UnsupportedError, match="no experts in tensors of their own"):
        quantising.Copy(source, tmp_path / "other", rounding)
    with pytest.raises(StoreError, match="holds something else"):
        list(_copy_into(tmp_path / "copy", source))


def _copy_into(full: Path, source: Path):
    save_file({"model.layers.0.mlp.experts.0.up_proj.weight": torch.ones(8, 8)}, source / "a.safetensors")
    return quantising.Copy(source, full, quantising.Rounding("int8")).write()


def test_fp8_by_blocks(source, tmp_path):
    """The greatest of a block is the greatest code; the layout is that of Qwen's and DeepSeek's checkpoints."""
    assert "is no multiple of 128 x 128; use --format int8" in run(
        source, "--format", "fp8", "--output", tmp_path / "odd", code=1
    )
    rng = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(256, 384, generator=rng).bfloat16() for name in EXPERTS}
    weights[f"{EXPERTS[0]}.weight"][:128, 128:256] = 0
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file(weights | {"model.layers.0.mlp.gate.weight": torch.ones(2, 384).bfloat16()}, source / "a.safetensors")
    run(source, "--format", "fp8", "--output", tmp_path / "copy")
    after = loaded(tmp_path / "copy")
    for name in EXPERTS:
        codes, scale = after[f"{name}.weight"].float(), after[f"{name}.weight_scale_inv"]
        assert scale.shape == (2, 3) and codes.abs().amax() == 448
        weight = codes * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        given = weights[f"{name}.weight"].float()
        assert ((weight - given).abs() <= given.abs() / 16 + scale.amax() / 512).all()
    found = quant_config.of(json.loads((tmp_path / "copy" / "config.json").read_text()))
    assert found["modules_to_not_convert"] == ["model.layers.0.mlp.gate"]
    assert all(quantisation.refusal(found, kernels) is None for kernels in (None, *quantisation.FormatKernels))
