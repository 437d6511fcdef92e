"""Engines whose layers belong to expert workers: stock's tokens, also when a worker ends within a step."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import engines
import psutil
import pytest
from exactness import FLOAT32, assert_same_tokens
from typer.testing import CliRunner

import vllm_spac
from vllm_spac.cli.main import app
from vllm_spac.integration.worker_process import CONNECTIONS
from vllm_spac.methods.od_moe.client import WorkerClient
from vllm_spac.methods.od_moe.places import MODULE, ClusterFile

EXPERTS, TOP_K = 16, 4  # of the tiny Qwen3-MoE


def workers() -> list[psutil.Process]:
    """The worker processes of this process's engine, the first started first."""
    children = psutil.Process().children(recursive=True)
    found = [child for child in children if child.is_running() and MODULE in child.cmdline()]
    return sorted(found, key=lambda process: process.create_time())


@pytest.fixture
def at_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """``at_call(number, act)``: acts right before that layer is sent to its worker."""
    compute, calls = WorkerClient.compute, [0]

    def plan(number: int, act: Callable[[], None]) -> None:
        def counted(*given):
            calls[0] += 1
            if calls[0] == number:
                act()
            return compute(*given)

        monkeypatch.setattr(WorkerClient, "compute", counted)

    return plan


def run(model: Path, spac: dict, **options) -> engines.Run:
    """As ``engines.generate``; with statistics of an engine that lives."""
    with engines.engine(model, spac, **options) as llm:
        tokens = engines.say(llm)
        found = vllm_spac.stats(llm)
        return engines.Run(tokens, found["workers"][0], options.get("dtype", engines.DTYPE))


def test_same_tokens_when_a_worker_is_killed(checkpoint, stock, at_call, tmp_path) -> None:
    """The rows of the layer that it had, and of those until it is back, are computed from the engine's own disk."""
    at_call(31, lambda: os.kill(workers()[0].pid, signal.SIGKILL))
    spac = {"slots": "50%", "executor": "processes@workers=2", "disk_dir": str(tmp_path)}
    found = run(checkpoint("qwen3_moe"), spac)
    assert_same_tokens(found, stock("qwen3_moe"))
    stats = found.stats
    assert (stats["mode"], stats["execution"]) == ("exact", "workers")
    assert stats["worker_rows_elsewhere"] > 0 and stats["expert_workers"].keys() == {"worker-0", "worker-1"}
    assert all(each["rows"] > 0 for each in stats["expert_workers"].values())
    assert stats["hits"] > 0 and stats["misses"] > 0 and stats["slots"] > 0
    for process in workers():  # they end with the engine
        process.wait(30)


def test_same_tokens_from_cacheless_workers(checkpoint, stock, monkeypatch, tmp_path) -> None:
    """OD-MoE: slots for two tokens' experts, dropped after use, and read ahead because the engine says what comes."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    spac = {"slots": "2k", "policy": "drop", "executor": "processes@workers=2", "disk_dir": str(tmp_path)}
    found = run(checkpoint("qwen3_moe"), spac | {"prefetch": f"recent:Recent@experts={EXPERTS}"})
    assert_same_tokens(found, stock("qwen3_moe"))
    stats = found.stats
    assert stats["mode"] == "exact" and stats["worker_rows_elsewhere"] == 0
    for worker in stats["expert_workers"].values():
        assert worker["hints"] > 0 and worker["prefetch_hits"] > 0 and worker["slots"] == 2 * TOP_K, worker


def test_experts_divided_among_two_workers_of_which_one_is_killed(checkpoint, at_call, tmp_path) -> None:
    """Exact up to rounding, and the log and the statistics say so; in float32 no token of these differs."""
    stock = engines.generate(checkpoint("qwen3_moe"), **FLOAT32)
    at_call(31, lambda: os.kill(workers()[0].pid, signal.SIGKILL))
    spac = {"slots": "50%", "executor": "processes@workers=2@per_layer=2", "disk_dir": str(tmp_path)}
    found = run(checkpoint("qwen3_moe"), spac, **FLOAT32)
    assert_same_tokens(found, stock)
    stats = found.stats
    assert (stats["mode"], stats["execution"]) == ("exact up to rounding", "workers")
    assert stats["worker_rows_elsewhere"] == 0, "the other one of the group computes meanwhile"
    first, second = stats["expert_workers"].values()
    # How rows are divided follows from what each worker measured at its start; unit tests divide with given rates.
    assert first["rows"] + second["rows"] > 0 and first["losses"] + first["readmissions"] > 0
    assert stats["hits"] > 0 and stats["misses"] > 0


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_workers_that_ran_before_the_engine(dtype, checkpoint, at_call, tmp_path) -> None:
    """Started by the command, with experts in a folder that the engine does not see; one is stopped, and killed.

    What a lost worker had, the engine computes from its own disk, which it filled from what the workers have packed.
    """
    file = tmp_path / "cluster.json"
    options = ["--file", str(file), "--disk-dir", str(tmp_path / "packed"), "--threads", "1"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    started = CliRunner().invoke(app, ["cluster", "start", "--workers", "3", *options])
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert started.exit_code == 0, started.output
    try:
        pids = [place.pid for place in ClusterFile.read(file).workers]
        assert oct(file.stat().st_mode).endswith("600")
        assert all(psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE) == (min(CONNECTIONS, hard), hard) for pid in pids)
        stock = engines.generate(checkpoint("qwen3_moe"), dtype=dtype)
        spac = {"slots": "100%", "executor": f"cluster@file={file}"}
        spac["disk_dir"] = str(tmp_path / "of the engine")
        for _ in range(2):  # the second start finds everything packed
            found = run(checkpoint("qwen3_moe"), spac, dtype=dtype)
            assert_same_tokens(found, stock)
            assert found.stats["worker_rows_elsewhere"] == 0 and found.stats["misses"] == 0
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(Exception, match="did not answer|tcp://"):
            run(checkpoint("qwen3_moe"), spac, dtype=dtype)
        os.kill(pids[1], signal.SIGCONT)
        at_call(31, lambda: os.kill(pids[0], signal.SIGKILL))
        found = run(checkpoint("qwen3_moe"), spac, dtype=dtype)
        assert_same_tokens(found, stock)
        assert found.stats["worker_rows_elsewhere"] > 0
    finally:
        stopped = CliRunner().invoke(app, ["cluster", "stop", "--file", str(file)])
    assert "2 workers stopped, 1 had ended" in stopped.output and not file.exists()


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_other_experts(family, checkpoint, tmp_path) -> None:
    """Biases and clamped activations; shared experts."""
    stock = engines.generate(checkpoint(family), **FLOAT32)
    spac = {"slots": "50%", "executor": "processes@workers=2", "disk_dir": str(tmp_path)}
    assert_same_tokens(run(checkpoint(family), spac, **FLOAT32), stock)
