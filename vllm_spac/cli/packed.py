"""``vllm-spac packed``: lists, verifies, repairs and deletes folders of packed experts.

It never follows symbolic links below such a folder, deletes only files that packing writes, and nothing at all from a
folder with any other file.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac.cli.tables import examples, print_table, print_text, shown
from vllm_spac.errors import SpacError, StoreError
from vllm_spac.storage.checkpoint.packed_folder import MARK, Packed, alone, check_file, everything, remove, scan
from vllm_spac.system.host_memory import gib
from vllm_spac.system.untrusted import path_named

EXAMPLES = examples("""
vllm-spac packed
vllm-spac packed --verify --disk-dir /mnt/nvme/experts
vllm-spac packed --repair
vllm-spac packed --delete 6f1c0e0c9f1b4c7d8a2e5b3f4d6c7a90
""")


def packed(
    disk_dir: Annotated[
        Path, typer.Option(help="The folder that --spac-disk-dir names.", show_default="~/.cache/vllm_spac")
    ] = Path("~/.cache/vllm_spac"),
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and check it against its checksum.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Verify, and delete what is damaged: the next start packs it again.")
    ] = False,
    delete: Annotated[str | None, typer.Option(metavar="FINGERPRINT", help="Delete one folder.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """List the packed experts on this machine, verify or repair them, or delete some."""
    root = path_named(disk_dir, "--disk-dir")
    try:
        if delete is not None:
            _delete(root, delete, yes)
        else:
            _list(root, verify or repair, repair)
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}") from error


def verify_all(folders: list[Packed], console: Console) -> dict[Path, str]:
    """Checks every expert; returns what is wrong with each damaged file."""
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    damaged = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(path.lstat().st_size for item in folders for path in item.experts))
        for item in folders:
            for path in item.experts:
                problem = check_file(path, item.folder.name, lambda count: progress.advance(task, count))
                if problem:
                    damaged[path] = problem
    return damaged


def repair_all(folders: list[Packed], console: Console) -> dict[Path, str]:
    """Checks every expert, and deletes damaged ones and leftovers; returns what was wrong with each damaged file.

    Raises:
        StoreError: a folder is in use, or is not one of packed experts; nothing was deleted.
    """
    with contextlib.ExitStack() as locks:
        for item in folders:
            locks.enter_context(alone(item.folder))
            everything(item.folder)
        damaged = verify_all(folders, console)
        for path in (*damaged, *(path for item in folders for path in item.leftovers)):
            path.unlink()
        for item in folders:
            (item.folder / MARK).unlink(missing_ok=True)
    return damaged


def _list(root: Path, verify: bool, repair: bool) -> None:
    console, folders = Console(), list(scan(root))
    if not folders:
        print_text(console, f"no packed experts in {shown(root)}")
        return
    print_table(console, _table(root, folders))
    if not verify:
        return
    damaged = (repair_all if repair else verify_all)(folders, console)
    for path, problem in damaged.items():
        print_text(console, f"[red]damaged[/] {shown(f'{path} {problem}')}")
    if damaged and not repair:
        raise StoreError(
            f"{len(damaged)} files are damaged; --repair deletes them, and the next start packs those experts again"
        )
    if damaged:
        console.print(
            f"deleted {len(damaged)} damaged files; the next start packs those experts again", highlight=False
        )
        return
    console.print(f"[green]all {sum(len(item.experts) for item in folders)} files are as they were packed[/]")


def _delete(root: Path, fingerprint: str, yes: bool) -> None:
    match = next((item for item in scan(root) if item.folder.name == fingerprint), None)
    if match is None:
        raise SpacError(f"{root} has no packed experts {fingerprint}; `vllm-spac packed` lists what there is")
    everything(match.folder)  # before asking for confirmation: the folder may not be deletable at all
    console = Console()
    print_table(console, _table(root, [match]))
    if not yes:
        typer.confirm("Delete them? A server that uses them now will fail", abort=True)
    remove(match.folder)
    print_text(console, f"deleted {shown(match.folder)} ({gib(match.bytes)})")


def _table(root: Path, folders: list[Packed]) -> Table:
    total = gib(sum(item.bytes for item in folders))
    table = Table(title=f"{shown(root)} ({total})", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("fingerprint", no_wrap=True, min_width=32)  # never cut, so that it can be copied to --delete
    table.add_column("model", overflow="fold")
    table.add_column("layers", overflow="fold")
    left = any(item.leftovers for item in folders)  # by processes that were killed
    for name in ("experts", "size", "age", *["leftovers"] * left):
        table.add_column(name, justify="right")
    for item in folders:
        layers = f"{len(item.layers)} ({_number(item.layers[0])}..{_number(item.layers[-1])})" if item.layers else "0"
        row = (item.folder.name, item.model or "?", layers, str(len(item.experts)), gib(item.bytes), _age(item.newest))
        table.add_row(*map(shown, row), *[str(len(item.leftovers))] * left)
    return table


def _number(layer: str) -> str:
    """``model.layers.17.mlp.experts`` -> ``17``."""
    match = re.search(r"\d+", layer)
    return match[0] if match else layer


def _age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
