"""``vllm-spac trace timeline``: where the time of a token goes, and a Chrome trace of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.tables import print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.host_memory import gib

if TYPE_CHECKING:
    from vllm_spac.timeline.recording import Recording
    from vllm_spac.timeline.split import Split

EXAMPLES = """[bold]Examples[/]

vllm-spac trace timeline run.timeline

vllm-spac trace timeline run.timeline --output run.json   [dim]# open it in https://ui.perfetto.dev[/]

vllm-spac trace timeline run.timeline --picture run.png
"""


def timeline(
    file: Annotated[Path, typer.Argument(help="File written by --spac-timeline.")],
    output: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace, for ui.perfetto.dev or chrome://tracing, e.g. run.json.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw where the time went, and one step by thread, e.g. run.png.")
    ] = None,
) -> None:
    """Show where the time of a token went: compute, waiting for loads, drafts, the host; by thread what it loaded."""
    from vllm_spac.timeline import chrome
    from vllm_spac.timeline.recorder import Kind
    from vllm_spac.timeline.recording import Recording

    recording = Recording.load(file)
    if not (recording.kind == Kind.STEP).any():
        raise ConfigError(f"{file} holds no finished step; record a longer run")
    console = Console()
    print_table(console, _facts(file, recording))
    print_table(console, _split(recording))
    print_table(console, _threads(recording))
    if output is not None:
        count = chrome.write(recording, output)
        console.print(f"Chrome trace: {shown(output)}, {count:,} events", highlight=False, soft_wrap=True)
    if picture is not None:
        from vllm_spac.timeline.picture import draw

        draw(recording, picture, file.name)
        console.print(f"picture: {shown(picture)}", highlight=False, soft_wrap=True)


def _facts(file: Path, recording: Recording) -> Table:
    from vllm_spac.timeline.recorder import Kind

    facts, steps = recording.facts, recording.kind == Kind.STEP
    table = Table(title=shown(file), show_header=False, title_justify="left")
    table.add_row("model", shown(facts.model) or "?")
    table.add_row("store", shown(facts.store))
    table.add_row("MoE layers, experts", f"{len(facts.layers)}, {sum(facts.experts):,}")
    table.add_row("last steps", f"{int(steps.sum()):,} in {recording.end[steps].max() / 1e9:.3f} s")
    table.add_row("events", f"{len(recording.start):,}")
    return table


def _split(recording: Recording) -> Table:
    from vllm_spac.timeline.split import GENERATING, PROMPTS, split

    generating, prompts = split(recording, GENERATING), split(recording, PROMPTS)
    caption = "gaps before steps with prompts are left out: the engine may have had nothing to do"
    table = Table(title="where the time goes", title_justify="left", caption=caption, caption_justify="left")
    table.add_column("")
    columns = []
    if generating.steps:
        columns.append((generating, *_unit(generating)))
    if prompts.steps:
        columns.append((prompts, prompts.steps, f"a step with prompts\n{prompts.steps:,} steps"))
    for _, _, title in columns:
        table.add_column(title, justify="right")
    for name in generating.parts:
        table.add_row(name, *(_cell(found, found.parts[name], each) for found, each, _ in columns))
    table.add_section()
    table.add_row("together", *(_cell(found, found.total, each) for found, each, _ in columns))
    return table


def _unit(found: Split) -> tuple[int, str]:
    """Returns what the time of generating steps is divided by, and what that is called."""
    if found.tokens:
        return found.tokens, f"a token of all requests\n{found.tokens:,} in {found.steps:,} steps"
    return found.steps, f"a step (tokens unknown)\n{found.steps:,} steps"


def _cell(found: Split, value: int, each: int) -> str:
    share = f"{100 * value / found.total:.1f}%" if found.total else "-"
    return f"{value / each / 1e6:.3f} ms {share:>6}"


def _threads(recording: Recording) -> Table:
    """What each thread loaded or computed, and the share of the time that this took."""
    import numpy as np

    from vllm_spac.timeline.chrome import thread_order, thread_titles
    from vllm_spac.timeline.recorder import Kind

    table = Table(title="loads and CPU experts by thread", title_justify="left")
    for name in ("thread", "from", "events", "bytes", "median", "GB/s", "busy"):
        table.add_column(name, justify="left" if name in ("thread", "from") else "right", no_wrap=name != "from")
    whole = int(recording.end[recording.kind == Kind.STEP].max())
    source = {Kind.LOAD: recording.facts.store, Kind.HOST_LOAD: "host memory", Kind.CPU: "computed"}
    titles = thread_titles(recording)
    for number in thread_order(recording):
        for kind in source:
            found = (recording.kind == kind) & (recording.thread == number)
            if not found.any():
                continue
            seconds, count = recording.duration[found].sum() / 1e9, 0 if kind == Kind.CPU else recording.b[found].sum()
            median, share = np.median(recording.duration[found]) / 1e6, 100 * seconds / (whole / 1e9)
            rate = f"{count / seconds / 1e9:.2f}" if count and seconds else "-"
            moved = gib(int(count)) if count else "-"
            cells = (f"{int(found.sum()):,}", moved, f"{median:.3f} ms", rate, f"{share:.1f}%")
            table.add_row(shown(titles[number]), shown(source[kind]), *cells)
    return table
