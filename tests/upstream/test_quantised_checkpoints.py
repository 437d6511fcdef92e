"""Whole tiny checkpoints in the layout of published ones: inspect, plan and packing read them, or say what is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised_checkpoints import EXPERTS, HIDDEN, INNER, LAYERS, PUBLISHED, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner
from vllm_spac.kernels.formats import Format
from vllm_spac.kernels.reference.dequantise import dequantise

from vllm_spac.cli.main import app
from vllm_spac.errors import UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, repacking
from vllm_spac.storage.checkpoint.described import described
from vllm_spac.storage.checkpoint.headers import read_checkpoint, read_config
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.storage.checkpoint.quantisation import FormatKernels, refusal
from vllm_spac.tools.machine import gather, installation
from vllm_spac.tools.machine.facts import Installation, Library, System
from vllm_spac.tools.planning.planned_model import ServedModel

TRITON, POINTERS = "--moe-backend triton", "--spac-plane pointers"
FLAGS = {
    "Qwen3-30B-A3B-FP8": TRITON,
    "Qwen3-30B-A3B-GPTQ-Int4": f"--quantization moe_wna16 {TRITON}",
    "Qwen3-30B-A3B-AWQ": f"--quantization moe_wna16 {TRITON}",
    "Qwen3-30B-A3B-NVFP4 (compressed-tensors)": f"{POINTERS} --moe-backend marlin",
    "Qwen3-30B-A3B-NVFP4 (ModelOpt)": f"{POINTERS} --moe-backend marlin",
    "DeepSeek-R1-FP4 (ModelOpt, a file of its own)": f"{POINTERS} --moe-backend marlin",
    "DeepSeek-V3": TRITON,
    "Kimi-K2-Thinking": TRITON,
    "gpt-oss-20b": POINTERS,
}
ON_CPU = {
    "Qwen3-30B-A3B-FP8",
    "Qwen3-30B-A3B-GPTQ-Int4",
    "Qwen3-30B-A3B-AWQ",
    "DeepSeek-V3",
    "gpt-oss-20b",
}
FORMATS = {
    "Qwen3-30B-A3B-FP8": Format("e4m3", 128, 128),
    "Qwen3-30B-A3B-GPTQ-Int4": Format("int4", 128),
    "Qwen3-30B-A3B-AWQ": Format("int4", 128, zeros=True),
    "DeepSeek-V3": Format("e4m3", 128, 128),
    "Kimi-K2-Thinking": Format("int4", 32),
    "gpt-oss-20b": Format("e2m1", 32),
}
NVFP4 = Format("e2m1", 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write(name, tmp_path_factory.mktemp("published") / f"model{n}") for n, name in enumerate(PUBLISHED)}


@pytest.fixture
def inspected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., str]:
    """``inspected(model)`` -> what ``check MODEL`` prints, on a machine that is made up and healthy."""
    library = Library("2.13.0", "==2.13.0", fits=True)
    monkeypatch.setattr(installation, "installation", lambda: Installation("0.32.0", libraries={"torch": library}))
    machine = System(frozenset(range(8)), None, (0,), 64 << 30, 60 << 30, None, None, "always")
    monkeypatch.setattr(gather, "system", lambda: machine)

    def check(model: object, code: int = 0) -> str:
        given = ["check", str(model), "--disk-dir", str(tmp_path / "packed")]
        done = CliRunner().invoke(app, given, env={"COLUMNS": "2000", "NO_COLOR": "1"})
        assert done.exit_code == code, done.output
        return " ".join(done.output.split())

    return check


def repacked(name: str, folder: Path) -> tuple[list[repacking.Repacked], int]:
    """w13 and w2 of the last layer for our kernels, as vLLM's loaders put them together, and bytes of biases."""
    tensors, at = load_file(folder / "model.safetensors"), f"model.layers.{LAYERS - 1}.mlp.experts"
    if name == "gpt-oss-20b":
        parts = [
            {
                "weight": tensors[f"{at}.{part}_blocks"].flatten(2),
                "weight_scale": tensors[f"{at}.{part}_scales"],
            }
            for part in ("gate_up_proj", "down_proj")
        ]
        biases = sum(tensors[f"{at}.{part}_bias"].nbytes for part in ("gate_up_proj", "down_proj"))
        return [repacking.mxfp4(part) for part in parts], biases // EXPERTS

    def last_parts(part: str) -> dict[str, Tensor]:
        names = [key.rpartition(".")[2] for key in tensors if key.startswith(f"{at}.0.{part}_proj.")]
        return {last: torch.stack([tensors[f"{at}.{e}.{part}_proj.{last}"] for e in range(EXPERTS)]) for last in names}

    gate, up, down = map(last_parts, ("gate", "up", "down"))
    columns_first = "qweight" in gate
    both = {last: torch.cat([gate[last], up[last]], 2 if columns_first else 1) for last in gate if gate[last].dim() > 2}
    both |= {last: torch.stack([gate[last], up[last]], 1) for last in gate if "scale" in last and gate[last].dim() < 3}
    ways: dict[str, Callable[[dict[str, Tensor], int], repacking.Repacked]] = {
        "GPTQ": lambda own, _: repacking.gptq(own, 4, 128),
        "AWQ": lambda own, _: repacking.awq(own, 128),
        "Kimi": lambda own, _: repacking.compressed(own, 4, 32),
        "FP4": lambda own, _: repacking.nvfp4(own),
        "": lambda own, parts: repacking.scaled(own, (128, 128), parts),
    }
    way = next(ways[key] for key in ways if key in name)
    return [way(both, 2), way(down, 1)], 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_packing_reads_it(name: str, folders: dict[str, Path]) -> None:
    (w13, w2), _ = repacked(name, folders[name])
    assert w13.kind == w2.kind == FORMATS.get(name, NVFP4)
    for found, rows, columns in ((w13, 2 * INNER, HIDDEN), (w2, HIDDEN, INNER)):
        assert found.codes.shape == (EXPERTS, *found.kind.code_shape(rows, columns))
        assert found.scales.shape == (EXPERTS, *found.kind.scale_shape(rows, columns))
        codes = found.codes.view(torch.uint8)
        weights = [
            dequantise(found.kind, *both, rows, columns, torch.bfloat16)
            for both in zip(codes, found.scales, strict=True)
        ]
        assert all(weight.isfinite().all() and weight.unique().numel() > 14 for weight in weights)


@pytest.mark.parametrize("name", PUBLISHED)
def test_check_reads_it(inspected, name: str, folders: dict[str, Path]) -> None:
    """The flags that serve it, and the bytes of a slot for our kernels; blocks of 128 rows are padded to four."""
    folder = folders[name]
    said = inspected(folder)
    assert re.search(rf"supported on a GPU: vllm serve \S+ --plugin spac --spac-slots \d+% {FLAGS[name]} ", said)
    assert re.search(r"supported on a CPU: vllm serve \S+ --plugin spac --spac-slots \d+%$", said)
    packed, bias = repacked(name, folder)
    stored = sum(found.codes[0].nbytes + found.scales[0].nbytes for found in packed) + bias
    (counted,) = read_checkpoint(folder, FormatKernels.OURS).expert_bytes
    assert counted == stored or (FORMATS.get(name) == Format("e4m3", 128, 128) and stored - 64 < counted < stored)
    assert (read_checkpoint(folder).draft_bytes > 0) == (PUBLISHED[name].heads > 0)


@pytest.mark.parametrize("kernels", FormatKernels)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_alone_says_how_large_an_expert_is(
    name: str, kernels: FormatKernels, folders: dict[str, Path]
) -> None:
    folder = folders[name]
    config = read_config(folder / "config.json")
    if (reason := refusal(quant_config.of(config) or {}, kernels)) is not None:
        assert kernels is not FormatKernels.OURS
        pytest.skip(reason)
    alone, whole = described(config, folder, kernels), read_checkpoint(folder, kernels)
    assert alone.expert_bytes == whole.expert_bytes and alone.layer_bytes == whole.layer_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_reads_it(name: str, folders: dict[str, Path]) -> None:
    found = ServedModel.of(find_model(str(folders[name])), "pointers")
    assert found.source == "headers" and found.layers == LAYERS - PUBLISHED[name].dense
    assert found.expert_bytes < 0.6 * 3 * HIDDEN * INNER * 2
    assert ServedModel.of(find_model(str(folders[name]))).execution == (
        "pointers" if POINTERS in FLAGS[name] else "slots"
    )


def damaged(folder: Path, to: Path, pattern: str, change: Callable[[Tensor], Tensor | None]) -> Path:
    """A copy whose tensors that match are others, or missing."""
    to.mkdir()
    for path in folder.glob("*.json"):
        (to / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    assert any(re.search(pattern, name) for name in tensors)
    made = {name: change(tensor) if re.search(pattern, name) else tensor for name, tensor in tensors.items()}
    save_file({n: t.contiguous() for n, t in made.items() if t is not None}, to / "model.safetensors")
    return to


SCALES = r"experts\..*(weight_scale|weight_scale_inv|\.scales|_scales)$"


@pytest.mark.parametrize("name", PUBLISHED)
def test_scales_that_do_not_match(inspected, name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Half of them, as of another group size; and none."""
    dim = 0 if "GPTQ" in name or "AWQ" in name else -1
    halved = damaged(folders[name], tmp_path / "half", SCALES, lambda t: t.narrow(dim, 0, max(1, t.shape[dim] // 2)))
    said = r"experts\.\S*scale\S* is \[.*\], and \S* \[.*\] needs \[.*\] -> the weights do not match the quantization_c"
    assert re.search(said, inspected(halved, code=1))
    with pytest.raises(UnsupportedError, match="do not match the quantization_config"):
        ServedModel.of(find_model(str(halved)))
    without = damaged(folders[name], tmp_path / "none", SCALES, lambda _: None)
    assert re.search(r"has no \S*scale\S* -> download or convert", inspected(without, code=1))


@pytest.mark.parametrize("name", ["Kimi-K2-Thinking", "gpt-oss-20b"])
def test_a_file_that_was_not_downloaded_completely(
    inspected, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    cut = damaged(folders[name], tmp_path / "cut", SCALES, lambda tensor: tensor)
    path = cut / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "is not a complete safetensors file" in inspected(cut, code=1)


def test_another_group_size_than_the_config_says(inspected, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(folders["Kimi-K2-Thinking"], tmp_path / "other", SCALES, lambda tensor: tensor)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    assert "is [256, 4], and" in inspected(folder, code=1)
    assert "needs [256, 2] -> the weights do not match" in inspected(folder, code=1)


def started(folder: Path, amx: bool, monkeypatch: pytest.MonkeyPatch, **knobs: str) -> dict:
    """The knobs of an engine that passed the checks before anything is loaded, on a CPU with or without AMX."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_spac.integration.hooks import device

    monkeypatch.setattr(device, "is_cpu", lambda: True)
    monkeypatch.setattr(device, "runs_quantised_experts", lambda: amx)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        trust_remote_code=False,
        additional_config={"spac": {"slots": "50%"} | knobs},
    )
    return arguments.create_engine_config().additional_config["spac"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_cpu_serves_it_by_the_kernel_that_it_has(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's with AMX, where it has one for the format; else ours, unless the user asks for vLLM's."""
    for amx in (True, False):
        stock = amx and name in ON_CPU
        assert started(folders[name], amx, monkeypatch) == {"slots": "50%"} | ({} if stock else {"plane": "table"})
        started(folders[name], amx, monkeypatch, plane="table")
    with pytest.raises(ValueError, match="on a CPU without AMX; use --spac-plane table"):
        started(folders[name], False, monkeypatch, plane="slots")


def beside(folder: Path, to: Path, tensors: dict[str, Tensor]) -> Path:
    """A copy in which an attention layer has these tensors."""
    at = "model.layers.0.self_attn.o_proj"
    damaged(folder, to, rf"{at}\.weight$", lambda _: None)
    made = load_file(to / "model.safetensors") | {f"{at}.{last}": tensor for last, tensor in tensors.items()}
    save_file(made, to / "model.safetensors")
    return to


def test_other_layers_that_no_kernel_of_a_cpu_runs(
    inspected, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP8 by block with AMX only, NVFP4 nowhere; as most published checkpoints have them."""
    codes, scale = torch.ones(HIDDEN, HIDDEN), torch.ones(HIDDEN, HIDDEN // 16).to(torch.float8_e4m3fn)
    fp8 = {"weight": codes.to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)}
    folder = beside(folders["Qwen3-30B-A3B-FP8"], tmp_path / "fp8", fp8)
    said = (
        r"FP8 by block beside its experts \(\S*o_proj.weight\), for which vLLM has no kernel on a CPU without AMX; use"
    )
    with pytest.raises(ValueError, match=said):
        started(folder, False, monkeypatch)
    started(folder, True, monkeypatch)
    assert "supported on a CPU with AMX: vllm serve" in inspected(folder)
    nvfp4 = {"weight": codes[:, ::2].to(torch.uint8), "weight_scale": scale, "weight_scale_2": torch.tensor(1.0)}
    folder = beside(folders["Qwen3-30B-A3B-NVFP4 (ModelOpt)"], tmp_path / "nvfp4", nvfp4)
    for amx in (True, False):
        with pytest.raises(
            ValueError, match=r"NVFP4 beside its experts \(.*\), for which vLLM has no kernel on a CPU; use"
        ):
            started(folder, amx, monkeypatch)
    assert "not on a CPU: layers in NVFP4" in inspected(folder)
