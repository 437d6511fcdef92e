"""``vllm-spac check --engines`` finds nothing where nothing is wrong, and each planted fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from imagined_engines import Imagined
from typer.testing import CliRunner
from vllm_spac.kernels.types import Fills

from vllm_spac.cli.main import app
from vllm_spac.errors import UnsupportedError
from vllm_spac.execution.address_table import kernels_for
from vllm_spac.execution.device import pointers_execution
from vllm_spac.tools.machine.checks import CheckOutcome, Finding
from vllm_spac.tools.selftest import kernel_checks, parts, plane_checks, tiny_model
from vllm_spac.tools.selftest.random_experts import FORMATS

CPU = torch.device("cpu")
SIZE = 256, 128


def levels(outcomes: Sequence[CheckOutcome]) -> dict[str, str]:
    return {outcome.finding.check: outcome.finding.level for outcome in outcomes}


def test_kernels_are_compared_in_each_format() -> None:
    found = list(kernel_checks.formats(CPU, *SIZE))
    assert levels(found) == {f"kernel, {name}": "ok" for name in ("bf16", *FORMATS)}
    assert all(outcome.numbers["difference"] < kernel_checks.TOLERANCE for outcome in found)


@pytest.mark.parametrize("fault", ["a tenth more", "not a number", "another expert"])
def test_a_wrong_kernel_is_a_problem(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    kernels = kernels_for(CPU)

    def wrong(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        if fault == "another expert":
            return kernels.grouped_gemm(x, w13.roll(1), w2, *rest, **more)
        out = kernels.grouped_gemm(x, w13, w2, *rest, **more)
        return out * (1.1 if fault == "a tenth more" else float("nan"))

    monkeypatch.setattr(kernel_checks, "kernels_for", lambda device: kernels._replace(grouped_gemm=wrong))
    assert set(levels(list(kernel_checks.formats(CPU, *SIZE))).values()) == {"problem"}


def test_experts_move_and_bits_stay() -> None:
    moved, graph = kernel_checks.moving_experts(CPU, *SIZE)
    assert moved.finding.level == "ok" and moved.numbers["loads"] > 10
    assert graph.finding.level == "note" and "no GPU" in graph.finding.text


def test_an_expert_in_the_wrong_slot_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = kernels_for(CPU)

    def wrong(*given: Any, fills: Fills | None = None, **more: Any) -> torch.Tensor:
        return kernels.grouped_gemm(*given, fills=fills and fills._replace(w2=fills.w2.roll(1)), **more)

    monkeypatch.setattr(pointers_execution, "kernels_for", lambda device: kernels._replace(grouped_gemm=wrong))
    moved = next(iter(kernel_checks.moving_experts(CPU, *SIZE)))
    assert moved.finding.level == "problem" and moved.numbers["wrong steps"] > 0


@pytest.fixture
def engines() -> Imagined:
    Imagined.begin()
    return Imagined()


def test_tokens_are_compared_with_stock_vllms(engines: Imagined) -> None:
    found = list(plane_checks.compared(plane_checks.planes(gpu=False), engines))
    assert levels(found) == dict.fromkeys(("tokens, slots", "tokens, table", "tokens, pointers"), "ok")
    assert sorted(Imagined.started) == ["pointers", "slots", "stock vLLM", "table"]


def test_other_tokens_are_a_problem_but_at_a_near_tie(engines: Imagined, monkeypatch: pytest.MonkeyPatch) -> None:
    at = {
        "slots": 0,
        "table": 0,
        "pointers": 5,
    }  # where the second best token is said; a near-tie in the first place alone

    def change(candidate: Any, ids: list[int]) -> list[int]:
        place = at[candidate.name]
        return [*ids[:place], ids[place] + 1, *ids[place + 1 :]]

    monkeypatch.setattr(Imagined, "change", staticmethod(change))
    both = plane_checks.planes(gpu=True)
    expected = {"tokens, slots": "ok", "tokens, table": "ok", "tokens, pointers": "problem"}
    assert levels(list(plane_checks.compared(both, engines))) == expected
    monkeypatch.setattr(Imagined, "near_ties", False)  # as in float32
    assert set(levels(list(plane_checks.compared(both, engines))).values()) == {"problem"}


def test_nothing_is_packed_where_a_user_s_experts_are(tmp_path: Path) -> None:
    """What slots and table pack goes into the scratch folder; pointers pack nothing, and stock knows no such folder."""
    engines = plane_checks.measurer(tmp_path / "model", gpu=False)
    jobs = [engines.job(candidate)["spac"] for candidate in plane_checks.planes(gpu=False)]
    folders = [None if spac is None else spac.get("disk_dir") for spac in jobs]
    packed = str(tmp_path / "packed")
    assert folders == [None, packed, packed, None]


@pytest.mark.parametrize("which", ["pointers", "stock vLLM"])
def test_an_engine_that_does_not_start_is_a_problem(engines: Imagined, which: str) -> None:
    Imagined.fails = {which}
    found = {o.finding.check: o.finding for o in plane_checks.compared(plane_checks.planes(gpu=False), engines)}
    assert found[f"tokens, {which}"].text == "no answer: no room for the KV cache"
    assert found[f"tokens, {which}"].level == "problem"
    all_three = {"tokens, slots", "tokens, table", "tokens, pointers"}
    assert set(found) == (all_three if which == "pointers" else {"tokens, stock vLLM"})


GLM = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "hidden_size": 4096, "n_routed_experts": 128}
GLM |= {"num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1408}
GLM |= {"intermediate_size": 10944, "num_hidden_layers": 46, "n_shared_experts": 1, "num_experts_per_tok": 8}
GLM |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 151552, "num_nextn_predict_layers": 1}
GLM |= {"rope_scaling": None, "quantization_config": {"quant_method": "fp8"}, "eos_token_id": [151329, 151336]}


@pytest.mark.parametrize("config", [tiny_model.QWEN3_MOE, GLM], ids=["qwen3_moe", "glm4_moe"])
def test_a_tiny_model_of_a_family_is_written(tmp_path: Path, config: dict[str, Any]) -> None:
    tiny_model.write(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == config["model_type"] and written["architectures"] == config["architectures"]
    assert "quantization_config" not in written and written["num_hidden_layers"] <= 3
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < 32 << 20


def test_a_model_whose_experts_only_vllm_has_is_refused(tmp_path: Path) -> None:
    """As the carved model of ``make demo``: a class with experts, under the model type of a dense one."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    config = {"model_type": "llama", "architectures": ["SomeMoeForCausalLM"], "vocab_size": 49152, **sizes}
    with pytest.raises(UnsupportedError, match="of type llama has no experts"):
        tiny_model.write(config, tmp_path)


def test_sizes_shrink_and_the_rest_stays() -> None:
    kinds = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12
    inner = {"num_hidden_layers": 48, "layer_types": kinds, "head_dim": 256, "norm_topk_prob": True, "num_experts": 512}
    config = {"model_type": "seen", "vision_config": {}, "text_config": inner, "auto_map": {"AutoConfig": "x.Y"}}
    small = tiny_model.shrunk(config)
    assert small["layer_types"] == ["linear_attention", "linear_attention", "full_attention"]
    assert small["head_dim"] == 256 and small["norm_topk_prob"] is True and small["num_experts"] == 16
    assert not {"vision_config", "text_config", "auto_map"} & set(small)
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}  # as many as before: no groups
    assert tiny_model.shrunk(heads) == {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", None),
    ],
)
def test_the_data_sheet_of_a_gpu_is_found_by_its_name(name: str, profile: str | None) -> None:
    found = parts.profile_of(name)
    assert (found and found.name) == profile


def test_widths_are_those_of_the_models_experts() -> None:
    assert parts.sizes(tiny_model.QWEN3_MOE) == (2048, 768)
    assert parts.sizes(GLM) == (4096, 1408)
    assert parts.sizes({"text_config": {"hidden_size": 2880, "intermediate_size": 2880}}) == (2816, 2048)
    assert parts.sizes({}) == (4096, 2048)


def test_the_command_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "report.json"
    done = CliRunner().invoke(app, ["check", "--kernels", "--output", str(file)], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "problems: 0" in done.stdout, done.output
    report = json.loads(file.read_text())
    assert report["problems"] == 0 and report["installation"]["vllm"]
    assert {outcome["finding"]["check"] for outcome in report["outcomes"]} >= {"kernel, int4", "link"}
    assert set(report["seconds_by_part"]) == {"kernels", "moving experts", "the link to host memory", "engines"}
    fault = CheckOutcome(Finding("kernel, bf16", "problem", "wrong", "report it"))
    monkeypatch.setattr(parts, "run", lambda config, **options: iter([fault]))
    done = CliRunner().invoke(app, ["check", "--engines", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["problems"] == 1
    done = CliRunner().invoke(app, ["check", "--engines", "--output", str(tmp_path / "none" / "x.json")])
    assert done.exit_code == 1 and "name a file in a folder that exists" in done.output


def test_parts_that_do_not_begin_in_time_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock passes the bound in the second part, which is finished; the command ends with 0."""
    now, begun = [0.0], []

    def part(name: str, took: float) -> Any:
        def of(*given: Any) -> Any:
            begun.append(name)
            now[0] += took
            yield CheckOutcome(Finding(name, "ok", "as it should be"))

        return of

    monkeypatch.setattr(parts.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(kernel_checks, "formats", part("kernels", 40))
    monkeypatch.setattr(kernel_checks, "moving_experts", part("moving experts", 30))
    monkeypatch.setattr(parts, "_tokens", part("engines", 100))
    done = CliRunner().invoke(app, ["check", "--engines", "--json"])
    report = json.loads(done.stdout)
    found = {outcome["finding"]["check"]: outcome["finding"] for outcome in report["outcomes"]}
    assert done.exit_code == 0 and begun == ["kernels", "moving experts"]
    assert report["seconds_by_part"] == {"kernels": 40.0, "moving experts": 30.0}
    for name in ("the link to host memory", "engines"):
        assert found[name]["level"] == "note" and "70 s of 60" in found[name]["text"]
        assert "--seconds" in found[name]["remedy"]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_machine_without_a_gpu_passes(tmp_path: Path) -> None:
    """Three engines of a tiny model, as a user runs it."""
    (tmp_path / "config.json").write_text(json.dumps(GLM))
    done = CliRunner().invoke(app, ["check", str(tmp_path), "--engines", "--seconds", "400", "--json"])
    report = json.loads(done.stdout)
    found = {outcome["finding"]["check"]: outcome["finding"]["level"] for outcome in report["outcomes"]}
    assert done.exit_code == 0 and {found[f"tokens, {name}"] for name in ("slots", "table", "pointers")} == {"ok"}
    assert found["tiny model"] == "ok"
