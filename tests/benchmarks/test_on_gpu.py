"""The script that makes a GPU's figures, from end to end on a CPU: real engines of a tiny model, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo
from typer.testing import CliRunner

from benchmarks.serving import on_gpu


def test_tokens_and_times_of_a_tiny_model(tmp_path: Path) -> None:
    if on_gpu.torch.cuda.is_available():
        pytest.skip("its times are labelled as a CPU's only without a GPU")
    model, output = zoo.write("qwen3_moe", tmp_path / "model"), tmp_path / "result.json"
    only = [text for name in ("default", "host", "default, eagle3") for text in ("--only", name)]
    done = CliRunner().invoke(
        on_gpu.app, [str(model), "--part", "tokens", *only, "--at-once", "3", "--minutes", "8", "--output", str(output)]
    )
    assert done.exit_code == 0, done.output
    assert "say nothing about a GPU" in done.output
    found = json.loads(output.read_text())
    rows = {row["name"]: row for row in found["tokens"]}
    assert set(rows) == {"stock", "default", "host"}
    assert [row["name"] for row in found["left_out"]] == ["default, eagle3"], "no head was given"
    assert found["device"] == "cpu" and "say nothing" in found["times"] and found["provenance"]["command"]
    for name in ("default", "host"):
        assert (rows[name]["as_stock"], rows[name]["verdict"]) == (rows["stock"]["tokens"], "same")
        assert rows[name]["counters"]["misses"] > 0 and rows[name]["counters"]["bytes"]["host"] > 0
