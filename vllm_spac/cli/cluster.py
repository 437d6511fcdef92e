"""``vllm-spac cluster``: starts, shows and stops expert workers that outlive an engine."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, shown
from vllm_spac.errors import ConfigError
from vllm_spac.methods.od_moe.places import MODULE, ClusterFile, Place, StartedWorker
from vllm_spac.system.files import FILE, LockFile, open_log, prepare_folder, refusal, write_text, writing
from vllm_spac.system.host_memory import available_host_bytes, gib
from vllm_spac.system.machine import CLUSTER_FILE, DISK_DIR
from vllm_spac.system.untrusted import path_named

START_EXAMPLES = examples("""
vllm-spac cluster start --workers 3
vllm-spac cluster start --workers 1 --bind 10.0.0.7 --file /shared/cluster.json --memory 48
""")
EXAMPLES = examples("""
vllm-spac cluster show
""")
STOP_EXAMPLES = examples("""
vllm-spac cluster stop
""")
_RESERVE = 1 << 30  # of memory, left to the rest of the machine
_END = 20.0  # seconds until a worker that does not end is killed
_WAIT = 600.0  # seconds for other processes to start or stop theirs
_REMEDY = "name another file with --file"

_File = Annotated[Path, typer.Option("--file", help="The cluster's file: its workers and their secret.")]


def start(
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers to start on this machine.")] = 1,
    bind: Annotated[
        str, typer.Option(help="Address to listen on, with which other machines reach the workers.")
    ] = "127.0.0.1",
    disk_dir: Annotated[
        Path, typer.Option(help="Folder of the packed experts.", show_default=str(DISK_DIR))
    ] = DISK_DIR,
    memory: Annotated[
        float | None, typer.Option(min=0, help="GiB of experts per worker. Default: an equal part of what is free.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per worker. Default: an equal part.")] = None,
    file: _File = CLUSTER_FILE,
) -> None:
    """Start expert workers, and add them to the cluster's file."""
    path = path_named(file, "--file")
    if "@" in str(path):
        raise ConfigError(f"--file {path}: --spac-executor takes no path with @ in it; name another")
    free = max(0, available_host_bytes() - _RESERVE) // workers
    arguments = {
        "--bind": bind,
        "--disk-dir": str(path_named(disk_dir, "--disk-dir").absolute()),
        "--memory": str(free if memory is None else int(memory * 2**30)),
        "--threads": str(threads or max(1, len(os.sched_getaffinity(0)) // workers)),
    }
    with writing(path.parent, _REMEDY):
        prepare_folder(path.parent)
    console = Console(highlight=False)
    with _changing(path, console):
        found = ClusterFile.read(path) if path.exists() else ClusterFile(secret=secrets.token_hex(32), workers=())
        new = _started(path, found, workers, [text for pair in arguments.items() for text in pair], console)
    for place in new:
        console.print(f"worker at {place.address}, process {place.pid}", markup=False)
    total = len(found.workers) + len(new)
    console.print(
        f"{total} workers in {path}, each with up to {gib(int(arguments['--memory']))} of experts. Serve with:"
    )
    executor = "cluster" if file == CLUSTER_FILE else f"cluster@file={path}"
    console.print(f"vllm serve MODEL --plugin spac --spac-executor {executor}", markup=False, soft_wrap=True)


def _started(path: Path, known: ClusterFile, workers: int, arguments: list[str], console: Console) -> list[Place]:
    """Starts workers and adds them to ``known`` in the cluster's file ``path``; ends all of them if that fails."""
    with writing(path.with_suffix(".log"), _REMEDY):
        log = open_log(path.with_suffix(".log"))
    started: list[StartedWorker] = []
    with log:
        try:
            for _ in range(workers):
                started.append(StartedWorker(bytes.fromhex(known.secret), arguments, log))
            with console.status("starting the workers"):
                addresses = [each.address() for each in started]
            new = [
                Place(address=address, pid=each.process.pid, machine=platform.node())
                for address, each in zip(addresses, started, strict=True)
            ]
            _write(path, ClusterFile(secret=known.secret, workers=(*known.workers, *new)))
        except BaseException:
            for each in started:
                each.stop()
            raise
    return new


def show(file: _File = CLUSTER_FILE) -> None:
    """Show the workers of a cluster's file, and which of those on this machine run. An engine counts for them."""
    path = path_named(file, "--file")
    table = Table(title=shown(str(path)), title_justify="left", box=box.SIMPLE)
    for column in ("worker", "address", "machine", "process", "state", "memory"):
        table.add_column(column)
    for number, place in enumerate(ClusterFile.read(path).workers):
        table.add_row(str(number), shown(place.address), shown(place.machine), str(place.pid), *_state(place))
    print_table(Console(highlight=False), table)


def stop(file: _File = CLUSTER_FILE) -> None:
    """Stop the workers of a cluster's file that run on this machine, and remove them from it."""
    path = path_named(file, "--file")
    ClusterFile.read(path)  # without a cluster, no lock of it is made either
    console = Console(highlight=False)
    with _changing(path, console):
        found = ClusterFile.read(path)
        here = [place for place in found.workers if place.machine == platform.node()]
        ending = [process for place in here if (process := _process(place)) is not None]
        for process in ending:
            process.terminate()
        _, alive = psutil.wait_procs(ending, _END)
        for process in alive:
            process.kill()
        left = tuple(place for place in found.workers if place not in here)
        if left:
            _write(path, ClusterFile(secret=found.secret, workers=left))
        else:
            path.unlink()
    console.print(f"{len(ending)} workers stopped, {len(here) - len(ending)} had ended")
    if left:
        console.print(f"{len(left)} run on other machines: run this command there, too")


@contextlib.contextmanager
def _changing(path: Path, console: Console) -> Iterator[None]:
    """Context in which no other process changes the cluster's file ``path``, which may not exist yet."""
    beside = path.with_name(f"{path.name}.lock")
    if problem := refusal(beside):
        raise ConfigError(f"spac: {problem}, or {_REMEDY}")
    with writing(beside, _REMEDY):
        lock = LockFile(beside)

    def announce(holder: str) -> None:
        console.print(f"waiting for {holder}, which changes {path}", markup=False, soft_wrap=True)

    with contextlib.closing(lock):
        with writing(beside, _REMEDY):  # a file system without locks says so here
            taken = lock.take(wait=_WAIT, announce=announce)
        if not taken:
            raise ConfigError(
                f"spac: {lock.holder_text()} has been changing {path} for {_WAIT:.0f} s; end it and "
                f"try again, or {_REMEDY}"
            )
        yield


def _write(path: Path, content: ClusterFile) -> None:
    with writing(path, _REMEDY):
        write_text(path, content.text(), mode=FILE)


def _process(place: Place) -> psutil.Process | None:
    """Returns the process of a worker of this machine; None if it ended, or its number is another program's now."""
    try:
        process = psutil.Process(place.pid)
        return process if MODULE in process.cmdline() else None
    except psutil.Error:
        return None


def _state(place: Place) -> tuple[str, str]:
    """Returns what a worker does, and its memory."""
    if place.machine != platform.node():
        return "[dim]on another machine", ""
    process = _process(place)
    if process is None:
        return "[red]ended", ""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    return f"runs since {since}", gib(process.memory_info().rss)
