"""``vllm-spac trace timeline``: where the time of a token goes, and a Chrome trace of a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

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
    console.print(_facts(file, recording))
    console.print(_split(recording))
    console.print(_threads(recording))
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
        columns.append((prompts, prompts.steps, f"a step with prompts, {prompts.steps:,} steps"))
    for _, _, title in columns:
        table.add_column(title, justify="right")
        table.add_column("share", justify="right")
    for name in generating.parts:
        cells = [_cells(found, found.parts[name], each) for found, each, _ in columns]
        table.add_row(name, *(cell for pair in cells for cell in pair))
    table.add_section()
    cells = [_cells(found, found.total, each) for found, each, _ in columns]
    table.add_row("together", *(cell for pair in cells for cell in pair))
    return table


def _unit(found: Split) -> tuple[int, str]:
    """Returns what the time of generating steps is divided by, and what that is called."""
    if found.tokens:
        return found.tokens, f"a token, {found.tokens:,} in {found.steps:,} steps"
    return found.steps, f"a step, {found.steps:,} steps (tokens unknown)"


def _cells(found: Split, value: int, each: int) -> tuple[str, str]:
    return f"{value / each / 1e6:.3f} ms", f"{100 * value / found.total:.1f}%" if found.total else "-"


def _threads(recording: Recording) -> Table:
    """What each thread loaded or computed, beside the forward thread's steps."""
    import numpy as np

    from vllm_spac.timeline.chrome import thread_titles
    from vllm_spac.timeline.recorder import Kind

    table = Table(title="loads and CPU experts by thread", title_justify="left")
    for name in ("thread", "what", "events", "bytes", "median", "rate", "of the time"):
        table.add_column(name, justify="left" if name in ("thread", "what") else "right")
    whole = int(recording.end[recording.kind == Kind.STEP].max())
    what = {Kind.LOAD: f"loads from {recording.facts.store}", Kind.HOST_LOAD: "loads from host memory"}
    for number, title in enumerate(thread_titles(recording)):
        for kind in (Kind.LOAD, Kind.HOST_LOAD, Kind.CPU):
            found = (recording.kind == kind) & (recording.thread == number)
            if not found.any():
                continue
            seconds, count = recording.duration[found].sum() / 1e9, 0 if kind == Kind.CPU else recording.b[found].sum()
            median, share = np.median(recording.duration[found]) / 1e6, 100 * seconds / (whole / 1e9)
            rate = f"{count / seconds / 1e9:.2f} GB/s" if count and seconds else "-"
            moved = gib(int(count)) if count else "-"
            cells = (f"{int(found.sum()):,}", moved, f"{median:.3f} ms", rate, f"{share:.1f}%")
            table.add_row(shown(title), shown(what.get(kind, "CPU experts")), *cells)
    return table
