"""Provenance, results that refuse to lack it, and how results are shown."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import common
from vllm_spac.errors import ConfigError
from vllm_spac.system import machine as origins
from vllm_spac.tools.tuning.measurer import MeasuringError


@pytest.fixture
def in_git(monkeypatch):
    """Answers of git, so that the tests also run on a copy of the sources."""
    answers = {"rev-parse": "c0ffee", "status": ""}
    monkeypatch.setattr(origins, "_ask_git", lambda root, command, *rest: answers[command])
    return answers


def test_provenance_names_code_machine_and_command(in_git, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{common.ROOT}/benchmarks/x.py", "--name", "two words"])
    in_git["status"] = " M a.py"
    found = common.provenance()
    assert found["command"] == "python benchmarks/x.py --name 'two words'"
    assert found["git"] == {"commit": "c0ffee", "dirty": True}
    assert set(found["versions"]) == {"python", "vllm_spac", "torch", "vllm", "transformers"}
    assert found["machine"]["cores"] >= 1 and found["machine"]["ram_bytes"] > 0 and found["machine"]["cpu"]
    json.dumps(found)


def test_a_copy_without_git_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.delenv("SPAC_COMMIT", raising=False)
    found = common.provenance()
    assert found["git"] == {"commit": "unknown commit", "dirty": None, "why": "no git checkout"}
    assert "unknown commit (no git checkout)" in capsys.readouterr().err
    common.write_result(tmp_path / "result.json", {"provenance": found})
    monkeypatch.setenv("SPAC_COMMIT", "c0ffee")
    assert common.provenance()["git"]["commit"] == "c0ffee"
    assert "c0ffee, named by SPAC_COMMIT (no git checkout)" in capsys.readouterr().err


def test_a_repository_around_a_copy_is_not_its_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    (tmp_path / "copy").mkdir()
    assert origins.code(tmp_path / "copy")["why"] == "no git checkout"
    assert origins.code(tmp_path)["why"].startswith("git rev-parse: "), "it has no commit yet"


def test_what_git_knows_is_not_overridden(in_git, monkeypatch):
    monkeypatch.setenv("SPAC_COMMIT", "another")
    assert common.provenance()["git"]["commit"] == "c0ffee"


def test_result_is_written_with_provenance(tmp_path, in_git):
    path = tmp_path / "new" / "result.json"
    common.write_result(path, {"value": 1, "provenance": common.provenance()})
    assert json.loads(path.read_text())["value"] == 1
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    "known", [None, {}, "yes", {"command": "x", "git": {}, "versions": 1, "machine": 1, "date": 1}]
)
def test_result_without_provenance_is_refused(tmp_path, known):
    with pytest.raises(common.ProvenanceError, match="git"):
        common.write_result(tmp_path / "result.json", {"value": 1, "provenance": known})
    assert not list(tmp_path.iterdir())


def test_result_keeps_the_earlier_file_when_it_cannot_be_written(tmp_path, in_git):
    path = tmp_path / "result.json"
    path.write_text("earlier")
    with pytest.raises(ValueError):  # JSON has no NaN
        common.write_result(path, {"value": float("nan"), "provenance": common.provenance()})
    assert path.read_text() == "earlier"


def test_toy_models_are_known(tmp_path):
    assert common.is_toy(common.TOY / "models" / "target")
    assert not common.is_toy(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(common.TOY)
    assert common.is_toy(link / "models" / "target")


def test_speed_over_the_same_drafts_exact():
    """Not over other drafts, nor at another temperature."""
    kinds = ("none", 0, 0.0), ("tree", 16, 0.0), ("tree", 63, 0.0), ("tree", 16, 1.0)
    rows = [
        {"kind": kind, "drafts": drafts, "temperature": warm, "budget": budget, "speed": speed * factor}
        for (kind, drafts, warm), speed in zip(kinds, (1.0, 0.5, 0.25, 2.0), strict=True)
        for budget, factor in (({}, 1.0), ({"budget": 24}, 1.5))
    ]
    assert common.over_exact(rows) == [None, None, None, 1.5, None, 1.5, None, 1.5]
    assert common.over_exact([{"batch": 8, "budget": {}, "speed": 1.0}]) == [None], "no row says how it drafts"


def test_rows_are_shown(capsys: pytest.CaptureFixture) -> None:
    """Entries of entries, intervals, medians and what is missing."""
    rows = [{"a": "x", "b": {"c": 0.123456}, "d": [1, 2.5]}, {"a": "y", "b": None, "d": [3, 1, 2]}]
    common.show("a title", rows, "a", "b.c", "d", "e")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "a title" and lines[2].split() == ["a", "b.c", "d", "e"]
    assert [line.split() for line in lines if line.split()[:1] in (["x"], ["y"])] == [
        ["x", "0.1235", "1", "-", "2.5"], ["y", "2"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "code"),
    [(common.PlanError("--slots x: no"), 2), (ConfigError("policy=x: no"), 2), (MeasuringError("it ended"), 1)],
)
def test_a_script_says_in_one_line_what_went_wrong(error, code):
    """And hides no other error: a bug has its traceback."""
    script = common.Script("What it does.", "An example.")

    @script.main
    def main(number: Annotated[int, typer.Option(help="Which.")] = 0) -> None:
        raise error if not number else ValueError("a bug")

    done = CliRunner().invoke(script, [])
    assert (done.exit_code, done.output.strip().splitlines()) == (code, [f"error: {error}"])
    assert isinstance(CliRunner().invoke(script, ["--number", "1"]).exception, ValueError)
    shown = CliRunner().invoke(script, ["--help"]).output
    assert all(text in shown for text in ("What it does.", "An example.", "--number", "Which."))
    with pytest.raises(type(error)):
        main()
