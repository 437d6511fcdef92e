"""Gives the toy model experts of any size: writes a checkpoint with the same function and the same routing.

How the tensors grow, and why nothing changes, is in ``widen.py``; here they are streamed from disk to disk.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.progress import Progress
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.common import Script
from benchmarks.toy.widen import Plan, inflate_tensor, new_shape, plan_for, read_columns

_SPARE = 1.02  # the file system needs a little more than the tensors


class TooLittleRoom(RuntimeError):
    """The disk has fewer free bytes than the inflated model takes."""


def _files_of(source: Path) -> dict[str, Path]:
    """Returns tensor name -> file."""
    where = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            where.update(dict.fromkeys(shard.keys(), file))
    return where


def _groups(names: list[str]) -> Iterator[list[str]]:
    """Yields one group of names for each layer, then the rest."""
    layers: dict[int, list[str]] = {}
    rest: list[str] = []
    for name in names:
        parts = name.split(".")
        (layers.setdefault(int(parts[2]), []) if parts[1] == "layers" else rest).append(name)
    for layer in sorted(layers):
        yield sorted(layers[layer])
    yield sorted(rest)


def total_bytes(source: Path, plan: Plan) -> int:
    """Returns the bytes of the inflated tensors, from the shapes alone."""
    element = {"BF16": 2, "F16": 2, "F32": 4}
    total = 0
    for name, file in _files_of(source).items():
        with safe_open(file, "pt") as shard:
            view = shard.get_slice(name)
            total += math.prod(new_shape(plan, name, tuple(view.get_shape()))) * element[view.get_dtype()]
    return total


def inflate(
    source: Path,
    target: Path,
    intermediate: int | None = None,
    hidden: int | None = None,
    expert_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Writes the inflated copy of checkpoint folder ``source``, one shard per layer; returns the sizes.

    ``progress`` is called with (layers written, layers in all). Holds one layer in memory at a time.
    """
    plan = plan_for(source, intermediate, hidden, expert_bytes)
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty")
    needed = total_bytes(source, plan)
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if free < needed * _SPARE:
        raise TooLittleRoom(f"{target} has room for {free / 1e9:.1f} GB, the model takes {needed / 1e9:.1f} GB")
    where = _files_of(source)
    groups, index = list(_groups(list(where))), {}
    for number, names in enumerate(groups):
        tensors = {}
        for name in names:
            with safe_open(where[name], "pt") as shard:
                tensors[name] = inflate_tensor(plan, name, shard.get_tensor(name))
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
        if progress is not None:
            progress(number + 1, len(groups))
    _write_side_files(source, target, plan, index, needed)
    return plan


def _write_side_files(source: Path, target: Path, plan: Plan, index: dict[str, str], size: int) -> None:
    """Writes index, config and the other small files of the folder."""
    content = {"metadata": {"total_size": size}, "weight_map": index}
    (target / "model.safetensors.index.json").write_text(json.dumps(content, indent=1) + "\n")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "hidden_size": plan.new_hidden,
        "moe_intermediate_size": plan.new_intermediate,
        "intermediate_size": config["num_experts_per_tok"] * plan.new_intermediate,
        "rms_norm_eps": config["rms_norm_eps"] * plan.norm_scale**2,
    }
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in source.iterdir():
        if file.suffix in {".json", ".jinja"} and not (target / file.name).exists() and "index" not in file.name:
            shutil.copyfile(file, target / file.name)


def inflate_head(head: Path, source: Path, target: Path, plan: Plan) -> None:
    """Writes an EAGLE-3 head for the inflated model: its own size is unchanged, ``fc`` reads the wider states.

    The head shares the embeddings of a target of its own width; here it gets its own copy of them.
    """
    target.mkdir(parents=True, exist_ok=True)
    tensors = load_file(head / "model.safetensors")
    chunks = tensors["fc.weight"].split(plan.hidden, 1)
    tensors["fc.weight"] = torch.cat([read_columns(plan, chunk) for chunk in chunks], 1)
    embeddings = "model.embed_tokens.weight"
    with safe_open(_files_of(source)[embeddings], "pt") as shard:
        tensors["embed_tokens.weight"] = shard.get_tensor(embeddings)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((head / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"target_hidden_size": plan.new_hidden}, indent=1) + "\n")


PRESETS = {  # hidden and expert intermediate size of published models
    "olmoe-1b-7b": (2048, 1024),
    "qwen3-30b-a3b": (2048, 768),
    "deepseek-v2-lite": (2048, 1408),
    "mixtral-8x7b": (4096, 14336),
}
_EXAMPLES = """[bold]Examples[/]

python benchmarks/toy/inflate.py benchmarks/toy/models/target .cache/toy/large --like qwen3-30b-a3b

python benchmarks/toy/inflate.py benchmarks/toy/models/target .cache/toy/wide --hidden 1024 --intermediate 512

python benchmarks/toy/inflate.py benchmarks/toy/models/target .cache/toy/five --expert-bytes 5MB
"""


def parse_bytes(text: str) -> int:
    """``"9.4MB"``, ``"8MiB"`` or a plain number -> bytes."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError as error:
        raise typer.BadParameter(f"{text!r} is not a size such as 9.4MB or 8MiB") from error


app = Script("Write a copy of the toy model with larger experts and the same function.", _EXAMPLES)


@app.main
def main(
    source: Annotated[Path, typer.Argument(help="Folder of the toy model.", exists=True, file_okay=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write; must be empty or absent.")],
    intermediate: Annotated[int | None, typer.Option(help="Neurons per expert.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Size of the hidden state.")] = None,
    expert_bytes: Annotated[str | None, typer.Option(help="Bytes per expert in bf16, such as 9.4MB.")] = None,
    like: Annotated[str | None, typer.Option(help=f"Sizes of a published model: {', '.join(PRESETS)}.")] = None,
    eagle3: Annotated[Path | None, typer.Option(help="Also adapt this EAGLE-3 head, into TARGET-eagle3.")] = None,
) -> None:
    if like is not None:
        if like not in PRESETS or intermediate or hidden or expert_bytes:
            raise typer.BadParameter(f"--like takes one of {', '.join(PRESETS)} and no other size")
        hidden, intermediate = PRESETS[like]
    with Progress() as bar:
        task = bar.add_task("layers")

        def show(done: int, layers: int) -> None:
            bar.update(task, completed=done, total=layers)

        try:
            size = None if expert_bytes is None else parse_bytes(expert_bytes)
            plan = inflate(source, target, intermediate, hidden, size, show)
        except (TooLittleRoom, FileExistsError, ValueError) as error:
            raise typer.BadParameter(str(error)) from error
    if eagle3 is not None:
        inflate_head(eagle3, source, target.with_name(target.name + "-eagle3"), plan)
    total = total_bytes(source, plan)
    typer.echo(f"{plan.expert_bytes() / 1e6:.2f} MB per expert in bf16, {total / 1e9:.2f} GB in all, in {target}")


if __name__ == "__main__":
    app()
