"""``vllm-spac inspect``: memory needs of a checkpoint, from its ``config.json`` and safetensors headers alone."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vllm_spac.checkpoint import quant_config, quantisation
from vllm_spac.checkpoint.headers import Checkpoint, find_folder, read_checkpoint
from vllm_spac.checkpoint.quantisation import Kernels
from vllm_spac.cli.tables import print_table
from vllm_spac.cli.text import shown
from vllm_spac.errors import UnsupportedError
from vllm_spac.system.host_memory import gib

EXAMPLES = """[bold]Examples[/]

vllm-spac inspect ./Qwen3-30B-A3B

vllm-spac inspect Qwen/Qwen3-30B-A3B   [dim]# a model in the Hugging Face cache; nothing is downloaded[/]
"""


SHARES = (10, 25, 50, 100)


def inspect(
    model: Annotated[str, typer.Argument(help="Folder of the checkpoint, or its name in the Hugging Face cache.")],
) -> None:
    """Show how much memory a checkpoint needs and whether it can be served; reads headers only, never weights."""
    folder = find_folder(model)
    checkpoint = read_checkpoint(folder)
    quantised = checkpoint.quantisation
    not_on_cpu = quantisation.refusal(quantised, Kernels.CPU) if quantised else None
    on_cpu = read_checkpoint(folder, Kernels.CPU) if quantised and not_on_cpu is None else checkpoint
    console = Console()
    print_table(console, _facts(model, checkpoint, on_cpu))
    if quantised and (reason := quantisation.refusal(quantised)):  # a CPU runs none that a GPU does not
        raise UnsupportedError(f"{model} has {reason}")
    print_table(console, _needs(checkpoint))
    smallest = checkpoint.smallest_percent()
    console.print(
        f"smallest --spac-slots: [bold]{smallest}%[/] (shared by all layers), or [bold]{checkpoint.top_k}[/] per layer",
        highlight=False,
        soft_wrap=True,
    )
    plain = f"vllm serve {shown(model)} --plugin spac --spac-slots {max(25, smallest)}%"
    if not quantised:
        lines = [f"[green]supported[/]: {plain}"]
    else:
        lines = [f"[green]supported[/] on a GPU: {' '.join((plain, *quantisation.flags(quantised)))}"]
        lines += [
            f"not on a CPU: {shown(not_on_cpu)}" if not_on_cpu else f"[green]supported[/] on a CPU with AMX: {plain}"
        ]
    console.print("\n".join(lines), highlight=False, soft_wrap=True)


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
