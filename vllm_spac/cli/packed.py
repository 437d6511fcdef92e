"""``vllm-spac packed``: the folders of packed experts on this machine; what they hold, whether it is sound, and away.

Symbolic links below the folder are never followed. Deleting removes only what packing writes, and nothing at
all from a folder that holds anything else.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import xxhash
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_spac.errors import SpacError, StoreError
from vllm_spac.memory import gib

EXAMPLES = """[bold]Examples[/]

vllm-spac packed

vllm-spac packed --verify --disk-dir /mnt/nvme/experts

vllm-spac packed --delete 6f1c0e0c9f1b4c7d8a2e5b3f4d6c7a90
"""

# As vllm_spac.tiers.disk writes them; a test compares, because importing that module takes torch and seconds.
FORMAT = "spac-expert-1"
HEADER = 4096
_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
_LAYER = re.compile(r"layer-\d{3,}")
_EXPERT = re.compile(r"expert-(\d{4,})\.safetensors")
_LEFTOVER = re.compile(r"expert-\d{4,}\.(\d+\.partial|corrupt)")
_PROBE = re.compile(r"\.probe-\d+")
_BLOCK = 8 << 20


@dataclass(frozen=True)
class Packed:
    """The experts of one checkpoint in one layout.

    Attributes:
        folder: where they are; its name is the fingerprint.
        layers: name of each layer's experts, in the order of the layers.
        experts: the files that serve.
        leftovers: files that were set aside as damaged, or that a killed process left half-written.
        bytes: size of all of them.
        newest: when the last one was written, in seconds since the epoch.
    """

    folder: Path
    layers: tuple[str, ...]
    experts: tuple[Path, ...]
    leftovers: tuple[Path, ...]
    bytes: int
    newest: float


def packed(
    disk_dir: Annotated[
        Path, typer.Option(help="The folder that --spac-disk-dir names.", show_default="~/.cache/vllm_spac")
    ] = Path("~/.cache/vllm_spac"),
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every file and check it against its checksum.")
    ] = False,
    delete: Annotated[str | None, typer.Option(metavar="FINGERPRINT", help="Delete one folder.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking.")] = False,
) -> None:
    """List the packed experts on this machine, check them, or delete some."""
    try:
        if delete is not None:
            _delete(disk_dir.expanduser(), delete, yes)
        else:
            _list(disk_dir.expanduser(), verify)
    except OSError as error:
        raise StoreError(f"{error.filename}: {error.strerror}") from error


def scan(root: Path) -> Iterator[Packed]:
    """Every folder of packed experts directly in ``root``, by name."""
    if not root.is_dir():
        return
    with os.scandir(root) as entries:
        names = sorted(e.name for e in entries if _FINGERPRINT.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    for name in names:
        yield look(root / name)


def look(folder: Path) -> Packed:
    """What lies in one folder; anything that packing does not write is left out."""
    experts, leftovers, layers, size, newest = [], [], [], 0, folder.lstat().st_mtime
    for layer in _entries(folder):
        if not (_LAYER.fullmatch(layer.name) and layer.is_dir(follow_symlinks=False)):
            continue
        mine = []
        for entry in _entries(Path(layer.path)):
            if not entry.is_file(follow_symlinks=False):
                continue
            if _EXPERT.fullmatch(entry.name):
                mine.append(Path(entry.path))
            elif _LEFTOVER.fullmatch(entry.name):
                leftovers.append(Path(entry.path))
            else:
                continue
            facts = entry.stat(follow_symlinks=False)
            size, newest = size + facts.st_size, max(newest, facts.st_mtime)
        experts += mine
        layers.append(str(_header(mine[0]).get("layer", layer.name)) if mine else layer.name)
    return Packed(folder, tuple(layers), tuple(experts), tuple(leftovers), size, newest)


def check(path: Path, fingerprint: str, step=lambda count: None) -> str | None:
    """What is wrong with one file, or None; ``step`` is told of the bytes read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            step(HEADER)
            metadata = _metadata(file.read(HEADER))
            digest = xxhash.xxh3_128()
            while block := file.read(_BLOCK):
                digest.update(block)
                step(len(block))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if metadata.get("format") != FORMAT:
        return f"has no header of format {FORMAT}"
    if metadata.get("fingerprint") != fingerprint:
        return f"belongs to {metadata.get('fingerprint')}"
    if metadata.get("expert") != str(int(_EXPERT.fullmatch(path.name)[1])):
        return f"holds expert {metadata.get('expert')}"
    if metadata.get("xxh3_128") != digest.hexdigest():
        return "is not what was packed (checksum)"
    return None


def verify_all(found: list[Packed], console: Console) -> list[str]:
    """Check every expert; a line for each damaged file."""
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    damaged = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(path.lstat().st_size for item in found for path in item.experts))
        for item in found:
            for path in item.experts:
                problem = check(path, item.folder.name, lambda count: progress.advance(task, count))
                if problem:
                    damaged.append(f"{path} {problem}")
    return damaged


def remove(folder: Path) -> None:
    """Delete a folder of packed experts.

    Raises:
        StoreError: it is in use, or it is not such a folder; nothing was deleted.
    """
    if not _FINGERPRINT.fullmatch(folder.name) or not stat.S_ISDIR(folder.lstat().st_mode):
        raise StoreError(f"{folder} is no folder of packed experts; nothing was deleted")
    lock_path = folder.with_name(f"{folder.name}.lock")
    with open(os.open(lock_path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{folder} is in use by a server or a packing process; nothing was deleted") from error
        files, folders = _everything(folder)
        for path in files:
            path.unlink()
        for path in (*folders, folder):
            path.rmdir()
        lock_path.unlink()


def _everything(folder: Path) -> tuple[list[Path], list[Path]]:
    """(files, sub-folders) of a folder that holds nothing but what packing writes; else ``StoreError``."""
    files, folders = [], []
    for entry in _entries(folder):
        path = Path(entry.path)
        if _PROBE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            files.append(path)
        elif _LAYER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            folders.append(path)
        else:
            raise StoreError(f"{path} was not written by packing; nothing was deleted")
    for entry in (entry for layer in folders for entry in _entries(layer)):
        known = _EXPERT.fullmatch(entry.name) or _LEFTOVER.fullmatch(entry.name)
        if not known or not entry.is_file(follow_symlinks=False):
            raise StoreError(f"{entry.path} was not written by packing; nothing was deleted")
        files.append(Path(entry.path))
    experts = [path for path in files if _EXPERT.fullmatch(path.name)]
    if files and not any(_header(path).get("fingerprint") == folder.name for path in experts):
        raise StoreError(f"no file in {folder} says that packing wrote it; nothing was deleted")
    return files, folders


def _list(root: Path, verify: bool) -> None:
    console, found = Console(), list(scan(root))
    if not found:
        console.print(f"no packed experts in {escape(str(root))}", highlight=False, soft_wrap=True)
        return
    console.print(_table(root, found))
    if not verify:
        return
    damaged = verify_all(found, console)
    for problem in damaged:
        console.print(f"[red]damaged[/] {escape(problem)}", highlight=False, soft_wrap=True)
    if damaged:
        raise StoreError(f"{len(damaged)} files are damaged; delete them, and the next start packs those experts again")
    console.print(f"[green]all {sum(len(item.experts) for item in found)} files are as they were packed[/]")


def _delete(root: Path, fingerprint: str, yes: bool) -> None:
    match = next((item for item in scan(root) if item.folder.name == fingerprint), None)
    if match is None:
        raise SpacError(f"{root} has no packed experts {fingerprint}; `vllm-spac packed` lists what there is")
    _everything(match.folder)  # before the question: it may not be deletable at all
    console = Console()
    console.print(_table(root, [match]))
    if not yes:
        typer.confirm("Delete them? A server that uses them now will fail", abort=True)
    remove(match.folder)
    console.print(f"deleted {escape(str(match.folder))} ({gib(match.bytes)})", highlight=False, soft_wrap=True)


def _entries(folder: Path) -> list[os.DirEntry]:
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _metadata(header: bytes) -> dict:
    """The metadata of an expert's header; empty when it is none."""
    try:
        metadata = json.loads(header[8:])["__metadata__"]
    except (ValueError, KeyError, TypeError):  # the caller reports a header without a format
        return {}
    return metadata if isinstance(metadata, dict) else {}


def _header(path: Path) -> dict:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        return _metadata(file.read(HEADER))


def _table(root: Path, found: list[Packed]) -> Table:
    total = gib(sum(item.bytes for item in found))
    table = Table(title=f"{escape(str(root))} ({total})", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("fingerprint", no_wrap=True, min_width=32)  # to be copied behind --delete
    table.add_column("layers", overflow="fold")
    for name in ("experts", "size", "age", "leftovers"):
        table.add_column(name, justify="right")
    for item in found:
        layers = f"{len(item.layers)} ({_number(item.layers[0])}..{_number(item.layers[-1])})" if item.layers else "0"
        row = (item.folder.name, layers, str(len(item.experts)), gib(item.bytes), _age(item.newest))
        table.add_row(*row, str(len(item.leftovers)))
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
