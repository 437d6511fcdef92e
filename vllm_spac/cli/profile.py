"""``vllm-spac profile``: measures the costs of an expert on this machine, and writes them to a file."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, say, shown
from vllm_spac.errors import ConfigError
from vllm_spac.system.files import check_replaceable, write_text, writing
from vllm_spac.system.host_memory import gib
from vllm_spac.system.machine import CLUSTER_FILE
from vllm_spac.system.untrusted import path_named

if TYPE_CHECKING:
    from vllm_spac.decisions.costs import Costs, Network

EXAMPLES = examples("""
vllm-spac profile --model ./Qwen3-30B-A3B
vllm-spac profile --expert-bytes 9437184 --disk-dir /mnt/nvme/experts --output here.json
vllm-spac profile --expert-bytes 1000000 --draft 0.004 --no-vllm   [dim]# a draft token takes 4 ms; quicker[/]
vllm-spac profile --peer tcp://10.0.0.7:5555   [dim]# adds the network to an expert worker to the profile[/]
""")

_ROUND_TRIPS = "round trip of bytes"  # of a profile's points
_AND = "; "


def profile(
    model: Annotated[str | None, typer.Option(help="Take the size of an expert from this checkpoint.")] = None,
    expert_bytes: Annotated[int | None, typer.Option(help="Size of an expert, instead of --model.", min=1)] = None,
    disk_dir: Annotated[
        Path, typer.Option(help="The folder that --spac-disk-dir will name.", show_default="~/.cache/vllm_spac")
    ] = Path("~/.cache/vllm_spac"),
    output: Annotated[Path | None, typer.Option(help="File to write.", show_default="DISK_DIR/profile.json")] = None,
    store: Annotated[
        str | None, typer.Option(help="Where loads read from: host or disk.", show_default="host with a GPU, else disk")
    ] = None,
    io_threads: Annotated[int, typer.Option(help="As --spac-io-threads.", min=1, max=64)] = 4,
    seconds: Annotated[float, typer.Option(help="Approximate duration of each measurement.", min=0.01)] = 0.5,
    draft: Annotated[float, typer.Option(help="Seconds per draft token, if known.", min=0)] = 0.0,
    other: Annotated[float, typer.Option(help="Seconds per step outside its experts, if known.", min=0)] = 0.0,
    vllm: Annotated[
        bool,
        typer.Option(help="Measure vLLM's own part of a step with two tiny models, where there is no GPU: a minute."),
    ] = True,
    peer: Annotated[
        str | None,
        typer.Option(
            help="Measure the network to an expert worker that serves no engine: its address, or loopback, a worker of "
            "this machine. Without --model and --expert-bytes the result is added to the profile in --output."
        ),
    ] = None,
    cluster: Annotated[Path, typer.Option("--cluster", help="With --peer ADDRESS, its cluster's file.")] = CLUSTER_FILE,
) -> None:
    """Measure this machine: reading, copying and computing an expert, and the work of plugin and vLLM around them.

    Takes one to two minutes.
    """
    if peer is not None and model is None and expert_bytes is None:
        folder = path_named(disk_dir, "--disk-dir")
        _add_network(path_named(output or folder / "profile.json", "--output"), folder, peer, cluster, seconds)
        return
    nbytes = _size(model, expert_bytes)
    if store not in (None, "host", "disk"):
        raise ConfigError(f"--store {store}: use host or disk")
    kind = cast(Literal["host", "disk"] | None, store)
    folder = path_named(disk_dir, "--disk-dir")
    path = path_named(output or folder / "profile.json", "--output")
    _write(path, None)  # before any work is done

    import torch

    from vllm_spac.tools.machine import vllm_step
    from vllm_spac.tools.machine.measure import cpu_kernel, measure, measurements

    depths = vllm_step.LAYERS if vllm and not torch.cuda.is_available() else ()
    options = {
        "no-vllm": not vllm,
        "store": store,
        "io_threads": io_threads,
        "seconds": seconds,
        "draft": draft,
        "other": other,
    }
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(depths) + measurements(io_threads, kind))

        def tell(text: str) -> None:
            progress.update(task, advance=1, description=text)

        steps = {}
        for layers in depths:
            tell(f"vLLM itself, {layers} layers of no size")
            steps[layers] = vllm_step.seconds_per_token(layers)
        try:
            costs = measure(
                nbytes, folder, store=kind, io_threads=io_threads, seconds=seconds, draft=draft, other=other,
                kernel=cpu_kernel(), source=_command(nbytes, options), tell=tell,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}; name a writable folder with --disk-dir DIR") from error
    if steps:
        costs = vllm_step.added(costs, steps)
    if peer is not None:
        costs = _with_network(costs, *_round_trips(peer, cluster, folder, seconds))
    _write(path, costs)
    console = Console()
    print_table(console, _table(costs, nbytes))
    if costs.network is not None:
        print_table(console, _network_table(costs.network, costs.provenance.points[_ROUND_TRIPS]))
    say(console, f"written: {shown(path)}")


def measure_first(nbytes: int, folder: Path, path: Path) -> None:
    """Measures this machine before a command that needs it, in a process of its own, and says so.

    Args:
        nbytes: of an expert.
        folder: where experts are packed; ``path``: of the profile that is written.

    Raises:
        ConfigError: it cannot be measured.
    """
    text = "this machine was not measured yet: doing so once, as vllm-spac profile does, takes a minute or two"
    say(Console(stderr=True), text)
    asked = [f"--expert-bytes={nbytes}", f"--disk-dir={folder}", f"--output={path}"]
    command = [sys.executable, "-P", "-m", "vllm_spac.cli.main", "profile", *asked]
    terminal = sys.stderr.isatty()  # then its progress is seen; else its last words are in the error
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=None if terminal else subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigError(
            f"this machine cannot be measured: {(done.stderr or done.stdout or 'see above').strip()}; name another "
            "machine, or run vllm-spac profile"
        )
    say(Console(stderr=True), f"measured, and kept in {shown(path)}")


def _add_network(path: Path, folder: Path, peer: str, cluster: Path, seconds: float) -> None:
    """Measures the network only; adds it to the profile of this machine in ``path``, if there is one."""
    from vllm_spac.decisions.costs import Costs

    costs = Costs.read(path, here=True, disk_dir=folder) if path.exists() else None
    network, points = _round_trips(peer, cluster, folder, seconds)
    console = Console()
    print_table(console, _network_table(network, points))
    if costs is None:
        say(
            console,
            f"not written: there is no profile {shown(path)} to add it to; add --model MODEL or --expert-bytes N to "
            "measure this machine, too",
        )
        return
    _write(path, _with_network(costs, network, points))
    say(console, f"added to: {shown(path)}")


def _round_trips(peer: str, cluster: Path, folder: Path, seconds: float) -> tuple[Network, dict[int, float]]:
    from vllm_spac.decisions.costs import fit_network
    from vllm_spac.tools.machine.peer import round_trips

    with Console(stderr=True).status(f"measuring the network to {shown(peer)}"):
        points = round_trips(peer, path_named(cluster, "--cluster"), folder, seconds)
    return fit_network(points, peer), points


def _with_network(costs: Costs, network: Network, points: dict[int, float]) -> Costs:
    """Returns ``costs`` with what was measured of the network, and how."""
    origin = costs.provenance
    source = f"{origin.source.partition(_AND)[0]}{_AND}{shlex.join(['vllm-spac', 'profile', f'--peer={network.peer}'])}"
    origin = origin.model_copy(update={"source": source, "points": origin.points | {_ROUND_TRIPS: points}})
    return costs.model_copy(update={"network": network, "provenance": origin})


def _size(model: str | None, expert_bytes: int | None) -> int:
    if (model is None) == (expert_bytes is None):
        raise ConfigError("the size of an expert is needed: use either --model MODEL_DIR or --expert-bytes N")
    if expert_bytes is not None:
        return expert_bytes
    assert model is not None
    from vllm_spac.storage.checkpoint.published import find_model

    return max(find_model(model).checkpoint().expert_bytes)


def _command(nbytes: int, options: dict) -> str:
    named = {name.replace("_", "-"): value for name, value in options.items() if value}
    given = [f"--{name}" if value is True else f"--{name}={value}" for name, value in named.items()]
    return shlex.join(["vllm-spac", "profile", f"--expert-bytes={nbytes}", *given])


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
        if name == _ROUND_TRIPS:
            continue
        table.add_section()
        for at, seconds in points.items():
            moved = nbytes * (at if "at once" in name else 1)
            rate = "" if name.startswith((HOST_WORK, VLLM_STEP)) else f"{moved / seconds / 1e9:.2f} GB"
            table.add_row(name, f"{at:,}", f"{1e3 * seconds:.3f} ms", rate)
    return table


def _network_table(network: Network, points: dict[int, float]) -> Table:
    """Round trips by size; a byte of rows passes twice, there and back."""
    title = f"rows to {shown(network.peer)} and back"
    caption = f"{1e6 * network.latency:.0f} us one way, {network.bandwidth / 1e9:.2f} GB per second"
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    for name in ("bytes", "round trip", "per second"):
        table.add_column(name, justify="right")
    for nbytes, seconds in points.items():
        table.add_row(f"{nbytes:,}", f"{1e3 * seconds:.3f} ms", f"{2 * nbytes / seconds / 1e9:.2f} GB")
    return table
