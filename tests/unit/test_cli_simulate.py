"""``vllm-spac trace show`` and ``vllm-spac trace simulate``: what they print, write and refuse."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.decisions.costs import Costs
from vllm_spac.recording.trace_file import Trace, TraceFacts
from vllm_spac.recording.trace_writer import TraceWriter
from vllm_spac.tools.traces import trace_statistics
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace
from vllm_spac.tools.traces.trace_text import Text


def run(*arguments, code: int = 0) -> str:
    """Output of the command on a wide terminal, with lines of text joined."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    synthetic_trace(layers=2, experts=20, top_k=2, steps=30, drafts=2).save(tmp_path / "run.trace")
    return tmp_path / "run.trace"


def test_show(recorded: Path) -> None:
    text = run("trace", "show", recorded)
    for part in ("2 x 20 = 40", "30 verify", "30 verify, 60 draft", "is used again after", "hits of LRU"):
        assert part in text
    for part in ("one LRU per layer", "of 90 rows, those known to be text"):
        assert part in text
    overlap = 100 * trace_statistics.overlap(Text.of(Trace.load(recorded))).mean()
    assert f"all {overlap:.1f}%" in text


def test_show_without_known_text(tmp_path: Path) -> None:
    """Drafts of two requests: which were accepted is not recorded."""
    columns = {
        "step_kind": np.zeros(1, np.uint8),
        "step_rows": np.array([4], np.uint32),
        "step_tokens": np.array([3], np.uint32),
        "row_kind": np.array([2, 3, 2, 3], np.uint8),
        "record_step": np.zeros(1, np.uint32),
        "record_layer": np.zeros(1, np.uint16),
        "ids": np.tile(np.array([0, 1], np.uint8), (4, 1)),
    }
    Trace.of(TraceFacts(1, 8, 2), **columns).save(tmp_path / "two.trace")
    assert "0 of 4 rows" in run("trace", "show", tmp_path / "two.trace")


def test_simulate_prints_and_writes_what_the_library_says(recorded: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "o.json"
    options = ("--policy", "lru,utility@boundaries=(3,1)", "--slots", "25%,7", "--json", numbers)
    text = run("trace", "simulate", recorded, "--profile", "h200", *options)
    assert "h200 (calculated)" in text and "data sheets" in text and "utility@boundaries=(3,1)" in text
    content = json.loads(numbers.read_text())
    assert content["profile"]["provenance"]["how"] == "calculated" and content["model"]["experts"] == 20
    assert [(o["slots"], o["policy"]) for o in content["outcomes"]] == [
        (slots, policy) for slots in (10, 14) for policy in ("lru", "utility@boundaries=(3,1)")
    ]
    same = simulate(Trace.load(recorded), 10, Costs.read("h200"), policy="lru")
    assert (content["outcomes"][0]["hits"], content["outcomes"][0]["tpot"]) == (same.hits, same.tpot)


def test_executions_side_by_side(recorded: Path, tmp_path: Path) -> None:
    numbers = tmp_path / "o.json"
    options = ("--profile", "h200", "--slots", "25%", "--execution", "slots,pointers")
    said = "--policy", "reuse", "--json", numbers
    text = run("trace", "simulate", recorded, *options, *said)
    assert "pointers" in text
    found = json.loads(numbers.read_text())["outcomes"]
    assert [o["execution"] for o in found] == ["slots", "pointers"]
    for outcome in found:
        asked = {"execution": outcome["execution"], "policy": "reuse"}
        same = simulate(Trace.load(recorded), 10, Costs.read("h200"), **asked, layer_ahead=True)
        assert (outcome["hits"], outcome["bytes"], outcome["tpot"]) == (same.hits, same.bytes, same.tpot)
    both = run("trace", "simulate", recorded, *options)
    assert both.count("pointers") == 4 and both.count("belady") == 1, "a ceiling for slots only"


def test_the_next_layer_is_read_ahead_as_in_serving(tmp_path: Path) -> None:
    """With 64 requests a layer uses nearly all of its experts in each step. ``belady`` knows its future without."""
    trace = synthetic_trace(layers=4, experts=8, top_k=2, steps=30, requests=64, skew=0)
    trace.save(tmp_path / "many.trace")
    options = ("--profile", "h200", "--slots", "75%", "--policy", "lru,belady", "--json", tmp_path / "o.json")
    run("trace", "simulate", tmp_path / "many.trace", *options)
    ahead, best = json.loads((tmp_path / "o.json").read_text())["outcomes"]
    without = simulate(Trace.load(tmp_path / "many.trace"), 24, Costs.read("h200"), policy="lru")
    assert ahead["prefetch_hits"] > 50 and without.prefetches == best["prefetches"] == 0
    assert ahead["seconds"] < without.seconds


def test_reads_ahead(recorded: Path, tmp_path: Path) -> None:
    numbers, spec = tmp_path / "o.json", "utility@depth=2@gamma=8@upper=1"
    options = ("--profile", "h200", "--slots", "25%", "--policy", "lru", "--prefetch", spec, "--json", numbers)
    assert "ahead" in run("trace", "simulate", recorded, *options)
    (found,) = json.loads(numbers.read_text())["outcomes"]
    same = simulate(Trace.load(recorded), 10, Costs.read("h200"), prefetch=spec)
    assert found["prefetch"] == spec and found["prefetches"] == same.prefetches > 0
    assert found["hits"] == same.hits != simulate(Trace.load(recorded), 10, Costs.read("h200")).hits


@pytest.mark.parametrize("decides", [("--balancer", "waterfill"), ("--prefetch", "utility")])
def test_no_upper_bound_where_uses_depend_on_decisions(recorded: Path, decides: tuple[str, str]) -> None:
    text = run("trace", "simulate", recorded, "--profile", "h200", "--slots", "25%", *decides)
    assert "reuse" in text and "belady" not in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--profile", "nowhere"), "h200, rtx3090, rtx4090, rtx5090"),
        (("--profile", "h200", "--slots", "auto"), "auto needs a machine"),
        (("--profile", "h200", "--slots", "many"), "--slots: 'many' is not understood"),
        (("--profile", "h200", "--slots", "1%"), "1 slots: use from 2"),
        (("--profile", "h200", "--policy", "mru"), "no 'mru'"),
        (("--profile", "h200", "--prefetch", "luck"), "prefetch='luck' is not known; use off or"),
        (("--profile", "h200", "--execution", "pointer"), "--execution pointer: use slots, pointers"),
        (("--profile", "h200", "--execution", "pointers", "--policy", "belady"), "belady must know"),
        (("--profile", "h200", "--json", "/nowhere/o.json"), "cannot be written"),
    ],
)
def test_refusals_are_one_line(recorded: Path, options, named: str) -> None:
    text = run("trace", "simulate", recorded, *options, code=1)
    assert "error:" in text and named in text and "Traceback" not in text


def test_show_refuses(tmp_path: Path) -> None:
    assert "cannot be read as a routing trace" in run("trace", "show", tmp_path / "none", code=1)
    empty = TraceWriter(tmp_path / "empty", TraceFacts(1, 2, 1)).finish()
    assert "holds no forward" in run("trace", "show", empty, code=1)
