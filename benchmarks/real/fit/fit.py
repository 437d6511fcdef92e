"""Trains the carved model's EAGLE-3 head, chooses the tokens that it drafts, and judges the model.

    python benchmarks/real/fit/texts.py --dense DIR/dense --output texts.safetensors
    python benchmarks/real/fit/chats.py --dense DIR/dense --output chats.safetensors
    python benchmarks/real/fit/fit.py judge --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/rolls.py --dense DIR/dense --texts … --output rolls.safetensors
    python benchmarks/real/fit/rolls.py --dense DIR/dense --texts … --output held.safetensors --side held
    python benchmarks/real/fit/fit.py head --dense DIR/dense --rolls rolls.safetensors --held held.safetensors --state S
    python benchmarks/real/fit/fit.py vocabulary --dense DIR/dense --texts …

``judge`` prints the perplexity beside the dense model's on held-out sources. ``rolls.py`` lets the carved model speak,
and ``head`` trains on what it said; with ``--resume`` it goes on. How the model itself was carved is in the history,
see ``benchmarks/real/README.md``.
"""

from __future__ import annotations

import json
import math
import time
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.common import provenance, write_result
from benchmarks.real import artefact
from benchmarks.real.fit import eagle
from benchmarks.real.fit.carved import CarvedLayer, carved_layers
from benchmarks.real.fit.learning import Trainer
from benchmarks.real.fit.llama import Llama, windows
from benchmarks.real.fit.rolls import Rolls
from benchmarks.toy.accept import acceptance_interval, acceptance_length

LENGTH = 256
SIZES = (8192, 16384, 24576)  # of draft vocabularies that are compared
SAVED = 600.0  # seconds from one time that what is learned so far is saved to the next

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, rich_markup_mode=None)
console = Console(highlight=False)

Dense = Annotated[Path, typer.Option(help="the dense model's folder, as build.py writes it")]
Texts = Annotated[list[Path], typer.Option(help="files of texts.py and chats.py; may be given several times")]
Artefact = Annotated[Path, typer.Option("--artefact", help="the artefact")]


def read_texts(paths: list[Path], side: str) -> dict[str, torch.Tensor]:
    """Kind of text -> its token ids [tokens]; ``side``: fit or held."""
    found = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                kind, part = name.split(".")
                if part == side:
                    found[kind] = file.get_tensor(name)
    return found


def by_frequency(texts: list[torch.Tensor], tokens: int) -> torch.Tensor:
    """All ``tokens``, the most frequent first; each text [its tokens] counts the same, and of equals the first wins."""
    counts = [torch.bincount(text.long(), minlength=tokens).double() / len(text) for text in texts]
    return torch.stack(counts).sum(0).argsort(descending=True, stable=True)


@app.command()
def head(
    dense: Dense,
    rolls: Annotated[list[Path], typer.Option(help="files of rolls.py; may be given several times")],
    held_rolls: Annotated[Path, typer.Option("--held", help="a file of rolls.py on held texts, to judge by")],
    state: Annotated[Path, typer.Option(help="what a later run goes on from; written every ten minutes")],
    resume: Annotated[bool, typer.Option("--resume", help="go on from the state")] = False,
    begin: Annotated[
        Path | None, typer.Option("--from", help="a head to begin with, e.g. the artefact's; without its moments")
    ] = None,
    output: Annotated[Path, typer.Option(help="the file for the result")] = artefact.HEAD,
    artefact_path: Artefact = artefact.PATH,
    minutes: Annotated[float, typer.Option(help="how long to learn")] = 60.0,
    rate: Annotated[float, typer.Option(help="learning rate")] = 8e-4,
    batch: Annotated[int, typer.Option(help="windows of a step")] = 4,
    neurons: Annotated[int, typer.Option(help="of its FFN; what it begins with may have fewer")] = 1024,
) -> None:
    """Trains a drafter on what the target said, and judges it every ten minutes."""
    if state.exists() and not resume:
        raise typer.BadParameter(f"{state} is there already; --resume goes on from it", param_hint="--state")
    model = Llama(dense)
    layers, begun = carved_layers(model, artefact_path), time.monotonic()
    said, judged_by = Rolls.load(rolls), Rolls.load([held_rolls])

    def ffn(number: int, h: torch.Tensor) -> torch.Tensor:
        return layers[number](h)

    trainee, before = eagle.Eagle(model, neurons, artefact.load_vocabulary(), eagle.RANK), 0
    if begin is not None:
        found = artefact.load_head(begin)
        missing, unknown = trainee.load_state_dict(eagle.widened(found.weights, neurons), strict=False)
        if unknown or any(not name.startswith("rows_") for name in missing):
            raise typer.BadParameter(f"{begin} has other weights: {missing}, {unknown}", param_hint="--from")
        before = int(found.numbers["tokens"])
    trainer = Trainer(trainee, model, ffn, said, rate, batch)
    trainer.learned.tokens = before
    if resume:
        trainer.resume(state)
    tokens = trainer.learned.tokens
    console.print(f"{len(said):,} windows with {len(said.ids):,} tokens; {tokens:,} tokens learned from")

    def kept() -> None:
        weights, judged = trainer.mean(), deepcopy(trainee)
        judged.load_state_dict(weights)
        each = eagle.engine_counters(judged, model, ffn, judged_by)
        tokens, (low, high) = acceptance_length(each), acceptance_interval(each)
        trainer.learned.curve.append((trainer.learned.tokens, round(tokens, 3)))
        numbers = {"depths": list(trainee.depths), "rate": rate, "batch": batch, **asdict(trainer.learned)}
        artefact.save_head(artefact.Head(weights, numbers), output)
        trainer.save(state)
        held = f"{tokens:.3f} tokens a step ({low:.2f}–{high:.2f}) on {len(each)} held prompts"
        console.print(f"{trainer.learned.tokens:,} tokens: {held}")

    saved = begun
    while time.monotonic() - begun < minutes * 60:
        loss, agreed = trainer.step()
        if trainer.steps % 20 == 1:
            parts = " ".join(f"{part:.3f}" for part in agreed)
            seconds = time.monotonic() - begun
            console.print(f"step {trainer.steps:5}  loss {loss:.3f}  agreed {parts}  {seconds:.0f} s")
        if time.monotonic() - saved > SAVED:
            kept()
            saved = time.monotonic()
    kept()


@app.command()
def vocabulary(
    dense: Dense,
    texts: Texts,
    size: Annotated[int, typer.Option(help="tokens that the head drafts")] = 16384,
    output: Annotated[Path, typer.Option(help="the file to write")] = artefact.VOCABULARY,
) -> None:
    """Chooses the tokens that the head drafts: what ends a text, and the most frequent ones of the texts to fit on."""
    model = Llama(dense)
    order = by_frequency(list(read_texts(texts, "fit").values()), len(model.embedding))
    ends = torch.tensor(json.loads((dense / "generation_config.json").read_text())["eos_token_id"])
    order = torch.cat([ends, order[~torch.isin(order, ends)]])
    artefact.save_vocabulary(order[:size].sort().values, len(order), output)
    judged_by = read_texts(texts, "held")
    table = Table("coverage", *judged_by)
    for drafted in (*SIZES, len(order)):
        ids = order[:drafted].sort().values
        shares = (float(torch.isin(text, ids).float().mean()) for text in judged_by.values())
        table.add_row(f"{drafted:,}", *(f"{share:.3f}" for share in shares))
    console.print(table)


@app.command()
def judge(
    dense: Dense,
    texts: Texts,
    artefact_path: Artefact = artefact.PATH,
    count: Annotated[int, typer.Option("--windows", help=f"windows of {LENGTH} tokens of each kind")] = 8,
    output: Annotated[Path | None, typer.Option(help="a JSON file for the figures")] = None,
) -> None:
    """Perplexity beside the dense model's, on sources that nothing was fitted on."""
    model = Llama(dense)
    layers = carved_layers(model, artefact_path)
    rows: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for kind, text in read_texts(texts, "held").items():
            rows[kind] = judged(model, layers, windows(text, count, LENGTH, 1))
    names = list(next(iter(rows.values())))
    rows["mean"] = {name: sum(row[name] for row in rows.values()) / len(rows) for name in names}
    mean = rows["mean"]
    for name in ("dense", "carved"):
        mean[name] = math.exp(
            sum(math.log(row[name]) for kind, row in rows.items() if kind != "mean") / (len(rows) - 1)
        )
    mean["ratio"] = mean["carved"] / mean["dense"]
    table = Table("", *rows)
    for name in names:
        table.add_row(name, *(f"{row[name]:.3f}" for row in rows.values()))
    console.print(table)
    if output:
        write_result(output, {"provenance": provenance(), "kinds": rows})


def judged(model: Llama, layers: list[CarvedLayer], ids: torch.Tensor) -> dict[str, float]:
    """One kind's figures; ids int64 [windows, LENGTH].

    ``next`` is how many of the experts that a layer selects its router names for the input of the layer before.
    """
    top_k = layers[0].top_k
    named = torch.zeros(0)  # the experts that a layer's router names for the input of the one before
    found = 0.0

    def ffn(number: int, h: torch.Tensor) -> torch.Tensor:
        nonlocal named, found
        if number:
            chosen = layers[number].logits(h).topk(top_k, -1).indices
            found += float((chosen[..., None] == named[..., None, :]).float().sum() / top_k)
        if number + 1 < len(layers):
            named = layers[number + 1].logits(h).topk(top_k, -1).indices
        return layers[number](h)

    losses, agreed, apart = [0.0, 0.0], 0.0, 0.0
    for batch in ids.split(4):
        scores = [model.logits(model.hidden(batch, each))[:, :-1].log_softmax(-1) for each in (None, ffn)]
        for side, score in enumerate(scores):
            losses[side] -= float(score.gather(-1, batch[:, 1:, None]).sum())
        agreed += float((scores[0].argmax(-1) == scores[1].argmax(-1)).float().sum())
        apart += float(F.kl_div(scores[1], scores[0], log_target=True, reduction="sum"))
    tokens = ids[:, 1:].numel()
    dense, carved = (math.exp(loss / tokens) for loss in losses)
    return {
        "dense": dense,
        "carved": carved,
        "ratio": carved / dense,
        "KL": apart / tokens,
        "top-1": agreed / tokens,
        "next": found / ids.numel() / (len(layers) - 1),
    }


if __name__ == "__main__":
    app()
