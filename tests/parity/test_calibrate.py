"""``vllm-spac quality`` on the toy model, each command in a process of its own."""

from __future__ import annotations

import bisect
import heapq
import json
import textwrap
from pathlib import Path

import forked
import pytest
from compare import compare
from exactness import FLOAT32, assert_same_tokens
from tokenizers import Tokenizer

from vllm_spac.methods.moe_spec.calibration import Calibration, read_budgets

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models"
LAYERS, EXPERTS, TOP_K, WINDOW = 6, 64, 8, 5
TEXTS = [Path(module.__file__).read_text()[2000:2400] for module in (bisect, heapq, textwrap)]


def command(*arguments, code: int = 0) -> str:
    """What ``vllm-spac`` prints, both streams."""
    program = ["-c", "from vllm_spac.cli.main import app; app()", *arguments]
    done = forked.run(program, {"COLUMNS": "200", "NO_COLOR": "1"}, timeout=500)
    assert done.returncode == code, done.stderr[-4000:] + done.stdout
    return done.stdout + done.stderr


def tokens() -> int:
    tokenizer = Tokenizer.from_file(str(TOY / "target" / "tokenizer.json"))
    return sum(len(tokenizer.encode(text).ids) for text in TEXTS)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> Path:
    """Folder with a calibration and the texts that made it."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    common = ("--prompts", folder / "texts.jsonl", "--window", WINDOW, "--slots", "60%", "--disk-dir", folder)
    engine = ("--engine", '{"dtype": "bfloat16"}', "--text-tokens", "64")
    output = ("--output", folder / "c.safetensors")
    said = command("quality", "calibrate", TOY / "target", *common, *engine, *output)
    assert f"{tokens()} tokens of" in said.replace(",", "")
    return folder


def test_calibration_is_of_every_row_and_serves_to_choose_budgets(calibrated):
    found = Calibration.read(calibrated / "c.safetensors")
    assert (len(found.layers), found.experts, found.top_k, found.window) == (LAYERS, EXPERTS, TOP_K, WINDOW)
    assert found.tokens == tokens(), "each row of each text once, and no row of a generated token"
    assert (found.counts.sum(1) == found.tokens * TOP_K).all()
    assert not (calibrated / "c.safetensors.progress").exists()
    command("quality", "budgets", calibrated / "c.safetensors", "--mass", "0.9", "--output", calibrated / "b.json")
    budgets = read_budgets(calibrated / "b.json", found.fingerprint, found.layers, EXPERTS)
    assert all(TOP_K <= budget <= EXPERTS for budget in budgets.values())


def test_a_calibration_places_experts(calibrated):
    """``policy=pinned`` with the calibration: stock's tokens."""
    spac = {"slots": "25%", "disk_dir": str(calibrated)}
    spac["policy"] = f"pinned@calibration={calibrated / 'c.safetensors'}"
    stock, run = compare(TOY / "target", [None, spac], max_tokens=8, **FLOAT32)
    assert_same_tokens(run, stock)
    assert run.stats["policy"] == "pinned" and run.stats["hits"] > 0 and run.stats["misses"] > 0


def test_what_vllm_refuses_is_an_error_and_no_traceback(calibrated):
    common = ("--prompts", calibrated / "texts.jsonl", "--output", calibrated / "never.safetensors")
    said = command("quality", "calibrate", TOY / "target", *common, "--engine", '{"max_model_len": 10000000}', code=1)
    assert "error: vLLM refuses" in said and "max_model_len (10000000)" in said
    assert "Traceback" not in said and not (calibrated / "never.safetensors").exists()


@pytest.mark.full
def test_quality(calibrated):
    draft = {"method": "eagle3", "model": str(TOY / "eagle3"), "num_speculative_tokens": WINDOW - 1}
    said = command(
        *("quality", "sweep", TOY / "target", "--prompts", calibrated / "texts.jsonl", "--window", WINDOW),
        *("--slots", "60%", "--disk-dir", calibrated, "--calibration", calibrated / "c.safetensors"),
        *("--budgets", "8,20,64", "--mass", "1.0", "--output", calibrated / "out", "--text-tokens", "64"),
        *("--speculative-config", json.dumps(draft), "--new-tokens", "8", "--generate", "2"),
        *("--engine", '{"dtype": "bfloat16"}'),
    )
    results = json.loads((calibrated / "out" / "quality.json").read_text())
    points = {(p["ranking"], p["coverage"], p["budget"]): p for p in results["points"]}
    assert len(points) == 3 * 2 * 4, "every ranking that serves, both coverages, three budgets and a mass"
    for (_, _, budget), point in points.items():
        exact = budget in (None, EXPERTS)  # mass 1.0 is all experts as well
        assert (point["kl"] == 0 and point["agreement"] == 1 and point["dropped"] == 0) == exact
        assert point["distinct"] <= min(results["natural"]["distinct"] + 1e-9, budget or EXPERTS)
    assert results["reference"]["perplexity"] < 60, "the toy model can predict the library's source"
    assert results["natural"]["kl"] == 0 and results["natural"]["distinct"] > 8
    router = [points["router", "truncation", budget] for budget in (8, 20)]
    assert router[0]["kl"] > router[1]["kl"] and router[0]["dropped"] > router[1]["dropped"]
    generated = {(p.get("ranking"), p.get("budget")): p for p in results["generation"]}
    assert generated["router", EXPERTS]["equal"] == 1 and generated[None, None]["distinct"] > TOP_K
    assert generated["router", 8]["distinct"] <= 8 and generated["router", 8]["dropped"] > 0
    assert len(results["sessions"]) == 1 and results["provenance"]["versions"]["vllm"] and results["title"] in said
    assert {path.name for path in (calibrated / "out").iterdir()} == {"quality.json"}
