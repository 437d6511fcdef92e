"""What is computed once per session: by one worker, again where anything differs that matters, and never by halves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import shared


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(shared.FOLDER, str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


class Counted:
    """Returns how often it was called."""

    calls = 0

    def __call__(self) -> list[int]:
        self.calls += 1
        return [self.calls]


def test_it_is_computed_once(model: Path) -> None:
    compute = Counted()
    assert [shared.once("x", {"model": model, "n": 1}, compute) for _ in range(3)] == [[1]] * 3


def test_a_copy_of_a_model_is_the_same_model(model: Path, tmp_path: Path) -> None:
    compute, copy = Counted(), tmp_path / "copy"
    shared.once("x", {"options": [{"draft": str(model)}]}, compute)
    copy.mkdir()
    (copy / "config.json").write_text("{}")
    assert shared.once("x", {"options": [{"draft": str(copy)}]}, compute) == [1]
    (copy / "config.json").write_text("[]")
    assert shared.once("x", {"options": [{"draft": str(copy)}]}, compute) == [2], "as large, other bytes"
    (copy / "config.json").rename(copy / "other.json")
    assert shared.once("x", {"options": [{"draft": str(copy)}]}, compute) == [3]


def test_whatever_matters_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Counted()

    def once(what: str = "x", **arguments: object) -> int:
        return shared.once(what, {"n": 1} | arguments, compute)[0]

    assert [once(), once("y"), once(n=2), once(n="1"), once(m=None), once()] == [1, 2, 3, 4, 5, 1]
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    assert once() == 6
    monkeypatch.setattr(shared.importlib.metadata, "version", lambda name: "0.0")
    assert once() == 7


PROGRAM = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[1])
import shared
def compute():
    with open(sys.argv[2], "a") as log:
        log.write("computed ")
    time.sleep(0.5)
    if sys.argv[3] == "dies":
        import os
        os._exit(1)
    return 5
print(shared.once("x", 1, compute))
"""


def processes(log: Path, *ends: str) -> list[str]:
    """What processes print of which the others start when the first has begun."""
    line, started = [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(log)], []
    for end in ends:
        started.append(subprocess.Popen([*line, end], stdout=subprocess.PIPE, text=True))
        while not log.exists() and started[0].poll() is None:
            time.sleep(0.01)
    return [process.communicate(timeout=600)[0] for process in started]


def test_workers_wait_for_the_first(tmp_path: Path) -> None:
    assert processes(tmp_path / "log", "ends", "ends", "ends") == ["5\n"] * 3
    assert (tmp_path / "log").read_text() == "computed "
