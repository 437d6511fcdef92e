"""Records what each drafter of the real model would draft behind every token.

    python benchmarks/real/fit/fit.py chains --dense DIR/dense --output chains.safetensors

``benchmarks/replay/drafts.py`` and ``streams.py`` replay it. How the artefacts were fitted is in the README.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import artefact
import chains
import eagle
import held
from carve import CarvedLayer
from llama import Llama

TARGET = "target"

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
console = Console(highlight=False)


@app.callback()
def named() -> None:
    """Makes ``chains`` a command with a name, which recorded commands give."""


@app.command("chains")
def record(
    dense: Annotated[Path, typer.Option(help="the dense model's folder, as build.py writes it")],
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    count: Annotated[int, typer.Option(help="prompts, of all kinds in turn; texts lie beside the dense model")] = 20,
    tokens: Annotated[int, typer.Option(help="that the target says after each")] = 110,
    most: Annotated[int, typer.Option(help="drafts of a chain")] = 4,
    shares: Annotated[str, typer.Option(help="slots of a target that drafts for itself, percent")] = "25,50",
    seed: Annotated[int, typer.Option(help="which prompts")] = 5,
) -> None:
    """Records the chains of each drafter behind every token of what the carved model says to held prompts."""
    model, target = Llama(dense), artefact.load(artefact.PATH)[TARGET]
    top_k = target.numbers["top_k"]
    layers = [CarvedLayer(layer, experts, top_k) for layer, experts in zip(model.layers, target.layers, strict=True)]
    known = artefact.load_head(artefact.HEAD).weights
    trained = eagle.Head(model, len(known["gate"]))
    trained.load_state_dict(known)
    tensors: dict[str, torch.Tensor] = {}
    slots = tuple(int(share) for share in shares.split(","))
    for number, prompt in enumerate(held.prompts(dense, held.beside(dense), count, eagle.PROMPT, seed)):
        for name, found in chains.chains(model, layers, trained, torch.tensor(prompt), tokens, most, slots).items():
            tensors |= {f"{number}.{name}.{part}": tensor for part, tensor in found._asdict().items()}
        console.print(f"{number + 1} of {count} prompts")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output)


if __name__ == "__main__":
    app()
