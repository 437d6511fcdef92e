"""Writes an INT8 copy of the toy model, to serve as a *draft* of the model itself.

    python benchmarks/toy/quantize.py models/target ../../.cache/toy/int8

Every attention and expert matrix is rounded to 8 bits, symmetric, one scale per output channel: the
recipe of published W8 checkpoints, which do not quantise embeddings, router, norms and the language-model head.
Stock vLLM has no INT8 expert kernel on a CPU without AVX-512 or AMX, so the rounded values are stored
**as bf16** under the same architecture: the copy has the quality of INT8 and loads everywhere, but it has
the size of bf16. Storing code times scale in bf16 rounds once more, by at most 1/256 of a value.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LEVELS = 127
_KEPT = ("embed_tokens", "lm_head", "mlp.gate.weight", "norm")

app = typer.Typer(add_completion=False)


def is_rounded(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in _KEPT)


def round_to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> (codes int8 [out, in], scale float32 [out, 1]); an all-zero row has scale 1."""
    peak = weight.float().abs().amax(-1, keepdim=True)
    scale = torch.where(peak > 0, peak / LEVELS, torch.ones_like(peak))
    return (weight.float() / scale).round().to(torch.int8), scale


def _round_all(file: Path) -> tuple[dict[str, Tensor], int, int]:
    """(tensors to store, bytes of the rounded ones as int8 with fp32 scales, bytes of the others)."""
    tensors, as_int8, others = {}, 0, 0
    with safe_open(file, "pt") as source:
        for name in source.keys():  # noqa: SIM118 - not a dictionary
            tensor = source.get_tensor(name)
            if is_rounded(name):
                codes, scale = round_to_int8(tensor)
                tensors[name] = (codes.float() * scale).to(tensor.dtype)
                as_int8 += codes.numel() + 4 * scale.numel()
            else:
                tensors[name] = tensor
                others += tensor.numel() * tensor.element_size()
    return tensors, as_int8, others


def int8_copy(source: Path, target: Path) -> dict:
    """Writes the rounded copy of the checkpoint folder ``source``; returns the content of ``training.json``.

    The same source gives the same bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    as_int8 = others = 0
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors, rounded, kept = _round_all(file)
            save_file(tensors, target / file.name, metadata={"format": "pt"})
            as_int8, others = as_int8 + rounded, others + kept
        elif file.is_file() and file.name != "training.json" and file.suffix != ".xz":
            shutil.copyfile(file, target / file.name)
    facts = {
        "made_from": source.name,
        "rounding": "symmetric int8 per output channel of attention and expert matrices",
        "stored_as": "bf16, because stock vLLM has no INT8 expert kernel for a CPU without AVX-512 or AMX",
        "kept_in_bf16": list(_KEPT),
        "bytes_if_stored_as_int8": as_int8 + others,
    }
    (target / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


@app.command(help=__doc__)
def main(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint to copy.", exists=True, file_okay=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
) -> None:
    typer.echo(json.dumps(int8_copy(source, target)))


if __name__ == "__main__":
    app()
