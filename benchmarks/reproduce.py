"""Makes the published results again, renders their pages, and checks both against what is in the tree.

A result is JSON, and pictures, in ``benchmarks/results`` with the command, the commit, the versions and the machine
they come from. Its page says how it is made (``pages.Made``). Timed results need an otherwise idle machine.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks import pages, pictures
from benchmarks.common import RESULTS, ROOT, TRACES, sha256
from benchmarks.pages import Made
from benchmarks.toy.stored import LOCAL

FIGURES = {name: pages.source(name)[0] for name in pages.names()}
_FLAT, _LOCAL = "benchmarks/toy/models", str(LOCAL.relative_to(ROOT))
_REAL, _FIT = ".cache/real", "python benchmarks/real/fit"
PREPARED = {  # folder of a model that a command names, or file beside it -> what makes it, in this order
    _LOCAL: "python benchmarks/toy/stored.py local",
    ".cache/toy/mid": f"{_FLAT}/target .cache/toy/mid --expert-bytes 1.2MB --eagle3 {_FLAT}/eagle3",
    ".cache/toy/local-mid": f"{_LOCAL}/target .cache/toy/local-mid --expert-bytes 1.2MB --eagle3 {_LOCAL}/eagle3",
    ".cache/toy/large": f"{_FLAT}/target .cache/toy/large --expert-bytes 9.4MB",
    ".cache/toy/local-large": f"{_LOCAL}/target .cache/toy/local-large --expert-bytes 9.4MB",
    f"{_REAL}/target": f"python benchmarks/real/build.py --output {_REAL}",
    f"{_REAL}/texts.safetensors": f"{_FIT}/texts.py --dense {_REAL}/dense --output {_REAL}/texts.safetensors",
    f"{_REAL}/chats.safetensors": f"{_FIT}/chats.py --dense {_REAL}/dense --output {_REAL}/chats.safetensors",
}
USES_LOCAL = re.compile(r"toy/models/local|toy/local-")

EXAMPLES = """[bold]Examples[/]

python benchmarks/reproduce.py list

python benchmarks/reproduce.py run policies

python benchmarks/reproduce.py results --timed   [dim]# hours; nothing else may run[/]

python benchmarks/reproduce.py pages   [dim]# after a JSON or the source of a page changed[/]

python benchmarks/reproduce.py check
"""
app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_show_locals=False, epilog=EXAMPLES)


@app.command("list")
def list_() -> None:
    """Show every result, its files, and its commands."""
    table = Table("name", "result", "files", "minutes", show_lines=True)
    for name, made in FIGURES.items():
        marks = " (timed)" * made.timed + " (answered)" * bool(made.answered)
        marks += f" (stale: {made.stale})" * bool(made.stale) + " (of the model before)" * made.clustered
        table.add_row(name, made.title + marks, "\n".join(made.files), str(made.minutes))
    console = Console(width=max(140, Console().width))
    console.print(table)
    for name, made in FIGURES.items():
        for text in (*made.commands, *([f"# {made.note}"] if made.note else [])):
            console.print(escape(f"{name}: {text}"), highlight=False, soft_wrap=True)


@app.command()
def run(name: Annotated[str, typer.Argument(help=f"Of {', '.join(FIGURES)}.")]) -> None:
    """Make a result again; one whose script has left the tree, in a checkout of its commit below .cache/answered."""
    if name not in FIGURES or not FIGURES[name].commands:
        known = ", ".join(other for other, made in FIGURES.items() if made.commands)
        raise typer.BadParameter(f"no command makes {name!r}; use one of {known}")
    made = FIGURES[name]
    if made.answered:
        _make_in_history(name, made)
    else:
        _make(made)
    _render()


@app.command("results")
def results_again(
    timed: Annotated[
        bool, typer.Option("--timed", help="Those whose numbers are times, instead of the others.")
    ] = False,
) -> None:
    """Make all results again, then render the pages from them."""
    console = Console(stderr=True)
    again = {name: made for name, made in FIGURES.items() if made.commands and made.files and not made.answered}
    chosen = [name for name, made in again.items() if made.timed == timed]
    left = sum(FIGURES[name].minutes for name in chosen)
    for place, name in enumerate(chosen, 1):
        made = FIGURES[name]
        console.print(f"[bold]{place} of {len(chosen)}: {name}[/], about {made.minutes} of the {left} minutes left")
        _make(made)
        left -= made.minutes
    _render()


@app.command("pages")
def pages_again() -> None:
    """Draw the pictures and render the pages and the index from the JSON in the tree."""
    _render()


def _render() -> None:
    """Draws the pictures and writes the pages."""
    for file in pictures.PICTURES:
        pictures.draw(file)
    print(f"rendered: {', '.join(pages.update()) or 'nothing changed'}")


def _make(made: Made) -> None:
    console = Console(stderr=True)
    if made.timed:
        console.print("its numbers are times: run nothing else on this machine")
    for command in (*prepared(made), *made.commands):
        console.print(escape(command), highlight=False, soft_wrap=True)
        program, *arguments = shlex.split(command)
        code = subprocess.run([sys.executable if program == "python" else program, *arguments], cwd=ROOT).returncode
        if code:
            raise typer.Exit(code)


def _make_in_history(name: str, made: Made) -> None:
    """Runs ``reproduce.py run`` of the commit that has the script, with its plugin; copies the files that it makes."""
    tree = ROOT / ".cache" / "answered" / made.answered[:12]
    commands = [["make", "setup"], [".venv/bin/python", "benchmarks/reproduce.py", "run", name]]
    if not tree.exists():
        commands.insert(0, ["git", "clone", "--quiet", str(ROOT), str(tree)])
        commands.insert(1, ["git", "checkout", "--quiet", "--detach", made.answered])
    for command in commands:
        Console(stderr=True).print(escape(shlex.join(command)), highlight=False, soft_wrap=True)
        where = ROOT if command[1] == "clone" else tree
        if code := subprocess.run(command, cwd=where).returncode:
            raise typer.Exit(code)
    for file in made.files:
        shutil.copy(tree / "benchmarks" / "results" / file, RESULTS / file)


def prepared(made: Made) -> Iterator[str]:
    """Yields the commands that make what is missing of the models that a result needs."""
    named = " ".join(made.commands)
    for folder, command in PREPARED.items():
        wanted = _REAL if folder.startswith(_REAL) else folder
        needed = USES_LOCAL if folder == _LOCAL else re.compile(rf"{re.escape(wanted)}(?!\w)")
        if needed.search(named) and not (ROOT / folder).exists():
            yield command if command.startswith("python ") else f"python benchmarks/toy/inflate.py {command}"


@app.command("check")
def check_results() -> None:
    """Find results without a page or provenance, of other traces, commands or histories, and pages of other numbers."""
    why = unknown_history()
    found = [*unnamed(), *of_something_else(history=not why), *pages.problems()]
    for problem in found:
        print(problem)
    if why:
        print(f"commits were not looked up: {why}")
    if found:
        raise typer.Exit(1)


def unnamed() -> Iterator[str]:
    """Yields files without a page, pages without their files, and files in the documents that no page has."""
    named = [file for made in FIGURES.values() for file in made.files]
    there = {path.name for path in RESULTS.iterdir() if path.suffix != ".md"}
    yield from (f"{file}: no page has it" for file in sorted(there - set(named)))
    yield from (f"{file}: a page has it, and it is not there" for file in sorted(set(named) - there))
    yield from (f"{file}: two pages have it" for file in sorted({file for file in named if named.count(file) > 1}))
    names = r"\b\w+_(?:toy|emulated)\w*\.(?:json|png)|\btoy_\w+\.(?:json|png)"
    for file in sorted(set(re.findall(names, documents()))):
        if file not in named:
            yield f"{file}: the documents name it, and no page has it"


def of_something_else(*, history: bool) -> Iterator[str]:
    """Yields results from another command, traces or history than those in the tree.

    Left out are those marked stale, the carved model's where it was another, and the traces of answered ones, which
    their commit has. Whether the code has changed since a result's commit is not compared: nearly every commit changes
    some of it.

    Args:
        history: look commits up.
    """
    for name, made in FIGURES.items():
        found = [
            f"{file}: {problem}"
            for file, content in results(made)
            if not (file.startswith("clustered") or made.clustered and "real" in file)
            for problem in (
                *unexplained(made, content),
                *(of_other_traces(content) if not made.answered else []),
                *(lost(content) if history else []),
            )
        ]
        if not made.stale:
            yield from found
        elif history and not found:
            yield f"{name}: its results are of what is in the tree, it is not stale"


def unexplained(made: Made, content: dict) -> Iterator[str]:
    origins = [content.get("provenance") or {}, *([content["also"]] if "also" in content else [])]
    for origin in origins if made.commands else []:
        if missing := [key for key in ("command", "git", "versions", "machine", "date") if not origin.get(key)]:
            yield f"its provenance has no {', '.join(missing)}"
        elif origin["command"].startswith("python benchmarks/") and origin["command"] not in made.commands:
            yield f"was made by {origin['command']}"


def of_other_traces(content: dict) -> Iterator[str]:
    for name, facts in (content.get("traces") or {}).items():
        if facts["sha256"] not in [sha256(path) for path in TRACES.rglob(f"{name}.trace")]:
            yield f"is of another {name}.trace than those below {TRACES.relative_to(ROOT)}"


def lost(content: dict) -> Iterator[str]:
    for commit in sorted(set(commits(content))):
        if _git("merge-base", "--is-ancestor", commit, "HEAD").returncode:
            yield f"{commit} is not in the history of this checkout"


def unknown_history() -> str:
    """Returns why commits cannot be looked up; empty if they can."""
    if not (ROOT / ".git").exists():
        return "this is no git checkout"
    return "this checkout is shallow" * (_git("rev-parse", "--is-shallow-repository").stdout.strip() == "true")


def commits(content: object) -> Iterator[str]:
    """Yields every ``git`` commit in a result, at any depth."""
    if isinstance(content, dict):
        if isinstance(content.get("git"), dict):
            yield content["git"]["commit"]
        content = list(content.values())
    if isinstance(content, list):
        for item in content:
            yield from commits(item)


def results(made: Made) -> Iterator[tuple[str, dict]]:
    for file in made.files:
        if file.endswith(".json") and (RESULTS / file).is_file():
            yield file, json.loads((RESULTS / file).read_text())


def documents() -> str:
    """Returns the text of the documents that name results, their pages aside."""
    found = (ROOT / "README.md", *(ROOT / "benchmarks").glob("README.md"), *(ROOT / "vllm_spac").rglob("*.md"))
    return "".join(path.read_text() for path in found if path.exists())


def _git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=60)


if __name__ == "__main__":
    app()
