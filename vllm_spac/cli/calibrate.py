"""``vllm-spac calibrate``: records a model's routing on a sample of text."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_spac.cli.text import shown
from vllm_spac.errors import ConfigError

EXAMPLES = """[bold]Examples[/]

vllm-spac calibrate allenai/OLMoE-1B-7B-0924 --prompts texts.jsonl --window 9 --slots 25%

vllm-spac calibrate ./model --prompts book.txt --limit-tokens 100000 --output model.calibration.safetensors

[dim]Interrupted with Ctrl-C, the same command continues.[/]
"""

Model = Annotated[str, typer.Argument(help="A folder or a name on the hub, as for vllm serve.")]
Prompts = Annotated[
    Path,
    typer.Option(help='JSON lines with "text" or "prompt", or plain text separated by blank lines or NUL.'),
]
Slots = Annotated[str, typer.Option(help="Experts in fast memory, as --spac-slots.")]
DiskDir = Annotated[Path | None, typer.Option(help="Folder of the packed experts, as --spac-disk-dir.")]
TextTokens = Annotated[int, typer.Option(help="Longer texts are split into pieces of this many tokens.", min=2)]
LimitTokens = Annotated[int | None, typer.Option(help="Stop after this many tokens.", min=2)]
Window = Annotated[int, typer.Option(help="Tokens of a verify step: 1 + its draft tokens.", min=1)]
Engine = Annotated[str | None, typer.Option(metavar="JSON", help="Further arguments of vllm.LLM.")]

MASS_OF = "The mass of --mass: selected, the routing weights of selected experts, or scores, all router scores."

_SAVE_SECONDS = 10


def calibrate(
    model: Model,
    prompts: Prompts,
    window: Window = 9,
    output: Annotated[
        Path | None, typer.Option(help="File to write.", show_default="MODEL.calibration.safetensors")
    ] = None,
    slots: Slots = "auto",
    disk_dir: DiskDir = None,
    text_tokens: TextTokens = 512,
    limit_tokens: LimitTokens = None,
    engine: Engine = None,
) -> None:
    """Run the model on texts, and record how its routers select experts: for budgets, and the rankings that need it."""
    from vllm_spac.evaluation.prompts import checksum, read
    from vllm_spac.integration.evaluation import engine as offline

    output = output or Path(f"{re.split('[/]', model.rstrip('/'))[-1]}.calibration.safetensors")
    check_target(output)
    texts, options, spac = read(prompts), offline.options_of(engine, "--engine"), offline.spac_of(slots, disk_dir)
    tokenizer = any(isinstance(text, str) for text in texts)
    with offline.engine(model, spac, text_tokens + 1, tokenizer, **options) as llm:
        pieces = offline.tokens(llm, texts, text_tokens, limit_tokens)
        _run(llm, pieces, window, checksum(pieces), output)


def _run(llm: Any, pieces: list[list[int]], window: int, source: str, output: Path) -> None:
    from vllm_spac.integration.evaluation.engine import Interruptible, ask, read

    progress_file, console = output.with_name(f"{output.name}.progress"), Console(stderr=True)
    done = ask(llm, "calibrate", window, source, str(progress_file))
    if done:
        console.print(f"resuming after {done} of {len(pieces)} texts", highlight=False)
    tokens, saved = sum(map(len, pieces[:done])), time.monotonic()
    with Interruptible() as interruption, bar(console) as progress:
        task = progress.add_task("calibrating", total=sum(map(len, pieces)), completed=tokens)
        for number, ids in enumerate(pieces[done:], done + 1):
            read(llm, ids)
            progress.update(task, completed=ask(llm, "calibrated_text"))
            if interruption.asked or time.monotonic() - saved > _SAVE_SECONDS:
                ask(llm, "save_progress", str(progress_file))
                saved = time.monotonic()
            if interruption.asked and number < len(pieces):
                progress.stop()
                console.print(f"stopped after {number} of {len(pieces)} texts; the same command continues")
                raise typer.Exit(130)
    count = ask(llm, "save_calibration", str(output.absolute()))
    progress_file.unlink(missing_ok=True)
    Console().print(f"{shown(output)}: {count:,} tokens of {len(pieces)} texts", highlight=False, soft_wrap=True)


def bar(console: Console) -> Progress:
    """A progress bar that shows the completed and the total count."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console)


def check_target(path: Path, option: str = "--output") -> None:
    """Raises ``ConfigError`` if ``path`` has no folder to be written to; called before minutes of work."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else f"cannot be written: {path.absolute().parent} is no folder"
        raise ConfigError(f"{path} {problem}; name another file with {option}")
