"""``vllm-spac quantise``: what is read back is within half a step of what was there, and the rest is untouched."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
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
from vllm_spac.system.files import partial_of

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


def interrupted(source: Path, target: Path, *arguments: object) -> str:
    """Output of a copy that ended after its weights were written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantising.Copy, "_put_all", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        return run(source, *arguments, "--output", target, code=1)


def test_it_goes_on_where_it_was_stopped(source, tmp_path):
    """A copy without config.json is no checkpoint; what is there is not written again."""
    target, arguments = tmp_path / "copy", ["--format", "int8"]
    assert "No space left; the same command goes on" in interrupted(source, target, *arguments)
    assert not (target / "config.json").exists()
    (target / "b.safetensors").unlink()
    stamp = (target / "a.safetensors").stat().st_mtime_ns
    assert "holds something else" in run(source, "--format", "int4", "--output", target, "--group", 32, code=1)
    run(source, *arguments, "--output", target)
    assert (target / "a.safetensors").stat().st_mtime_ns == stamp
    assert read_checkpoint(target).total == 4
    assert "holds something else" in run(source, *arguments, "--output", target, code=1)


def test_a_full_disk_is_one_sentence_and_leaves_nothing(source, tmp_path):
    """safetensors has errors of its own for what the system refuses."""
    target, limits = tmp_path / "copy", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # Python ignores the signal
    try:
        said = run(source, "--format", "int8", "--output", target, code=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "a.safetensors cannot be written" in said and "the same command goes on from here" in said
    assert [path.name for path in target.iterdir()] == ["quantise.json"]
    run(source, "--format", "int8", "--output", target)
    assert read_checkpoint(target).total == 4


def test_weights_that_were_exchanged_are_not_mixed(source, tmp_path):
    """The second file of a copy would be that of another model."""
    target = tmp_path / "copy"
    interrupted(source, target, "--format", "int8")
    (target / "b.safetensors").unlink()
    weights = load_file(source / "b.safetensors")
    save_file({name: -tensor for name, tensor in weights.items()}, source / "b.safetensors")
    said = run(source, "--format", "int8", "--output", target, code=1)
    assert f"the weights in {source} are not those that {target} was begun with; delete that folder" in said
    assert not (target / "b.safetensors").exists()


def test_what_a_killed_copy_left_is_removed_and_what_another_writes_is_not(source, tmp_path):
    target = tmp_path / "copy"
    interrupted(source, target, "--format", "int8")
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    for name in ("a.safetensors", "config.json"):
        partial_of(target / name, gone.pid).write_bytes(b"half")
    partial_of(target / "b.safetensors", os.getppid()).write_bytes(b"half")
    run(source, "--format", "int8", "--output", target)
    assert [path.name for path in target.glob("*.partial")] == [f"b.safetensors.{os.getppid()}.partial"]


@pytest.mark.parametrize(("columns", "group"), [((256, 384), 128), ((256, 192), 64), ((64, 96), 32)])
def test_the_largest_group_that_divides_all_columns_is_chosen_and_said(source, tmp_path, columns, group):
    for path in source.glob("*.safetensors*"):
        path.unlink()
    rng = torch.Generator().manual_seed(0)
    weights = {f"{name}.weight": torch.randn(16, columns[i % 2], generator=rng) for i, name in enumerate(EXPERTS)}
    save_file(weights, source / "a.safetensors")
    said = run(source, "--format", "int4", "--output", tmp_path / "copy")
    assert (f"--group {group}: some weights have no multiple of 128 columns" in said) == (group != 128)
    config = json.loads((tmp_path / "copy" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == group
    if group != 128:
        assert f"no multiple of 128; use --group {group}" in run(
            source, "--format", "int4", "--group", 128, "--output", tmp_path / "other", code=1
        )


def test_columns_that_no_group_divides(source, tmp_path):
    for path in source.glob("*.safetensors*"):
        path.unlink()
    save_file({f"{name}.weight": torch.ones(8, 72) for name in EXPERTS}, source / "a.safetensors")
    said = run(source, "--format", "int4", "--output", tmp_path / "copy", code=1)
    assert "has 72 columns, no multiple of 32; use --format int8" in said


def test_what_cannot_be_quantised(source, tmp_path):
    rounding = quantising.Rounding("int4", 48)
    with pytest.raises(UnsupportedError, match="has 64 columns, no multiple of 48; use --group 64"):
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
