"""What a token loses where one of its selected experts is missing, or another takes its place.

    python benchmarks/real/fit/swaps.py --dense DIR/dense --texts texts.safetensors --texts chats.safetensors

In every layer and for every token one of the eight experts is changed, on held-out sources.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import artefact
from carve import CarvedLayer, Choice, weights_of
from fit import LENGTH, TARGET, Artefact, Dense, Texts, read_texts
from llama import Llama, windows

console = Console(highlight=False)


def dropped(rank: int | None) -> Choice:
    """One expert is left out: that with the ``rank``-th largest weight, or any. The others' weights stay."""

    def choice(logits: torch.Tensor, top_k: int) -> torch.Tensor:
        weights = weights_of(logits, top_k)
        ids = logits.topk(top_k, -1).indices
        return weights.scatter(-1, _picked(ids, rank), 0.0)

    return choice


def swapped(any_other: bool) -> Choice:
    """Any expert is left out, and the next in the router's order, or any other, takes its weight."""

    def choice(logits: torch.Tensor, top_k: int) -> torch.Tensor:
        weights = weights_of(logits, top_k)
        order = logits.argsort(-1, descending=True)
        out = _picked(order[..., :top_k], None)
        new = _picked(order[..., top_k:], None if any_other else 0)
        return weights.scatter(-1, new, weights.gather(-1, out)).scatter(-1, out, 0.0)

    return choice


def _picked(ids: torch.Tensor, rank: int | None) -> torch.Tensor:
    """One of ids [..., n] for each token, [..., 1]."""
    if rank is not None:
        return ids[..., rank, None]
    return ids.gather(-1, torch.randint(0, ids.shape[-1], (*ids.shape[:-1], 1)))


VARIANTS: dict[str, Choice] = {
    "as selected": weights_of,
    "the heaviest left out": dropped(0),
    "the lightest left out": dropped(-1),
    "any left out": dropped(None),
    "any swapped for the next in order": swapped(False),
    "any swapped for any other": swapped(True),
}


def perplexity(model: Llama, layers: list[CarvedLayer], ids: torch.Tensor, choice: Choice | None) -> float:
    """Of the carved model with this choice, or of the dense model; ids int64 [windows, LENGTH]."""

    def ffn(number: int, h: torch.Tensor) -> torch.Tensor:
        return layers[number].output(layers[number].neurons(h, choice)[0])

    loss = 0.0
    for batch in ids.split(4):
        scores = model.logits(model.hidden(batch, ffn if choice else None))[:, :-1].log_softmax(-1)
        loss -= float(scores.gather(-1, batch[:, 1:, None]).sum())
    return math.exp(loss / ids[:, 1:].numel())


def main(
    dense: Dense,
    texts: Texts,
    artefact_path: Artefact = artefact.PATH,
    count: Annotated[int, typer.Option("--windows", help=f"windows of {LENGTH} tokens of each kind")] = 2,
) -> None:
    torch.manual_seed(0)
    model, target = Llama(dense), artefact.load(artefact_path)[TARGET]
    top_k = target.numbers["top_k"]
    layers = [CarvedLayer(layer, experts, top_k) for layer, experts in zip(model.layers, target.layers, strict=True)]
    held = {kind: windows(text, count, LENGTH, 1) for kind, text in read_texts(texts, "held").items()}
    table = Table("perplexity over the parent's", *held, "mean")
    with torch.inference_mode():
        parents = {kind: perplexity(model, layers, ids, None) for kind, ids in held.items()}
        for name, choice in VARIANTS.items():
            ratios = [perplexity(model, layers, ids, choice) / parents[kind] for kind, ids in held.items()]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            table.add_row(name, *(f"{ratio:.2f}" for ratio in ratios), f"{mean:.2f}")
            console.print(name, f"{mean:.3f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
