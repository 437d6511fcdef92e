"""Reads the plugin's table of patches against the sources of any published vLLM, without installing it.

    python tests/upstream/compat.py [VERSION] [--proved VERSION] [--brief]

Writes one page, in Markdown: each row present or missing, its parameters, and how its body differs from the version
that the row was proved with; names that the plugin imports and the version lacks; a diff of each body that changed. The
page goes to ``.cache/compat/VERSION.md`` and to stdout, which as a terminal gets the table alone. Ends with 1 if a name
is missing, with 2 if the sources cannot be had.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import wheels  # noqa: E402
from sources import Code, Sources, parameters  # noqa: E402

from vllm_spac.integration.hooks import patches  # noqa: E402
from vllm_spac.integration.hooks.patches import Patch, Where  # noqa: E402

PAGES = ROOT / ".cache" / "compat"
PACKAGE = ROOT / "vllm_spac"
# What the rows of each place were run with, oldest first: V1 in vLLM's CPU build, V2 on a GPU, the rest in both.
PROVED: dict[Where, tuple[str, ...]] = {
    "frontend": ("0.32.0", "0.33.0"),
    "worker": ("0.32.0", "0.33.0"),
    "v1": ("0.32.0",),
    "cpu": ("0.32.0",),
    "v2": ("0.33.0",),
    "gpu": ("0.33.0",),
}
RISKS = ("high", "medium", "low", "none")
FEW = 10  # changed lines that can be read along
_RULE = f"""Risk: **high**, if the name is missing, or a parameter that the wrapper relies on. **None**, if nothing but
comments, docstrings and formatting differs. Else it depends on what the wrapper does:

- It *encloses* the name (always calls it): low; medium from {FEW + 1} changed lines on, or if parameters differ.
- It *replaces* it (in some steps does without): medium; high from {FEW + 1} changed lines on, or if parameters differ.
- It *refuses* (stands before it): low."""


@dataclass(frozen=True)
class Judged:
    """A row of the table against a version.

    Attributes:
        problem: why the plugin would refuse the version for this row; empty if it would not.
        given: the parameters of what it names; None: it is no function, or missing.
        came, went: parameters, in comparison with the proved version; ``moved``: in another order.
        diff: unified, of the code without comments and docstrings.
        changed: lines of ``diff`` that are removed or added.
    """

    patch: Patch
    proved: str
    problem: str
    given: tuple[str, ...] | None
    came: tuple[str, ...] = ()
    went: tuple[str, ...] = ()
    moved: bool = False
    diff: tuple[str, ...] = ()
    changed: int = 0

    @property
    def risk(self) -> str:
        """As ``_RULE`` says."""
        if self.problem:
            return "high"
        if not self.diff:
            return "none"
        much = self.changed > FEW or bool(self.came or self.went or self.moved)
        return {"refuses": "low", "encloses": "medium" if much else "low", "replaces": "high" if much else "medium"}[
            self.patch.does
        ]

    @property
    def parameters(self) -> str:
        """The parameters in words: those that it has, then those that came and went."""
        changes = [*(f"+{name}" for name in self.came), *(f"-{name}" for name in self.went)] + ["moved"] * self.moved
        given = "no function" if self.given is None else ", ".join(self.given)
        return f"{given} ({' '.join(changes)})" if changes else given


def problem(sources: Sources, patch: Patch) -> str:
    """Why ``patches.check_names`` would refuse this row; empty if it would not."""
    module, _, path = patch.target.partition(":")
    function = sources.function(module, path)
    if function is None:
        return "" if not patch.takes and sources.locate(module, path) is not None else "is missing"
    given = parameters(function)
    if patch.first and given[: len(patch.takes)] != patch.takes:
        return f"takes {', '.join(given)}"
    if absent := set(patch.takes) - set(given):
        return f"does not take {', '.join(sorted(absent))}"
    return ""


def judged(patch: Patch, proved: Sources, asked: Sources, names: tuple[str, str] = ("proved", "asked")) -> Judged:
    """Compares a row's name in the sources ``asked`` with that in those it was ``proved`` with; ``names``: versions."""
    module, _, path = patch.target.partition(":")
    old, new = proved.function(module, path), asked.function(module, path)
    before, after = proved.code(module, path), asked.code(module, path)
    given = None if new is None else parameters(new)
    was = () if old is None else parameters(old)
    came, went, moved = (), (), False
    if old is not None and given is not None:
        came = tuple(name for name in given if name not in was)
        went = tuple(name for name in was if name not in given)
        moved = [name for name in given if name in was] != [name for name in was if name in given]
    diff = tuple(_diff(before, after, names)) if before and after and before.tree != after.tree else ()
    changed = sum(line[0] in "+-" for line in diff[2:])
    return Judged(patch, names[0], problem(asked, patch), given, came, went, moved, diff, changed)


def _diff(before: Code, after: Code, names: tuple[str, str]) -> Iterator[str]:
    yield from difflib.unified_diff(before.lines, after.lines, *names, lineterm="")


def imported(package: Path = PACKAGE) -> dict[tuple[str, str], str]:
    """(module, name) of every import from vLLM in the plugin's sources -> the first file that has it; name "": all."""
    found: dict[tuple[str, str], str] = {}
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[tuple[str, str]] = []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [(str(node.module), alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [(alias.name, "") for alias in node.names]
            for module, name in names:
                if module.split(".")[0] == "vllm":
                    found.setdefault((module, name), str(file.relative_to(package.parent)))
    return found


def missing_imports(sources: Sources) -> Iterator[str]:
    """Yields each name that the plugin imports and these sources lack, with a file that imports it."""
    for (module, name), file in sorted(imported().items()):
        whole = sources.module(f"{module}.{name}" if name else module) is not None
        if not whole and sources.locate(module, name) is None:
            yield f"{module}:{name} ({file})" if name else f"{module} ({file})"


def proof(patch: Patch, version: str) -> str:
    """Returns the version to compare with: ``version`` itself if the row was run with it, else the newest that was."""
    proved = PROVED[patch.where]
    return version if version in proved else proved[-1]


def report(version: str, proved: str | None = None) -> tuple[list[Judged], list[str]]:
    """Returns the rows, and the missing imports, of a version; ``proved``: compare all rows with this one."""
    read: dict[str, Sources] = {}

    def of(wanted: str) -> Sources:
        if wanted not in read:
            read[wanted] = Sources(wheels.sources(wanted))
        return read[wanted]

    asked = of(version)
    bases = [(patch, proved or proof(patch, version)) for patch in patches.PATCHES]
    return [judged(patch, of(base), asked, (base, version)) for patch, base in bases], list(missing_imports(asked))


def summary(version: str, rows: list[Judged], imports: list[str]) -> str:
    """Returns the counts in one line."""
    gone, risks = sum(bool(row.problem) for row in rows), [row.risk for row in rows if not row.problem]
    counts = ", ".join(f"{risks.count(risk)} {risk}" for risk in RISKS)
    return (
        f"vLLM {version}: {len(rows)} wrapped names, {gone} missing or without a parameter that is needed; risk of the "
        f"others: {counts}. {len(imported())} imports, {len(imports)} missing."
    )


def page(version: str, rows: list[Judged], imports: list[str]) -> str:
    """Returns the report in Markdown, the riskiest rows first."""
    text = [f"# The plugin and vLLM {version}", "", summary(version, rows, imports), "", _RULE, ""]
    text += ["| risk | name | wrapper | changed lines | beside | parameters |", "|---|---|---|---|---|---|"]
    ordered = sorted(rows, key=lambda row: (RISKS.index(row.risk), -row.changed))
    for row in ordered:
        said = f"**{row.problem}**; {row.parameters}" if row.problem else row.parameters
        lines = row.changed or ""
        text.append(f"| {row.risk} | `{row.patch.target}` | {row.patch.does} | {lines} | {row.proved} | {said} |")
    gone = [
        f"- `{row.patch.target}` {row.problem}, for: {row.patch.why}. "
        + (f"With SPAC_WITHOUT_PATCH, {row.patch.loses}." if row.patch.loses else "No engine can do without it.")
        for row in rows
        if row.problem
    ]
    text += ["", "## Missing", "", *(gone + [f"- the import of `{line}`" for line in imports] or ["Nothing."])]
    text += ["", "## Changed bodies", ""]
    for row in ordered:
        if row.diff:
            text += [f"### `{row.patch.target}`", "", f"The plugin's: {row.patch.why}.", ""]
            text += ["```diff", *row.diff, "```", ""]
    if not any(row.diff for row in rows):
        text.append("None.")
    return "\n".join(text).rstrip() + "\n"


def _show(rows: list[Judged]) -> None:
    """Prints the rows that differ, for a terminal."""
    table = Table("risk", "name", "wrapper", "lines", "beside", "what")
    colours = {"high": "bold red", "medium": "yellow", "low": "green"}
    for row in sorted(rows, key=lambda row: RISKS.index(row.risk)):
        if row.risk != "none":
            what = row.problem or " ".join([*(f"+{n}" for n in row.came), *(f"-{n}" for n in row.went)])
            name = row.patch.target.replace(":", ":\n")
            table.add_row(
                f"[{colours[row.risk]}]{row.risk}[/]", name, row.patch.does, str(row.changed), row.proved, what
            )
    if table.row_count:
        Console().print(table)


def main(
    version: Annotated[str, typer.Argument(help="of vLLM; newest: that of pip's index")] = "newest",
    proved: Annotated[str, typer.Option(help="compare all rows with this version")] = "",
    brief: Annotated[bool, typer.Option("--brief", help="print the counts, and what is missing, only")] = False,
) -> None:
    """Read the table of patches against the sources of a published vLLM."""
    try:
        version = wheels.newest() if version == "newest" else version
        rows, imports = report(version, proved or None)
    except wheels.NoSourcesError as error:
        print(f"compat: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    text, path = page(version, rows, imports), PAGES / f"{version}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if sys.stdout.isatty() and not brief:
        _show(rows)
    elif not brief:
        print(text)
    if sys.stdout.isatty() or brief:
        print(summary(version, rows, imports))
        for row in rows if brief else ():
            if row.problem:
                print(f"  {row.patch.target} {row.problem}")
        print(f"All of it: {path.relative_to(ROOT)}")
    raise typer.Exit(int(bool(imports) or any(row.problem for row in rows)))


if __name__ == "__main__":
    typer.run(main)
