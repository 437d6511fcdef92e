"""``vllm-spac quality calibrate`` and ``quality budgets`` without an engine: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.methods.moe_spec.calibration import CalibrationRecorder, read_budgets

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def run(*arguments, code: int = 0) -> str:
    """Output of the command on a wide terminal, with lines of text joined."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    recorder = CalibrationRecorder("f" * 32, "tiny", LAYERS, experts=8, top_k=2, window=3)
    generator = torch.Generator().manual_seed(0)
    for layer, sharpness in enumerate((1.0, 6.0)):
        probs = (sharpness * torch.randn(30, 8, generator=generator)).softmax(1)
        recorder.observe(layer, probs, *probs.topk(2))
    recorder.end_text()
    recorder.result().save(tmp_path / "c.safetensors")
    return tmp_path / "c.safetensors"


def test_budgets_prints_and_writes(calibration: Path, tmp_path: Path) -> None:
    output = tmp_path / "budgets.json"
    text = run("quality", "budgets", calibration, "--mass", "0.9", "--output", output)
    budgets = read_budgets(output, "f" * 32, LAYERS, 8)
    assert budgets[LAYERS[0]] > budgets[LAYERS[1]] >= 2, "a layer of sharp routers needs fewer"
    for part in ("tiny: budgets for 90% of the mass selected", *LAYERS, "calibrated on 30 tokens", "selected kept"):
        assert part in text
    assert f"written: {output}" in text
    assert json.loads(output.read_text())["tuned_to"] == {
        "mass": 0.9,
        "mass_of": "selected",
        "coverage": "substitution",
    }


def test_the_scores_of_all_experts_take_more_experts_to_hold(calibration: Path, tmp_path: Path) -> None:
    found = {}
    for mass_of in ("selected", "scores"):
        text = run(
            "quality", "budgets", calibration, "--mass", "0.98", "--mass-of", mass_of, "--output", tmp_path / "b.json"
        )
        assert f"98% of the mass {mass_of}" in text
        found[mass_of] = json.loads((tmp_path / "b.json").read_text())
        assert found[mass_of]["tuned_to"]["mass_of"] == mass_of
    assert found["scores"]["budgets"][LAYERS[0]] > found["selected"]["budgets"][LAYERS[0]]


def test_truncation_may_go_below_top_k(calibration: Path, tmp_path: Path) -> None:
    for coverage, least in (("substitution", 2), ("truncation", 1)):
        run(
            "quality", "budgets", calibration, "--mass", "0.01", "--coverage", coverage, "--output", tmp_path / "b.json"
        )
        assert set(json.loads((tmp_path / "b.json").read_text())["budgets"].values()) == {least}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--mass", "1.5"), "at most 1"),
        (("--coverage", "none"), "truncation or substitution"),
        (("--mass-of", "softmax"), "selected or scores"),
        (("--output", "/none/b.json"), "name another file"),
    ],
)
def test_budgets_refuses(calibration: Path, options: tuple, says: str) -> None:
    assert says in run("quality", "budgets", calibration, *options, code=1)


def test_calibrate_refuses_before_an_engine_starts(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    assert "cannot be read" in run("quality", "calibrate", "model", "--prompts", texts, code=1)
    texts.write_text("hello\n")
    for options, says in (
        (("--output", tmp_path / "none" / "c"), "is no folder"),
        (("--output", tmp_path), "is a folder"),
        (("--engine", "[1]"), "use a JSON object"),
        (("--engine", "{"), "use a JSON object"),
        (("--slots", "many"), "25%"),
        (("--engine", '{"max_model_len": 512}'), "max_model_len 512; use --text-tokens 511, or max_model_len 513"),
    ):
        assert says in run("quality", "calibrate", "model", "--prompts", texts, *options, code=1), options
