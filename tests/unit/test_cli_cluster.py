"""``vllm-spac cluster`` without a worker: files that are refused, and what the others show. Real ones: tests/parity."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.errors import ConfigError
from vllm_spac.methods.od_moe.places import ClusterFile, Place, RunningWorkers
from vllm_spac.system.files import LockFile


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cluster", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def ended() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def write(path: Path, *places: Place) -> Path:
    path.write_text(ClusterFile(secret="ab" * 32, workers=places).text())
    path.chmod(0o600)
    return path


def place(pid: int, machine: str = platform.node(), port: int = 5555) -> Place:
    return Place(address=f"tcp://127.0.0.1:{port}", pid=pid, machine=machine)


def test_show_says_which_workers_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's process is none, although it runs: a number may be another program's by now."""
    file = write(tmp_path / "cluster.json", place(ended()), place(os.getpid()), place(7, "elsewhere"))
    text = run("show", "--file", file)
    assert text.count("ended") == 2 and "on another machine" in text
    assert "abab" not in text, "the secret is not shown"
    monkeypatch.setattr("vllm_spac.cli.cluster.MODULE", psutil.Process().cmdline()[0])
    text = run("show", "--file", file)
    assert text.count("ended") == 1 and "runs since 20" in text and "iB" in text


def test_stop_ends_no_other_program_and_keeps_other_machines(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.json", place(os.getpid()), place(7, "elsewhere"))
    assert "0 workers stopped, 1 had ended" in run("stop", "--file", file)
    assert [each.machine for each in ClusterFile.read(file).workers] == ["elsewhere"]
    assert file.stat().st_mode & 0o777 == 0o600
    write(file, place(os.getpid()))
    run("stop", "--file", file)
    assert not file.exists()


def test_a_file_that_no_engine_could_be_given_is_not_made(tmp_path: Path) -> None:
    assert "takes no path with @ in it" in run("start", "--file", tmp_path / "a@b" / "cluster.json", code=1)
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    assert "there is no cluster in" in run("show", "--file", file, code=1)
    write(file, place(1)).chmod(0o644)
    assert "run chmod 600" in run("show", "--file", file, code=1)
    for text in ("", "[]", '{"secret": "ab", "workers": []}', '{"secret": 5}', "{"):
        file.write_text(text)
        file.chmod(0o600)
        assert "no file of vllm-spac cluster" in run("stop", "--file", file, code=1)


@pytest.mark.parametrize("address", ["127.0.0.1:5", "tcp://a b:5", "ipc:///x", "tcp://host", "tcp://host:123456"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        Place(address=address, pid=1, machine="here")


def test_too_few_workers(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.json", place(1))
    with pytest.raises(ConfigError, match=r"2 workers .* has 1 of them; start more"):
        RunningWorkers(file, 2)
    with pytest.raises(ConfigError, match="has 0 of them"):
        RunningWorkers(write(file), None)
    assert RunningWorkers(write(file, place(1), place(2, port=6)), 1).addresses() == ["tcp://127.0.0.1:5555"]


_WORKER = """
import json, os, sys, time
secret = sys.stdin.readline().strip()
print("worker of", secret, file=sys.stderr, flush=True)
time.sleep(1)  # so that starts that do not wait for one another all read the file before one writes it
print(json.dumps({"address": f"tcp://127.0.0.1:{os.getpid() % 60000 + 1}"}), flush=True)
time.sleep(600)
"""
_COMMAND = """
import sys
from vllm_spac.cli import cluster, main
from vllm_spac.methods.od_moe import places
cluster.MODULE = places.MODULE = "stand_in_worker"
print(flush=True)
sys.stdin.readline()
main.app(["cluster", *sys.argv[1:]])
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of commands that start stand-ins, which listen to nobody."""
    (modules := tmp_path / "modules").mkdir()
    (modules / "stand_in_worker.py").write_text(_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("COLUMNS", "300")
    yield tmp_path / "cluster" / "cluster.json"
    for process in stand_ins(tmp_path):
        process.kill()


def stand_ins(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.environ().get("PYTHONPATH") == str(folder / "modules")
                and "stand_in_worker" in process.cmdline()
            ):
                found.append(process)
    return found


def command(*arguments: object) -> subprocess.Popen[str]:
    """Starts a command, which is ready and waits for ``go``."""
    started = subprocess.Popen(
        [sys.executable, "-c", _COMMAND, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "\n"
    return started


def go(*commands: subprocess.Popen[str]) -> None:
    for each in commands:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()


def test_workers_that_are_started_at_once_are_all_in_the_file(cluster: Path) -> None:
    """And have one secret; nobody else may open what is written, and ``stop`` ends them all."""
    starts = [command("start", "--file", cluster) for _ in range(3)]
    go(*starts)
    said = [each.communicate()[0] for each in starts]
    assert [each.returncode for each in starts] == [0, 0, 0], said
    found = ClusterFile.read(cluster)
    assert len(found.workers) == 3
    assert all(any(f"process {each.pid}\n" in text for text in said) for each in found.workers)
    assert cluster.with_suffix(".log").read_text().splitlines() == [f"worker of {found.secret}"] * 3
    modes = {path.name: path.stat().st_mode & 0o777 for path in (cluster.parent, *cluster.parent.iterdir())}
    assert modes == {"cluster": 0o700, "cluster.json": 0o600, "cluster.json.lock": 0o600, "cluster.log": 0o600}
    stopped = command("stop", "--file", cluster)
    assert "3 workers stopped" in stopped.communicate("\n")[0]
    assert not cluster.exists() and not stand_ins(cluster.parents[1])


def test_a_stop_waits_for_a_start_and_says_so(tmp_path: Path) -> None:
    """Else it would read the file before the new worker is in it."""
    file = write(tmp_path / "cluster.json", place(ended()))
    start = LockFile(tmp_path / "cluster.json.lock")
    assert start.take()
    stop = command("stop", "--file", file)
    go(stop)
    assert stop.stdout is not None
    assert f"waiting for process {os.getpid()} on {platform.node()}, which changes {file}" in stop.stdout.readline()
    write(file, place(ended()), place(ended(), port=6))
    start.close()
    assert "0 workers stopped, 2 had ended" in stop.communicate()[0]


def test_a_wait_for_others_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "cluster.json", place(ended()))
    lock = LockFile(tmp_path / "cluster.json.lock")
    assert lock.take()
    monkeypatch.setattr("vllm_spac.cli.cluster._WAIT", 0.0)
    said = run("stop", "--file", file, code=1)
    assert f"process {os.getpid()} on {platform.node()} has been changing" in said and "end it and try again" in said
    assert len(ClusterFile.read(file).workers) == 1
    lock.close()


def test_workers_that_cannot_be_written_to_the_file_are_ended(cluster: Path) -> None:
    start = command("start", "--workers", "2", "--file", cluster)
    cluster.parent.mkdir()
    (cluster.parent / f"cluster.json.{start.pid}.partial").mkdir()  # as what another program has put there
    said = start.communicate("\n")[0]
    assert start.returncode == 1 and "cannot be written" in said and "--file" in said and "Traceback" not in said
    assert cluster.with_suffix(".log").read_text().count("worker of") == 2
    assert not stand_ins(cluster.parents[1])


def test_a_cluster_that_others_may_change_is_not_joined(tmp_path: Path) -> None:
    """Who may put a file there would have its workers' answers computed with, and memory of this machine."""
    (folder := tmp_path / "shared").mkdir()
    folder.chmod(0o777)
    for name in ("start", "stop"):
        write(folder / "cluster.json", place(1))
        said = run(name, "--file", folder / "cluster.json", code=1)
        assert "may be written by every user; if you trust it, run `chmod go-w" in said, said
        assert sorted(path.name for path in folder.iterdir()) == ["cluster.json"]
    (folder / "cluster.json").unlink()
    assert "every user" in run("start", "--file", folder / "cluster.json", code=1)
    assert list(folder.iterdir()) == []
