"""Fits the artefact that ``build.py`` makes the MoE of. Nobody needs to run it again.

    python benchmarks/real/fit/texts.py --dense DIR/dense --output texts.safetensors
    python benchmarks/real/fit/chats.py --dense DIR/dense --output chats.safetensors
    python benchmarks/real/fit/fit.py carve --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py correct --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py distil --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py judge --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/rolls.py --dense DIR/dense --texts … --output rolls.safetensors
    python benchmarks/real/fit/rolls.py --dense DIR/dense --texts … --output held.safetensors --side held --windows 60
    python benchmarks/real/fit/fit.py head --dense DIR/dense --rolls rolls.safetensors --held held.safetensors --state S
    python benchmarks/real/fit/fit.py vocabulary --dense DIR/dense --texts …
    python benchmarks/real/fit/fit.py chains --dense DIR/dense --output chains.safetensors

``carve``, ``correct`` and ``distil`` write ``benchmarks/real/carved.safetensors`` (``--artefact`` names another file),
in twenty minutes of one core. ``judge`` prints the perplexity beside the dense model's on held-out sources.
``rolls.py`` lets the carved model speak, and ``head`` trains the EAGLE-3 head on what it said; with ``--resume`` it
goes on. ``vocabulary`` chooses the tokens that the head drafts. ``chains`` records what each drafter would draft behind
every token (for ``benchmarks/replay/drafts.py``).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
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
from safetensors.torch import save_file

from benchmarks.common import provenance, write_result
from benchmarks.real import artefact, held
from benchmarks.real.artefact import ModelChange
from benchmarks.real.fit import chains, drafter, eagle, mtp
from benchmarks.real.fit.carve import CarvedLayer, Plan, carved, carved_layers, corrected
from benchmarks.real.fit.distill import Student, distilled
from benchmarks.real.fit.learning import Trainer
from benchmarks.real.fit.llama import Llama, windows
from benchmarks.real.fit.rolls import Rolls

LENGTH = 256
PROMPT = 48  # tokens, of chains
SIZES = (8192, 16384, 24576)  # of draft vocabularies that are compared
FORMS = {"eagle3": artefact.HEAD, "mtp": artefact.MTP}  # of drafters, and their artefacts
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


def shuffled(texts: dict[str, torch.Tensor], count: int, seed: int, length: int = LENGTH) -> torch.Tensor:
    """Windows of all kinds, as many of each, in random order: int64 [windows, length]."""
    share = -(-count // len(texts))
    ids = torch.cat([windows(text, share, length, seed + i) for i, text in enumerate(texts.values())])
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


@app.command()
def carve(
    dense: Dense,
    texts: Texts,
    artefact_path: Artefact = artefact.PATH,
    count: Annotated[int, typer.Option("--windows", help=f"windows of {LENGTH} tokens to fit on")] = 80,
) -> None:
    """Makes experts of the dense FFNs, layer by layer: their neurons, and routers."""
    model, plan = Llama(dense), Plan()
    layers = carved(model, shuffled(read_texts(texts, "fit"), count, 0), plan, progress())
    numbers = {"top_k": plan.top_k, "carved": asdict(plan) | {"windows": count}}
    artefact.save({artefact.TARGET: ModelChange(layers, numbers)}, artefact_path)


@app.command()
def correct(
    dense: Dense,
    texts: Texts,
    artefact_path: Artefact = artefact.PATH,
    output: Annotated[Path | None, typer.Option(help="another file for the result")] = None,
    count: Annotated[int, typer.Option("--windows", help=f"windows of {LENGTH} tokens to fit on")] = 160,
    rank: Annotated[
        int, typer.Option(help="of the correction to a down projection; in layer 0 three times as much")
    ] = 64,
    early: Annotated[int, typer.Option(help="the same in layers 1 to 5")] = 96,
    ridge: Annotated[float, typer.Option(help="how much corrections are held back")] = 0.03,
) -> None:
    """Fits corrections to the down projections of a carved model."""
    model, target = Llama(dense), artefact.load(artefact_path)[artefact.TARGET]
    ids = shuffled(read_texts(texts, "fit"), count, 1)
    ranks = [3 * rank, *[early] * 5, *[rank] * (len(target.layers) - 6)]
    layers = corrected(model, target.layers, ids, target.numbers["top_k"], ranks, ridge, progress())
    numbers = target.numbers | {"corrected": {"windows": count, "ranks": ranks, "ridge": ridge}}
    artefact.save({artefact.TARGET: ModelChange(layers, numbers)}, output or artefact_path)


@app.command()
def distil(
    dense: Dense,
    texts: Texts,
    artefact_path: Artefact = artefact.PATH,
    output: Annotated[Path | None, typer.Option(help="another file for the result")] = None,
    minutes: Annotated[float, typer.Option(help="how long to learn")] = 10.0,
    rate: Annotated[float, typer.Option(help="learning rate: of the size of a correction's columns")] = 0.02,
    batch: Annotated[int, typer.Option(help=f"windows of {LENGTH} tokens of a step")] = 4,
    balance: Annotated[float, typer.Option(help="how much an even load of the experts counts")] = 0.3,
    seed: Annotated[int, typer.Option(help="which windows: another one to go on with an artefact")] = 1000,
) -> None:
    """Trains the corrections and routers end to end, to the dense model's distribution."""
    model, target = Llama(dense), artefact.load(artefact_path)[artefact.TARGET]
    student = Student(model, target.layers, target.numbers["top_k"])
    begun = time.monotonic()
    run = {"minutes": minutes, "rate": rate, "batch": batch, "balance": balance, "seed": seed}

    def save(**ended: float) -> None:
        numbers = target.numbers | {"distilled": [*target.numbers.get("distilled", []), run | ended]}
        artefact.save({artefact.TARGET: ModelChange(student.result(), numbers)}, output or artefact_path)

    saved = begun

    def said(step: int, divergence: float, mean: float) -> None:
        nonlocal saved
        now = time.monotonic()
        console.print(f"step {step:4}  KL {divergence:.3f}  mean {mean:.3f}  {now - begun:.0f} s")
        if now - saved > SAVED:
            save(ended=(now - begun) / 60)
            saved = now

    distilled(student, shuffled(read_texts(texts, "fit"), 40_000, seed), minutes * 60, rate, batch, balance, said)
    save()


def progress() -> Callable[[int, float], None]:
    """Prints a line for each layer, with the seconds so far."""
    begun = time.monotonic()

    def said(number: int, error: float) -> None:
        console.print(f"layer {number:2}  relative error {error:.3f}  {time.monotonic() - begun:.0f} s")

    return said


@app.command()
def head(
    dense: Dense,
    rolls: Annotated[list[Path], typer.Option(help="files of rolls.py; may be given several times")],
    held_rolls: Annotated[Path, typer.Option("--held", help="a file of rolls.py on held texts, to judge by")],
    state: Annotated[Path, typer.Option(help="what a later run goes on from; written every ten minutes")],
    resume: Annotated[bool, typer.Option("--resume", help="go on from the state")] = False,
    form: Annotated[
        str, typer.Option(help="eagle3, or mtp: a multi-token prediction layer in DeepSeek's form")
    ] = "eagle3",
    output: Annotated[Path | None, typer.Option(help="another file for the result")] = None,
    artefact_path: Artefact = artefact.PATH,
    minutes: Annotated[float, typer.Option(help="how long to learn")] = 60.0,
    rate: Annotated[float, typer.Option(help="learning rate")] = 8e-4,
    batch: Annotated[int, typer.Option(help="windows of a step")] = 4,
    neurons: Annotated[int, typer.Option(help="of an EAGLE-3 head's FFN")] = 1024,
) -> None:
    """Trains a drafter on what the target said, and judges it every ten minutes."""
    if form not in FORMS:
        raise typer.BadParameter(f"{form} is none of {', '.join(FORMS)}", param_hint="--form")
    if state.exists() and not resume:
        raise typer.BadParameter(f"{state} is there already; --resume goes on from it", param_hint="--state")
    model = Llama(dense)
    layers, begun = carved_layers(model, artefact_path), time.monotonic()
    said, judged_by = Rolls.load(rolls), Rolls.load([held_rolls])

    def ffn(number: int, h: torch.Tensor) -> torch.Tensor:
        return layers[number](h)

    known, last = artefact.load_vocabulary(), layers[-1]
    makers = {
        "eagle3": lambda: eagle.Eagle(model, neurons, known, eagle.RANK),
        "mtp": lambda: mtp.Mtp(model, last.experts, last.top_k, known),
    }
    trainee = makers[form]()
    trainer = Trainer(trainee, model, ffn, said, rate, batch)
    if resume:
        trainer.resume(state)
    tokens = trainer.learned.tokens
    console.print(f"{len(said):,} windows with {len(said.ids):,} tokens; {tokens:,} tokens learned from")

    def kept() -> None:
        weights, judged = trainer.mean(), deepcopy(trainee)
        judged.load_state_dict(weights)
        each = drafter.tokens_a_step(judged, model, ffn, judged_by)
        tokens = sum(each) / len(each)
        trainer.learned.curve.append((trainer.learned.tokens, round(tokens, 3)))
        numbers = {"depths": list(trainee.depths), "rate": rate, "batch": batch, **asdict(trainer.learned)}
        artefact.save_head(artefact.Head(weights, numbers), output or FORMS[form])
        trainer.save(state)
        console.print(f"{trainer.learned.tokens:,} tokens: {tokens:.3f} tokens a step on {len(each)} held prompts")

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


@app.command("chains")
def record(
    dense: Dense,
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    count: Annotated[int, typer.Option(help="prompts, of all kinds in turn; texts lie beside the dense model")] = 20,
    tokens: Annotated[int, typer.Option(help="that the target says after each")] = 110,
    most: Annotated[int, typer.Option(help="drafts of a chain")] = 4,
    shares: Annotated[str, typer.Option(help="slots of a target that drafts for itself, percent")] = "25,50",
    seed: Annotated[int, typer.Option(help="which prompts")] = 5,
) -> None:
    """Records the chains of each drafter behind every token of what the carved model says to held prompts."""
    model = Llama(dense)
    layers = carved_layers(model, artefact.PATH)
    trained = eagle.Eagle.of(model, artefact.load_head().weights, artefact.load_vocabulary())
    tensors: dict[str, torch.Tensor] = {}
    slots = tuple(int(share) for share in shares.split(","))
    for number, prompt in enumerate(held.prompts(dense, held.beside(dense), count, PROMPT, seed)):
        for name, found in chains.chains(model, layers, trained, torch.tensor(prompt), tokens, most, slots).items():
            tensors |= {f"{number}.{name}.{part}": tensor for part, tensor in found._asdict().items()}
        console.print(f"{number + 1} of {count} prompts")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, output)


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
