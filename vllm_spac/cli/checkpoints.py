"""Commands about checkpoints: ``inspect`` and ``packed``.

``packed`` lists, verifies, repairs and deletes folders of packed experts. It never follows symbolic links below such a
folder, deletes only files that packing writes, and nothing at all from a folder with any other file.
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

from vllm_spac.cli.tables import examples, print_table, say, shown
from vllm_spac.errors import SpacError, StoreError, UnsupportedError
from vllm_spac.storage.checkpoint import quant_config, quantisation
from vllm_spac.storage.checkpoint.headers import Checkpoint
from vllm_spac.storage.checkpoint.packed_folder import MARK, Packed, alone, check_file, everything, remove, scan
from vllm_spac.storage.checkpoint.published import find_model
from vllm_spac.storage.checkpoint.quantisation import FormatKernels
from vllm_spac.system.host_memory import gib
from vllm_spac.system.untrusted import path_named

PACKED_EXAMPLES = examples("""
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


def verify_all(found: list[Packed], console: Console) -> dict[Path, str]:
    """Checks every expert; returns what is wrong with each damaged file."""
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    damaged = {}
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=sum(path.lstat().st_size for item in found for path in item.experts))
        for item in found:
            for path in item.experts:
                problem = check_file(path, item.folder.name, lambda count: progress.advance(task, count))
                if problem:
                    damaged[path] = problem
    return damaged


def repair_all(found: list[Packed], console: Console) -> dict[Path, str]:
    """Checks every expert, and deletes damaged ones and leftovers; returns what was wrong with each damaged file.

    Raises:
        StoreError: a folder is in use, or is not one of packed experts; nothing was deleted.
    """
    with contextlib.ExitStack() as locks:
        for item in found:
            locks.enter_context(alone(item.folder))
            everything(item.folder)
        damaged = verify_all(found, console)
        for path in (*damaged, *(path for item in found for path in item.leftovers)):
            path.unlink()
        for item in found:
            (item.folder / MARK).unlink(missing_ok=True)
    return damaged


def _list(root: Path, verify: bool, repair: bool) -> None:
    console, found = Console(), list(scan(root))
    if not found:
        say(console, f"no packed experts in {shown(root)}")
        return
    print_table(console, _table(root, found))
    if not verify:
        return
    damaged = (repair_all if repair else verify_all)(found, console)
    for path, problem in damaged.items():
        say(console, f"[red]damaged[/] {shown(f'{path} {problem}')}")
    if damaged and not repair:
        raise StoreError(
            f"{len(damaged)} files are damaged; --repair deletes them, and the next start packs those experts again"
        )
    if damaged:
        console.print(
            f"deleted {len(damaged)} damaged files; the next start packs those experts again", highlight=False
        )
        return
    console.print(f"[green]all {sum(len(item.experts) for item in found)} files are as they were packed[/]")


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
    say(console, f"deleted {shown(match.folder)} ({gib(match.bytes)})")


def _table(root: Path, found: list[Packed]) -> Table:
    total = gib(sum(item.bytes for item in found))
    table = Table(title=f"{shown(root)} ({total})", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("fingerprint", no_wrap=True, min_width=32)  # never cut, so that it can be copied to --delete
    table.add_column("model", overflow="fold")
    table.add_column("layers", overflow="fold")
    for name in ("experts", "size", "age", "leftovers"):
        table.add_column(name, justify="right")
    for item in found:
        layers = f"{len(item.layers)} ({_number(item.layers[0])}..{_number(item.layers[-1])})" if item.layers else "0"
        row = (item.folder.name, item.model or "?", layers, str(len(item.experts)), gib(item.bytes), _age(item.newest))
        table.add_row(*map(shown, row), str(len(item.leftovers)))
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


INSPECT_EXAMPLES = examples("""
vllm-spac inspect ./Qwen3-30B-A3B
vllm-spac inspect Qwen/Qwen3-30B-A3B   [dim]# its config.json is downloaded, and no weights[/]
""")


SHARES = (10, 25, 50, 100)


def inspect(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint, or its name on the Hugging Face hub.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a name on the hub, as for vllm serve.")
    ] = None,
) -> None:
    """Show how much memory a checkpoint needs and whether it can be served; reads headers only, never weights."""
    named = find_model(model, revision)
    checkpoint = named.checkpoint()
    quantised = checkpoint.quantisation
    not_on_cpu = quantisation.refusal(quantised, FormatKernels.CPU) if quantised else None
    on_cpu = named.checkpoint(FormatKernels.CPU) if quantised and not_on_cpu is None else checkpoint
    console = Console()
    print_table(console, _facts(model, checkpoint, on_cpu))
    if named.remark:
        say(console, shown(named.remark))
    if quantised and (reason := quantisation.refusal(quantised)):  # a CPU runs none that a GPU does not
        raise UnsupportedError(f"{model} has {reason}")
    print_table(console, _needs(checkpoint))
    smallest = checkpoint.smallest_percent()
    say(
        console,
        f"smallest --spac-slots: [bold]{smallest}%[/] (shared by all layers), or [bold]{checkpoint.top_k}[/] per layer",
    )
    at = "" if revision is None else f" --revision {shown(revision)}"
    plain = f"vllm serve {shown(model)}{at} --plugin spac --spac-slots {max(25, smallest)}%"
    if not quantised:
        lines = [f"[green]supported[/]: {plain}"]
    else:
        lines = [f"[green]supported[/] on a GPU: {' '.join((plain, *quantisation.flags(quantised)))}"]
        lines += [
            f"not on a CPU: {shown(not_on_cpu)}" if not_on_cpu else f"[green]supported[/] on a CPU with AMX: {plain}"
        ]
    say(console, "\n".join(lines))


def _facts(model: str, checkpoint: Checkpoint, on_cpu: Checkpoint) -> Table:
    """The table of sizes; ``on_cpu``: as vLLM's kernels for a CPU read it."""
    experts = sum(checkpoint.layer_bytes.values())
    table = Table(title=shown(model), show_header=False, title_justify="left")
    rows = {
        "family": shown(checkpoint.name),
        "MoE layers x experts": f"{len(checkpoint.layer_bytes)} x {checkpoint.experts} = {checkpoint.total}",
        "experts per token (top-k)": str(checkpoint.top_k),
        "one expert": f"{_sizes(checkpoint)} ({shown(', '.join(sorted(checkpoint.dtypes)))})",
        "all experts": gib(experts),
        "everything else": gib(checkpoint.other_bytes),
    }
    if checkpoint.quantisation:
        rows["quantised by"] = shown(quant_config.method(checkpoint.quantisation)) + ", and so in slots"
        if on_cpu.expert_bytes != checkpoint.expert_bytes:
            rows["one expert in a CPU's layout"] = _sizes(on_cpu)
    elif "F32" in checkpoint.dtypes:
        rows["served as"] = "16 bits, half of these sizes, unless --dtype float32"
    if checkpoint.draft_bytes:
        rows["draft layers (not served)"] = gib(checkpoint.draft_bytes)
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _sizes(checkpoint: Checkpoint) -> str:
    return " or ".join(gib(size) for size in checkpoint.expert_bytes)


def _needs(checkpoint: Checkpoint) -> Table:
    """The table of memory needs by ``--spac-slots``; KV cache and activations are not included."""
    table = Table(title="fast memory, without KV cache and activations", title_justify="left")
    for name in ("--spac-slots", "slots", "experts in fast memory", "with everything else"):
        table.add_column(name, justify="right")
    for percent in SHARES:
        shapes = checkpoint.slots(percent)
        count, size = sum(n for n, _ in shapes), sum(n * size for n, size in shapes)
        valid = percent >= checkpoint.smallest_percent()
        marks = (gib(size), gib(size + checkpoint.other_bytes)) if valid else ("too few for one token", "")
        table.add_row(f"{percent}%", str(count), *marks, style=None if valid else "dim")
    return table
