"""``vllm-spac tune`` with real engines on the toy model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import vllm_server

TOY = Path(__file__).parents[2] / "benchmarks" / "toy" / "models" / "target"
ENGINE = {"enforce_eager": True, "max_model_len": 512, "dtype": "float32"}


def environment() -> dict[str, str]:
    """As a user starts it: without what engines of other tests in this process have set for themselves."""
    own = {name: value for name, value in os.environ.items() if name not in vllm_server.OF_THE_TESTS}
    return own | {"VLLM_CPU_KVCACHE_SPACE": "1", "COLUMNS": "200"}


def process(*command: object) -> subprocess.CompletedProcess:
    given = [sys.executable, "-P", *map(str, command)]
    return subprocess.run(given, capture_output=True, text=True, env=environment())


def tuning(folder: Path, minutes: float, *options: object) -> list[object]:
    given = ["--minutes", minutes, "--output-tokens", 16, "--slots", "25%", "--disk-dir", folder, *options]
    return ["-m", "vllm_spac.cli.main", "tune", TOY, *given, "--engine", json.dumps(ENGINE)]


@pytest.mark.full
def test_real_engines_are_measured_and_give_the_same_tokens(tmp_path: Path) -> None:
    """Two minutes are enough for a variant; which are tried depends on the machine."""
    done = process(*tuning(tmp_path, 2, "--allow-rounding"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout and "first start" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.strip().startswith("CPU experts")]
    assert len(rows) == 1 and "equal" in rows[0], done.stdout + done.stderr
    assert any(said in done.stdout for said in ("the time was too short", "\nrun: vllm serve ", "default is kept"))


@pytest.mark.full
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_run_that_is_stopped_says_so_and_leaves_no_engine(tmp_path: Path, number: int, code: int) -> None:
    """As a service manager stops it, and as Ctrl-C does, while a second engine starts."""
    command = [sys.executable, "-P", *map(str, tuning(tmp_path, 30))]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith("in turns with the default"):
                break
        engines = psutil.Process(child.pid).children()
        child.send_signal(number)
        said = child.stderr.read()
    assert child.returncode == code and said.startswith("stopped: nothing was compared so far"), said
    assert engines and not any(engine.is_running() for engine in engines)
