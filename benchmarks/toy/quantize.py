"""Writes an INT8 or INT4 copy of a model, to serve as a *draft* of the model itself.

    python benchmarks/toy/quantize.py models/target ../../.cache/toy/int8
    python benchmarks/toy/quantize.py .cache/real/target .cache/real/int4 --bits 4

Every attention and expert matrix is rounded, symmetric, as published checkpoints do, which do not quantise embeddings,
router, norms and the language-model head. 8 bits have a scale per output channel, 4 bits one per 32 inputs.
Stock vLLM has no INT8 or INT4 expert kernel on a CPU without AVX-512, so the rounded values are stored
**as bf16** under the same architecture: the copy has the quality of its bits and loads everywhere, but it has
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

from benchmarks.common import Script

GROUP = 32  # inputs that share a scale of 4 bits
_KEPT = ("embed_tokens", "lm_head", "mlp.gate.weight", "norm")

app = Script(__doc__)


def is_rounded(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in _KEPT)


def rounded(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> (codes int8 [out, groups, in / groups], scale float32 [out, groups, 1]).

    A row of 8 bits is one group. A group of zeros has scale 1.
    """
    groups = weight.float().unflatten(-1, (1, -1) if bits == 8 else (-1, GROUP))
    peak = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(peak > 0, peak / (2 ** (bits - 1) - 1), torch.ones_like(peak))
    return (groups / scale).round().to(torch.int8), scale


def _round_all(file: Path, bits: int) -> tuple[dict[str, Tensor], int, int]:
    """(tensors to store, bytes of the rounded ones as integers with fp32 scales, bytes of the others)."""
    tensors, as_integers, others = {}, 0, 0
    with safe_open(file, "pt") as source:
        for name in source.keys():  # noqa: SIM118 - not a dictionary
            tensor = source.get_tensor(name)
            if is_rounded(name):
                codes, scale = rounded(tensor, bits)
                tensors[name] = (codes.float() * scale).flatten(-2).to(tensor.dtype)
                as_integers += codes.numel() * bits // 8 + 4 * scale.numel()
            else:
                tensors[name] = tensor
                others += tensor.numel() * tensor.element_size()
    return tensors, as_integers, others


def rounded_copy(source: Path, target: Path, bits: int = 8) -> dict:
    """Writes the rounded copy of the checkpoint folder ``source``; returns the content of ``training.json``.

    The same source gives the same bytes.
    """
    target.mkdir(parents=True, exist_ok=True)
    as_integers = others = 0
    for file in sorted(source.iterdir()):
        if file.suffix == ".safetensors":
            tensors, changed, kept = _round_all(file, bits)
            save_file(tensors, target / file.name, metadata={"format": "pt"})
            as_integers, others = as_integers + changed, others + kept
        elif file.is_file() and file.name != "training.json" and file.suffix != ".xz":
            shutil.copyfile(file, target / file.name)
    facts = {
        "made_from": source.name,
        "rounding": f"symmetric int{bits} per {'output channel' if bits == 8 else f'{GROUP} inputs'} of attention and "
        "expert matrices",
        "stored_as": f"bf16, because stock vLLM has no INT{bits} expert kernel for a CPU without AVX-512 or AMX",
        "kept_in_bf16": list(_KEPT),
        f"bytes_if_stored_as_int{bits}": as_integers + others,
    }
    (target / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


@app.main
def main(
    source: Annotated[Path, typer.Argument(help="Folder of the checkpoint to copy.", exists=True, file_okay=False)],
    target: Annotated[Path, typer.Argument(help="Folder to write.")],
    bits: Annotated[int, typer.Option(help="8 or 4.")] = 8,
) -> None:
    if bits not in (8, 4):
        raise typer.BadParameter("8 or 4", param_hint="--bits")
    typer.echo(json.dumps(rounded_copy(source, target, bits)))


if __name__ == "__main__":
    app()
