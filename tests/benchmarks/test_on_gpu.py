"""The script that makes a GPU's figures, from end to end on a CPU: real engines of a tiny model, side by side."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zoo
from typer.testing import CliRunner

from benchmarks.serving import on_gpu, one_engine
from benchmarks.shapes import routing, shape
from vllm_spac.recording.trace_file import TraceFacts
from vllm_spac.tools.traces.synthetic import decoded


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


@pytest.fixture
def alternating(tmp_path: Path) -> Path:
    """A trace of two layers, whose tokens choose experts 0 to 3 for 24 tokens, and 4 to 7 for as many."""
    rows, facts = 48 * routing.STREAMS, TraceFacts(2, 16, 4)
    ids = (np.arange(rows) // 24 % 2 * 4)[:, None, None] + np.arange(4)
    tokens = np.broadcast_to(ids, (rows, 2, 4))[None].astype(np.uint8)
    decoded(facts, tokens, None, np.zeros((1, rows), dtype=np.int64), 0).save(tmp_path / "alternating.trace")
    return tmp_path / "alternating.trace"


def test_a_shape_is_served_timed_and_resumed(alternating: Path, tmp_path: Path, monkeypatch) -> None:
    """No weights on a disk; routers follow the stream in stock and plugin alike, so that tokens are equal."""
    monkeypatch.setattr(shape, "FOLDER", tmp_path / "shapes")
    output = tmp_path / "result.json"
    command = [
        f"shape:tiny@stream={alternating}",
        "--only",
        "ptr",
        "--batch",
        "1,3",
        "--decode-tokens",
        "8",
        "--prompt-tokens",
        "20,300",
    ]
    command += ["--output", str(output), "--minutes", "8"]
    done = CliRunner().invoke(on_gpu.app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())
    stock, ours = found["serving"]
    assert (stock["name"], ours["name"]) == ("stock", "ptr 25%") and found["tokens"] == []
    for row in (stock, ours):
        assert [each["batch"] for each in row["decode"]] == [1, 3]
        assert [each["tokens"] for each in row["prompts"]] == [20, 300]
        assert row["beside"]["first_token"] > 0 and "no GPU" in row["profile"]["left_out"]
    assert ours["verdict"] == "same" and ours["as_stock"] == ours["tokens"] == (1 + 3) * 8 + 2 * one_engine.REPEATS
    answers = [[int(token) for token in answer.split()] for answer in stock["answers"]]
    assert {token % routing.STREAMS for token in answers[0]} == {0}, "a request left its stream"
    assert len({token for answer in answers for token in answer}) > 6, "tokens that hardly differ show no error"
    for each in (each["counters"] for each in ours["decode"]):
        # prompts of 40 tokens choose all eight experts of both layers, and there are eight slots; answers choose four
        assert 8 <= each["misses"] <= 16 and each["hits"] >= 7 * 8, "routers do not follow the stream"
    assert found["label"] == "random weights" and found["shapes"]["serving"]["overlap"] > 0.9

    found["serving"].pop()
    output.write_text(json.dumps(found))
    other = CliRunner().invoke(on_gpu.app, [*command, "--resume", "--seed", "1"])
    assert other.exit_code == 2 and "another seed" in other.output
    again = CliRunner().invoke(on_gpu.app, [*command, "--resume"])
    assert again.exit_code == 0, again.output
    resumed = json.loads(output.read_text())
    assert resumed["serving"][0] == stock, "what is there does not run again"
    assert resumed["serving"][1]["verdict"] == "same" and resumed["resumed"] == [found["provenance"]]
