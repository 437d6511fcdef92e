"""``vllm-spac cluster`` without a worker: files that are refused, and what the others show. Real ones: tests/parity."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.errors import ConfigError
from vllm_spac.methods.od_moe import inquiries
from vllm_spac.methods.od_moe.places import ClusterFile, Place, RunningWorkers


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
    monkeypatch.setattr(inquiries, "counts", lambda addresses, secret: ["did not answer"] * len(addresses))
    file = write(tmp_path / "cluster.json", place(ended()), place(os.getpid()), place(7, "elsewhere"))
    text = run("show", "--file", file)
    assert text.count("ended") == 2 and "on another machine" in text
    assert "abab" not in text, "the secret is not shown"


def test_show_prints_what_workers_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that may run are asked; what they say is shown, and obeyed in nothing."""
    serving = {"pool": "p", "layers": 3, "calls": 1234, "rows": 5678, "hits": 3, "misses": 1, "loads": 42}
    serving |= {"slot_bytes": 1 << 30, "memory_bytes": 3 << 30, "serving": True}
    odd = {"pool": "\x1b[2J", "layers": "many", "hits": [1], "memory_bytes": None, "rows": 1.5}
    said = [serving, {"memory_bytes": 1 << 29, "serving": False}, odd, "it has another secret"]
    asked: list[str] = []

    def counts(addresses: list[str], secret: bytes) -> list:
        asked.extend(addresses)
        assert secret == bytes.fromhex("ab" * 32)
        return said

    monkeypatch.setattr(inquiries, "counts", counts)
    others = [place(7, "elsewhere", port) for port in (1, 2, 3, 4)]
    text = run("show", "--file", write(tmp_path / "cluster.json", place(ended()), *others))
    assert asked == [other.address for other in others]
    for part in ("3 1,234 5,678 75.0% 42 1.00 GiB 3.00 GiB", "serves none", "512.0 MiB", "it has another secret"):
        assert part in text, part
    assert "\x1b" not in text and "abab" not in text


def test_stop_ends_no_other_program_and_keeps_other_machines(tmp_path: Path) -> None:
    file = write(tmp_path / "cluster.json", place(os.getpid()), place(7, "elsewhere"))
    assert "0 workers stopped, 1 had ended" in run("stop", "--file", file)
    assert [each.machine for each in ClusterFile.read(file).workers] == ["elsewhere"]
    assert file.stat().st_mode & 0o777 == 0o600
    write(file, place(os.getpid()))
    run("stop", "--file", file)
    assert not file.exists()


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
    with pytest.raises(ConfigError, match=r"workers=2 .* has 1 of them; start more"):
        RunningWorkers(file, 2)
    with pytest.raises(ConfigError, match="has 0 of them"):
        RunningWorkers(write(file), None)
    assert RunningWorkers(write(file, place(1), place(2, port=6)), 1).addresses() == ["tcp://127.0.0.1:5555"]
