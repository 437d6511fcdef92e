"""``benchmarks/replay/run.py`` on tiny experts: it loads what the simulator predicts, and checks what it loaded."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import RequestRows, RowKind
from vllm_spac.decisions.costs import Costs
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.storage import disk
from vllm_spac.tools.traces.simulation import simulate
from vllm_spac.tools.traces.synthetic import synthetic_trace

NBYTES = 4096


@pytest.fixture(scope="module")
def run():
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "replay" / "run.py"
    sys.path.insert(0, str(path.parents[1]))
    spec = importlib.util.spec_from_file_location("replay_run", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(path.parents[1]))
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def trace():
    return synthetic_trace(layers=2, experts=12, top_k=2, steps=40, drafts=2, expert_bytes=NBYTES)


def one(run, trace, store, slots, policy, **knobs):
    options = {"io_threads": 2, "seconds": 60, "rate": 1e9} | knobs
    return run.replay(trace, store, slots, policy, options.pop("engine", PrefetchSettings()), **options)


@pytest.mark.parametrize("store", ["disk", "host"])
def test_moves_what_the_simulator_says(run, trace, store: str, tmp_path: Path) -> None:
    with run.packed(trace, NBYTES, store, tmp_path) as held:
        for policy in ("lru", "layer_lru", "reuse", "utility@upper=1", "belady"):
            for slots in (4, 9, 24):
                case = one(run, trace, held, slots, policy)
                same = simulate(trace, slots, Costs.read("h200"), policy=policy)
                assert (case.hits, case.misses, case.bytes) == (same.hits, same.misses, same.bytes), policy
                assert case.complete and case.steps == 40 and case.hit_rate == pytest.approx(same.hit_rate)
                assert case.bound_seconds == case.bytes / 1e9 and case.seconds > 0
                assert case.ratio is None if slots == 24 else case.ratio == case.seconds / case.bound_seconds
    assert list(tmp_path.iterdir()) == []


def test_reading_ahead_moves_more(run, trace, tmp_path: Path) -> None:
    with run.packed(trace, NBYTES, "host", tmp_path) as held:
        case = one(run, trace, held, 12, "utility", engine=PrefetchSettings(prefetch="utility"))
    assert case.complete and case.hits + case.misses > 0


def test_time_is_bounded(run, trace, tmp_path: Path) -> None:
    with run.packed(trace, NBYTES, "host", tmp_path) as held:
        case = one(run, trace, held, 6, "lru", seconds=0)
        part = one(run, trace, held, 6, "lru", steps=7)
    assert (case.steps, case.complete, case.bytes, case.ratio) == (0, False, 0, None)
    assert (part.steps, part.complete) == (7, True)
    rate = run.Rate(run.Spread.of([1e9]), "copies")
    assert "use --steps 1" in run._table([case, part], rate).caption
    assert "stopped" not in run._table([part], rate).caption


def test_a_wrong_expert_is_noticed(run, trace, tmp_path: Path) -> None:
    with run.packed(trace, NBYTES, "host", tmp_path) as held:
        for block in held._layers.values():
            block.tensors["w"][3, 0] += 1
        with pytest.raises(ConfigError, match="does not hold expert"):
            one(run, trace, held, 23, "lru")


def test_too_many_slots(run, trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run.packed(trace, NBYTES, "host", tmp_path) as held:
        for slots in (1, 25):
            with pytest.raises(ConfigError, match="use from 2"):
                one(run, trace, held, slots, "lru")
        monkeypatch.setattr(run, "available_host_bytes", lambda: 1000)
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="use fewer --slots"):
                one(run, trace, held, 6, "lru")


def test_no_room_is_found_out_first(run, trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: SimpleNamespace(free=300 << 20))
    with pytest.raises(StoreError, match="needs .* are free"), run.packed(trace, 4 << 20, "disk", tmp_path):
        raise AssertionError
    assert list(tmp_path.iterdir()) == []


def test_requests_of_a_step(run) -> None:
    step = run.step_of(np.array([0, 0, 0, 1, 1, 2, 3, 3, 2, 3, 4, 4], dtype=np.uint8))
    assert step.requests == (
        RequestRows(0, 3, RowKind.PREFILL),
        RequestRows(3, 4, RowKind.DECODE),
        RequestRows(4, 5, RowKind.DECODE),
        RequestRows(5, 8, RowKind.VERIFY, 2),
        RequestRows(8, 10, RowKind.VERIFY, 1),
    )
    assert run.step_of(np.zeros(0, dtype=np.uint8)).requests == ()


def test_command(run, trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "exit_on_sigterm", lambda: None)
    trace.save(tmp_path / "run.trace")
    numbers, picture = tmp_path / "o.json", tmp_path / "o.png"
    options = ["--policy", "lru,reuse", "--slots", "25%,50%", "--json", str(numbers), "--picture", str(picture)]
    options += ["--disk-dir", str(tmp_path / "d"), "--store", "disk"]
    result = CliRunner().invoke(run.app, [str(tmp_path / "run.trace"), *options], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "hit rate" in result.output and "best rate" in result.output
    content = json.loads(numbers.read_text())
    assert [(case["slots"], case["policy"]) for case in content["cases"]] == [
        (6, "lru"),
        (6, "reuse"),
        (12, "lru"),
        (12, "reuse"),
    ]
    assert content["provenance"]["git"]["commit"] and content["rate"]["details"]["file_bytes"] == NBYTES
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "d").iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["/nowhere"], "cannot be read as a routing trace"),
        (["T", "--store", "tape"], "use disk or host"),
        (["T", "--prefetch", "all"], "is not known"),
        (["T", "--policy", "mru"], "no 'mru'"),
        (["T", "--slots", "auto"], "auto needs a machine"),
        (["T", "--disk-dir", "/proc/d"], "/proc/d"),
    ],
)
def test_refusals_are_one_line(run, trace, tmp_path: Path, options, named: str, monkeypatch) -> None:
    monkeypatch.setattr(run, "exit_on_sigterm", lambda: None)
    trace.save(tmp_path / "run.trace")
    options = [str(tmp_path / "run.trace") if option == "T" else option for option in options]
    if "--disk-dir" not in options:
        options += ["--disk-dir", str(tmp_path)]
    result = CliRunner().invoke(run.app, [*options, "--json", str(tmp_path / "o")], env={"COLUMNS": "200"})
    assert result.exit_code == 1 and "error:" in result.output and named in result.output
    assert sorted(item.name for item in tmp_path.iterdir()) == ["run.trace"]
