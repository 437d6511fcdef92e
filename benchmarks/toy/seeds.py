"""Compares local models that were trained with several seeds: loss and locality on the same held-out text.

    for SEED in 1 2; do
        python benchmarks/toy/train.py local --minutes 22 --seed $SEED --output .cache/toy/local-seed-$SEED
    done
    python benchmarks/toy/seeds.py .cache/toy/local-seed-1 .cache/toy/local-seed-2

The committed models are measured as well. Hits are of one LRU cache per layer, as ``vllm-spac trace show`` has them, on
true text, not on text that the model writes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from export import load_moe
from nets import CausalLM, SparseMLP
from rich.console import Console
from rich.progress import track
from rich.table import Table
from streams import MODELS, kinds, windows
from validation import TOKENS, validate

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, provenance, write_result

from vllm_spac.tools.traces.locality import LARGE_CACHE, SMALL_CACHE, lru_hits
from vllm_spac.tools.traces.trace_text import Text

_WINDOWS = 8  # of each kind of text, in which an LRU cache is followed token by token


def main(
    folders: Annotated[list[Path], typer.Argument(help="Models.", exists=True, file_okay=False)],
    output: Annotated[Path, typer.Option(help="JSON.")] = RESULTS / "toy_local_seeds.json",
) -> None:
    """Measure all models, one after the other."""
    origin, (_, held_out) = provenance(), kinds()
    committed = {"flat": MODELS / "target", "local, committed": MODELS / "local" / "target"}
    rows = []
    for name, folder in track(
        [*committed.items(), *((path.name, path) for path in folders)], console=Console(stderr=True)
    ):
        model, facts = load_moe(folder), json.loads((folder / "training.json").read_text(encoding="utf-8"))
        known = {fact: facts.get(fact) for fact in ("minutes", "tokens", "seed")}
        rows.append({"model": name, **known, **validate(model, held_out), **hits(model, held_out)})
    write_result(output, {"label": "toy models", "rows": rows, "provenance": origin})
    view = Table(title="held-out text", title_justify="left")
    shown = ("validation_loss", "overlap_with_previous_token", "mass_of_top_half_of_63_rows", "lru_small", "lru_large")
    for column in ("model", *shown):
        view.add_column(column)
    for row in rows:
        view.add_row(row["model"], *(f"{row[column]:.3f}" for column in shown))
    Console(width=140).print(view)


@torch.no_grad()
def hits(model: CausalLM, held_out: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns the hit rates of caches with 19 and 38 % of a layer's experts, mean over layers."""
    ids = []
    for tokens in held_out.values():
        for chunk in windows(tokens, TOKENS, _WINDOWS).split(4):
            model(chunk[:, :-1])
            layers = [cast(SparseMLP, block.mlp) for block in model.blocks()]
            p = torch.stack([mlp.probabilities for mlp in layers if mlp.probabilities is not None])
            ids.append(p.topk(model.shape.top_k).indices.view(len(p), -1, model.shape.top_k).transpose(0, 1))
    chosen = torch.cat(ids).numpy()
    experts, top_k = model.shape.experts, model.shape.top_k
    text = cast(Text, SimpleNamespace(ids=chosen, layers=chosen.shape[1], experts=experts, top_k=top_k))
    small, large = lru_hits(text, [max(top_k, round(share * experts)) for share in (SMALL_CACHE, LARGE_CACHE)])
    return {"lru_small": round(float(small.mean()), 4), "lru_large": round(float(large.mean()), 4)}


if __name__ == "__main__":
    typer.run(main)
