"""Every command where torch, vLLM and what comes with it are missing: it works, or says in one line what to install."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click import Command

from vllm_spac.cli.main import app

ROOT = Path(__file__).parents[2]
MODEL, TRACE = ROOT / "benchmarks" / "toy" / "models" / "target", ROOT / "benchmarks" / "traces" / "none1.trace"
WITHOUT = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "vllm", "transformers", "tokenizers", "torchvision", "triton"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Gone())
from vllm_spac.cli.main import app
app()
"""
# What each command is called with, and what it says; an empty text: that something is to be installed.
CALLS = {
    "check": ([MODEL], "vLLM cannot be imported"),
    "plan": ([MODEL, "--machine", "rtx4090"], ""),
    "tune": ([MODEL], ""),
    "knobs": ([], ""),
    "stats": (["http://127.0.0.1:9"], "no server answers"),
    "packed": (["--disk-dir", "."], "no packed experts"),
    "trace simulate": ([TRACE, "--profile", "rtx4090"], ""),
    "quality sweep": ([MODEL, "--prompts", "texts.txt", "--budgets", "8"], ""),
    "predictors train": ([MODEL, "--prompts", "texts.txt", "--output", "p.safetensors"], ""),
    "predictors measure": ([MODEL, "--predictor", "p.safetensors", "--prompts", "texts.txt", "--json", "x"], ""),
    "trace show": ([TRACE], ""),
    "cluster start": (["--workers", "65"], "less than or equal to 64"),  # it would start one
    "cluster show": (["--file", "cluster.json"], "cluster.json"),
    "cluster stop": (["--file", "cluster.json"], "cluster.json"),
}


def commands(command: Command, name: str = "") -> Iterator[str]:
    if not hasattr(command, "commands"):
        yield name
    else:
        for called, inner in command.commands.items():
            yield from commands(inner, f"{name} {called}".strip())


def called(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def test_every_command_is_called_below() -> None:
    assert set(commands(typer.main.get_command(app))) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_it_helps_and_works_or_says_what_to_install(tmp_path: Path, name: str) -> None:
    (tmp_path / "texts.txt").write_text("a text\n\nand another")
    helped = called(tmp_path, *name.split(), "--help")
    assert helped.returncode == 0 and "Usage" in helped.stdout
    given, said = CALLS[name]
    done = called(tmp_path, *name.split(), *given)
    assert "Traceback" not in done.stderr and "ModuleNotFoundError" not in done.stderr, done.stderr
    text = " ".join((done.stdout + done.stderr).split())
    if said:
        assert said in text, text
    else:
        assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, text
        assert text.startswith("error: this command needs ") and "pip install vllm" in text, text
