"""``vllm-spac quantise``: a quantised copy of a checkpoint, for drafts, predictors or a smaller machine."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_spac.checkpoint.headers import find_folder
from vllm_spac.cli.text import shown
from vllm_spac.errors import StoreError
from vllm_spac.system.host_memory import gib

EXAMPLES = """[bold]Examples[/]

vllm-spac quantise ./Qwen3-30B-A3B --format int4 --output ./Qwen3-30B-A3B-int4

vllm-spac quantise Qwen/Qwen3-30B-A3B --format int8 --linears all --output /mnt/nvme/draft
"""


class Codes(StrEnum):
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class Linears(StrEnum):
    EXPERTS = "experts"
    ALL = "all"


def quantise(
    model: Annotated[
        str, typer.Argument(help="Folder of an unquantised checkpoint, or its name in the Hugging Face cache.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the copy; an unfinished copy in it is completed.")],
    format: Annotated[
        Codes, typer.Option(help="fp8 with a scale for each block, int8 for each row, int4 for each group.")
    ] = Codes.INT4,
    group: Annotated[int, typer.Option(help="Columns that share a scale, of int4.", min=8)] = 128,
    linears: Annotated[Linears, typer.Option(help="What is rounded: the experts, or all linear layers.")] = (
        Linears.EXPERTS
    ),
) -> None:
    """Write a quantised copy of a checkpoint, one file after the other: INT4, INT8 (compressed-tensors) or FP8.

    Weights are rounded to the nearest code, without calibration: measure what it costs before you serve it.
    """
    from vllm_spac.checkpoint.quantising import Copy, Rounding

    console = Console()
    copy = Copy(find_folder(model), output, Rounding(format.value, group, linears.value))
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task("quantising", total=sum(copy.files.values()))
            for _, count in copy.write():
                progress.advance(task, count)
    except OSError as error:
        raise StoreError(f"{error.filename or output}: {error.strerror}; the same command goes on from here") from error
    size = sum(path.stat().st_size for path in output.glob("*.safetensors"))
    console.print(
        f"{shown(output)}: {gib(size)} of {gib(sum(copy.files.values()))}; vllm-spac inspect says how to serve it",
        highlight=False,
        soft_wrap=True,
    )
