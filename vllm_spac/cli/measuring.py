"""``vllm-spac check --measure``: measures the costs of an expert on this machine, and writes them to a file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_spac.cli.tables import print_table, print_text, shown
from vllm_spac.errors import ConfigError
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.system.files import check_replaceable, write_text, writing
from vllm_spac.system.host_memory import gib
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.decisions.costs import Costs

_SECONDS = 0.5  # of each measurement
_COMMAND = ("vllm-spac", "check", "--measure")


def measure_costs(
    nbytes: int,
    folder: Path,
    *,
    output: Path | None,
    store: Literal["host", "disk"] | None,
    io_threads: int,
    vllm: bool,
) -> None:
    """Measures experts of ``nbytes``, writes the costs, and prints what was measured.

    Args:
        folder: where experts are packed.
        output: the file; None: ``profile.json`` in ``folder``.
        vllm: also vLLM's own part of a step, where there is no GPU.

    Raises:
        ConfigError: the file or the folder cannot be written to.
    """
    path = path_named(output or folder / "profile.json", "--output")
    _write(path, None)  # before any work is done

    import torch

    from vllm_spac.tools.machine import vllm_step
    from vllm_spac.tools.machine.measure import cpu_kernel, measure, measurements

    depths = vllm_step.LAYERS if vllm and not torch.cuda.is_available() else ()
    options = {"no-vllm": not vllm, "store": store, "io-threads": io_threads}
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items() if value]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(depths) + measurements(io_threads, store))

        def announce(text: str) -> None:
            progress.update(task, advance=1, description=text)

        steps = {}
        for layers in depths:
            announce(f"vLLM itself, {layers} layers of no size")
            steps[layers] = vllm_step.seconds_per_token(layers)
        try:
            costs = measure(
                nbytes, folder, store=store, io_threads=io_threads, seconds=_SECONDS, kernel=cpu_kernel(),
                source=shlex.join([*_COMMAND, f"--expert-bytes={nbytes}", *given]), announce=announce,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; name a writable folder with --disk-dir DIR") from error
    if steps:
        costs = vllm_step.added(costs, steps)
    _write(path, costs)
    console = Console()
    print_table(console, _table(costs, nbytes))
    print_text(console, f"written: {shown(path)}")


def measure_first(nbytes: int, folder: Path, path: Path) -> None:
    """Measures this machine before a command that needs it, in a process of its own, and says so.

    Args:
        nbytes: of an expert.
        folder: where experts are packed; ``path``: of the profile that is written.

    Raises:
        ConfigError: it cannot be measured.
    """
    text = f"this machine was not measured yet: doing so once, as {shlex.join(_COMMAND)} does, takes a minute or two"
    print_text(Console(stderr=True), text)
    asked = [*_COMMAND[1:], f"--expert-bytes={nbytes}", f"--disk-dir={folder}", f"--output={path}"]
    terminal = sys.stderr.isatty()  # then its progress is seen; else its last words are in the error
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vllm_spac.cli.main", *asked],
        stdout=subprocess.PIPE,
        stderr=None if terminal else subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ConfigError(
            f"this machine cannot be measured: {(done.stderr or done.stdout or 'see above').strip()}; name another "
            f"machine, or run {shlex.join(_COMMAND)}"
        )
    print_text(Console(stderr=True), f"measured, and kept in {shown(path)}")


def size_of(model: str | None, revision: str | None, expert_bytes: int | None) -> int:
    """Returns the size of the expert that is measured: one of MODEL, or of ``--expert-bytes``."""
    if model is not None and expert_bytes is None:
        return max(find_model(model, revision).checkpoint().expert_bytes)
    if expert_bytes is None or model is not None:
        raise ConfigError("the size of an expert is needed: name either MODEL or --expert-bytes N")
    return expert_bytes


def _write(path: Path, costs: Costs | None) -> None:
    """Writes ``costs`` atomically; None only checks that ``path`` can be written."""
    with writing(path, "name another file with --output"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if costs is None:
            check_replaceable(path)
        else:
            write_text(path, costs.model_dump_json(indent=2) + "\n")


def _table(costs: Costs, nbytes: int) -> Table:
    from vllm_spac.tools.machine.host_work import HOST_WORK
    from vllm_spac.tools.machine.vllm_step import VLLM_STEP

    origin = costs.provenance
    table = Table(title=f"one expert of {gib(nbytes)} on {shown(origin.machine)}", title_justify="left")
    for name in ("measured", "at", "seconds", "per second"):
        table.add_column(name, justify="left" if name == "measured" else "right")
    for name, points in origin.points.items():
        table.add_section()
        for at, seconds in points.items():
            moved = nbytes * (at if "at once" in name else 1)
            rate = "" if name.startswith((HOST_WORK, VLLM_STEP)) else f"{moved / seconds / 1e9:.2f} GB"
            table.add_row(name, f"{at:,}", f"{1e3 * seconds:.3f} ms", rate)
    return table
