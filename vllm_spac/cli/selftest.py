"""``vllm-spac selftest``: whether this machine computes what stock vLLM computes, and a file to attach to a report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from vllm_spac.cli.doctor import findings_table
from vllm_spac.cli.tables import print_table, shown
from vllm_spac.errors import StoreError
from vllm_spac.system.files import check_replaceable, replacing
from vllm_spac.system.untrusted import path_of

if TYPE_CHECKING:
    from vllm_spac.tools.machine.facts import Installation
    from vllm_spac.tools.selftest.outcome import Outcome

EXAMPLES = """[bold]Examples[/]

vllm-spac selftest

vllm-spac selftest ./Qwen3-30B-A3B   [dim]# a tiny random model of this family, kernels at the width of its experts[/]

vllm-spac selftest --no-engines   [dim]# kernels and the link alone: seconds[/]

vllm-spac selftest --output selftest.json || echo "attach selftest.json to an issue"
"""


def selftest(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its name in the Hugging Face cache.")
    ] = None,
    engines: Annotated[bool, typer.Option(help="Also compare the tokens of three engines of a tiny model.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check on this machine that kernels and engines compute what they should: exit code 0 if all do, 1 if not.

    Takes about a minute. Nothing is downloaded, and no weights of MODEL are read.
    """
    from vllm_spac.storage.checkpoint.headers import find_folder, read_config
    from vllm_spac.tools.machine.installation import installation
    from vllm_spac.tools.selftest import parts, tiny_model

    config: dict[str, Any] = tiny_model.QWEN3_MOE
    if model is not None:
        config = read_config(find_folder(model) / "config.json")
    path = None if output is None else _writable(output)
    begin = time.monotonic()
    with _progress(parts.PARTS + 1) as tell:
        tell("vLLM")
        facts = installation()
        outcomes = [] if facts.refusal else list(parts.run(config, engines=engines, tell=tell))
    report = _report(facts, outcomes, time.monotonic() - begin)
    if path is not None:
        _write(path, report)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print(facts, outcomes, report["seconds"])
    if report["problems"]:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _report(facts: Installation, outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    problems = sum(outcome.finding.level == "problem" for outcome in outcomes) + bool(facts.refusal)
    return {
        "format": "spac-selftest-1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "problems": problems,
        "installation": asdict(facts),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _print(facts: Installation, outcomes: list[Outcome], seconds: float) -> None:
    console = Console()
    where = facts.device.name if facts.device else "a CPU"
    libraries = ", ".join(f"{name} {found.version}" for name, found in facts.libraries.items() if found.version)
    console.print(shown(f"vLLM {facts.vllm} on {where}; {libraries}"), highlight=False, soft_wrap=True)
    if facts.refusal:
        console.print(f"[bold red]problem[/] {shown(facts.refusal)}", highlight=False, soft_wrap=True)
        return
    print_table(console, findings_table([outcome.finding for outcome in outcomes]))
    problems = sum(outcome.finding.level == "problem" for outcome in outcomes)
    console.print(f"problems: {problems}; {seconds:.0f} s", highlight=False)


def _writable(output: Path) -> Path:
    """Returns where the report goes, before any work is done."""
    try:
        path = path_of(output).absolute()
        check_replaceable(path)
    except (ValueError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise StoreError(f"--output {output}: {reason}; name a file in a folder that exists") from error
    return path


def _write(path: Path, report: dict[str, Any]) -> None:
    with replacing(path) as partial:
        partial.write_text(json.dumps(report, indent=2) + "\n")
