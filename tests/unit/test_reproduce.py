"""Every figure of the README has a command, and its results come from code and traces in the tree."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
reproduce = importlib.import_module("reproduce")
rendered = importlib.import_module("rendered")


def test_numbers_in_documents_are_those_of_the_results() -> None:
    """Otherwise: `python benchmarks/reproduce.py tables`."""
    assert list(rendered.problems()) == []


def test_results_are_described_by_rendered_numbers_alone() -> None:
    """Decimals of benchmarks/README.md outside of markers and code are settings and versions, not measurements."""
    text = (rendered.ROOT / "benchmarks" / "README.md").read_text()
    text = re.sub(r"<!-- results:.*?<!-- end -->|`[^`]*`|```.*?```", "", text, flags=re.DOTALL)
    settings = {"1.2", "0.46", "0.32", "12.5", "0.8", "0.5"}  # MB, GB, vLLM, 8 of 64 experts, a mass, the guard's limit
    assert set(re.findall(r"\d+\.\d+", text)) <= settings


def test_markers_are_not_taken_for_blocks_of_html() -> None:
    """A line that begins with a comment ends a paragraph of Markdown."""
    for name in rendered.DOCUMENTS:
        for line in (rendered.ROOT / name).read_text().splitlines():
            assert re.fullmatch(r"<!-- results:[\w.]+ -->|(?!\s*<!-- results).*", line), line


def test_rendering() -> None:
    values = {"a": "2.0", "b": "| x |\n|---|"}
    text = "so <!-- results:a -->1.9<!-- end --> fast\n<!-- results:b -->\n| y |\n<!-- end -->\n"
    expected = "so <!-- results:a -->2.0<!-- end --> fast\n<!-- results:b -->\n| x |\n|---|\n<!-- end -->\n"
    assert rendered.document(text, values) == expected == rendered.document(expected, values)
    with pytest.raises(KeyError):
        rendered.document(text, {"a": "2"})


def test_problems_and_their_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendered, "ROOT", tmp_path)
    monkeypatch.setattr(rendered, "DOCUMENTS", ("a.md",))
    monkeypatch.setattr(rendered, "rendered", lambda: {"a": "2.0", "b": "3"})
    (tmp_path / "a.md").write_text("it takes <!-- results:a -->1.9<!-- end --> s\n")
    wrong, unused = rendered.problems()
    assert wrong.startswith("a.md: ") and "1.9" in wrong and "2.0" in wrong and unused.startswith("b: ")
    assert rendered.update() == ["a.md"] and rendered.update() == []
    assert [problem.partition(":")[0] for problem in rendered.problems()] == ["b"]


def test_table() -> None:
    assert rendered.table(("", "a"), [("x", ""), ("y", "1")]) == "| | a |\n|---|---|\n| x | |\n| y | 1 |"


def test_every_result_has_a_figure_and_every_figure_its_results() -> None:
    assert list(reproduce.unnamed()) == []


def test_results_are_of_what_is_in_the_tree_or_say_that_they_are_not() -> None:
    assert list(reproduce.of_something_else(history=False)) == []


@pytest.mark.full  # who rebases commits that results name sees it here, and is not kept from landing them
def test_commits_are_in_the_history_or_said_not_to_be() -> None:
    why = reproduce.unknown_history()
    if why:
        pytest.skip(f"commits cannot be looked up: {why}")
    assert list(reproduce.of_something_else(history=True)) == []


def test_traces_are_as_they_were_recorded() -> None:
    recorded = json.loads((reproduce.TRACES / "traces.json").read_text())
    assert set(recorded["traces"]) == {path.name for path in reproduce.TRACES.glob("*.trace")}
    for name, facts in recorded["traces"].items():
        assert reproduce.sha256(reproduce.TRACES / name) == facts["sha256"], name
    assert recorded["provenance"]["command"] == "python benchmarks/replay/record.py"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One figure with one result, in another checkout."""
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text("see `toy_one.json`")
    (tmp_path / "input").touch()
    figure = reproduce.Figure("a table", ("toy_one.json",), ("python benchmarks/one.py",), inputs=("input",))
    monkeypatch.setattr(reproduce, "FIGURES", {"one": figure})
    for name, path in (("ROOT", tmp_path), ("RESULTS", tmp_path / "results"), ("TRACES", tmp_path / "traces")):
        monkeypatch.setattr(reproduce, name, path)
    write(tmp_path, {})
    return tmp_path


def write(folder: Path, changes: dict, name: str = "toy_one.json", **content) -> None:
    origin = {"command": "python benchmarks/one.py", "git": {"commit": "c0ffee", "dirty": False}}
    origin |= {"versions": {"python": "3"}, "machine": {"cores": 2}, "date": "today"} | changes
    (folder / "results" / name).write_text(json.dumps({"provenance": origin, **content}))


def problems() -> list[str]:
    return [*reproduce.unnamed(), *reproduce.of_something_else(history=not reproduce.unknown_history())]


def test_nothing_is_wrong_elsewhere(elsewhere: Path) -> None:
    assert problems() == []
    assert reproduce.unknown_history() == "this is no git checkout"


def test_a_file_without_a_figure(elsewhere: Path) -> None:
    (elsewhere / "results" / "more.png").touch()
    (elsewhere / "results" / "toy_one.json").unlink()
    (elsewhere / "README.md").write_text("`benchmarks/results/toy_other.json`, ![](x/toy_one.png)")
    (elsewhere / "input").unlink()
    assert [problem.partition(":")[0] for problem in problems()] == [
        "more.png",
        "toy_one.json",
        "toy_one.png",
        "toy_other.json",
        "one",
    ]


def test_a_file_of_two_figures(elsewhere: Path) -> None:
    reproduce.FIGURES["two"] = reproduce.FIGURES["one"]
    assert problems() == ["toy_one.json: two figures have it"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"git": None, "date": ""}, "its provenance has no git, date"),
        ({"command": "python benchmarks/one.py --quick"}, "was made by python benchmarks/one.py --quick"),
    ],
)
def test_a_result_of_another_command(elsewhere: Path, changes: dict, problem: str) -> None:
    write(elsewhere, changes)
    assert problems() == [f"toy_one.json: {problem}"]


def test_a_result_of_another_trace(elsewhere: Path) -> None:
    (elsewhere / "traces").mkdir()
    (elsewhere / "traces" / "a.trace").write_bytes(b"routing")
    same = reproduce.sha256(elsewhere / "traces" / "a.trace")
    write(elsewhere, {}, traces={"a": {"sha256": same}})
    assert problems() == []
    write(elsewhere, {}, traces={"a": {"sha256": "0"}, "b": {"sha256": same}})
    assert problems() == [f"toy_one.json: is of another {name}.trace than those below traces" for name in "ab"]


def test_a_result_of_a_trace_in_a_folder(elsewhere: Path) -> None:
    """Traces of several models have the same names."""
    for folder in ("traces", "traces/local"):
        (elsewhere / folder).mkdir()
        (elsewhere / folder / "a.trace").write_bytes(folder.encode())
    write(elsewhere, {}, traces={"a": {"sha256": reproduce.sha256(elsewhere / "traces" / "local" / "a.trace")}})
    assert problems() == []


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main")
    done = reproduce.subprocess.run(["git", *who, "-C", str(folder), *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_commits_that_are_not_in_the_history(elsewhere: Path) -> None:
    git(elsewhere, "init")
    for branch in ("main", "other"):
        git(elsewhere, "checkout", "-b", branch) if branch == "other" else None
        git(elsewhere, "commit", "--allow-empty", "-m", branch)
    gone = git(elsewhere, "rev-parse", "HEAD")
    git(elsewhere, "checkout", "main")
    here = git(elsewhere, "rev-parse", "HEAD")
    write(elsewhere, {"git": {"commit": here}}, sessions=[{"git": {"commit": here}}])
    assert problems() == []
    for commit in (gone, "c0ffee"):
        write(elsewhere, {"git": {"commit": here}}, sessions=[{"git": {"commit": commit}}])
        assert problems() == [f"toy_one.json: {commit} is not in the history of this checkout"]
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], stale="of another time")
    assert problems() == []
    write(elsewhere, {"git": {"commit": here}})
    assert problems() == ["one: its results are of what is in the tree, it is not stale"]


def test_a_shallow_checkout_is_not_judged(elsewhere: Path, tmp_path: Path) -> None:
    git(elsewhere, "init")
    for number in range(2):
        git(elsewhere, "commit", "--allow-empty", "-m", str(number))
    (elsewhere / ".git" / "shallow").write_text(git(elsewhere, "rev-parse", "HEAD") + "\n")
    assert reproduce.unknown_history() == "this checkout is shallow" and problems() == []
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], stale="of another time")
    assert problems() == [], "its commit may be lost"


def test_commands() -> None:
    runner = CliRunner()
    listed = runner.invoke(reproduce.app, ["list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in reproduce.FIGURES)
    for name in ("nothing", "v2"):
        refused = runner.invoke(reproduce.app, ["run", name], env={"COLUMNS": "300"})
        assert refused.exit_code == 2 and "no command makes" in refused.output


@pytest.mark.parametrize(("options", "made"), [([], "b"), (["--timed"], "ac")])
def test_making_all_again(elsewhere: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], made: str) -> None:
    """In order, with the minutes that are left, and rendered at the end; what has no result is left out."""
    (elsewhere / "s.py").write_text("import sys\nopen('said', 'a').write(sys.argv[1])\n")
    figures = {
        letter: reproduce.Figure("a table", (f"{letter}.json",), (f"python s.py {letter}",), timed=letter != "b")
        for letter in "abc"
    } | {"d": reproduce.Figure("printed", (), ("python s.py d",), timed=bool(options))}
    monkeypatch.setattr(reproduce, "FIGURES", figures)
    monkeypatch.setattr(rendered, "update", lambda: ["a.md"])
    done = CliRunner().invoke(reproduce.app, ["results", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "rendered: a.md" in done.output, done.output
    assert (elsewhere / "said").read_text() == made
    assert f"1 of {len(made)}: {made[0]}, about 10 of the {10 * len(made)} minutes left" in done.output


def test_running_a_figure(elsewhere: Path) -> None:
    """From the root, with this Python; it stops at the first command that fails."""
    script = elsewhere / "s.py"
    script.write_text("import os, sys\nopen('said', 'a').write(sys.argv[1])\nsys.exit(sys.argv[1] == 'b')\n")
    commands = tuple(f"python s.py {letter}" for letter in "abc")
    reproduce.FIGURES["one"] = replace(reproduce.FIGURES["one"], commands=commands)
    assert CliRunner().invoke(reproduce.app, ["run", "one"]).exit_code == 1
    assert (elsewhere / "said").read_text() == "ab"
