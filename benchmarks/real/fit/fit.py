"""Fits the artefact that ``build.py`` makes the MoE of. Nobody needs to run it again.

    python benchmarks/real/fit/texts.py --dense DIR/dense --output texts.safetensors
    python benchmarks/real/fit/chats.py --dense DIR/dense --output chats.safetensors
    python benchmarks/real/fit/fit.py carve --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py correct --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py distil --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py judge --dense DIR/dense --texts texts.safetensors --texts chats.safetensors
    python benchmarks/real/fit/fit.py roll --dense DIR/dense --texts … --output rolls.safetensors
    python benchmarks/real/fit/fit.py head --dense DIR/dense --texts … --rolls rolls.safetensors
    python benchmarks/real/fit/fit.py prune --dense DIR/dense --texts … --rolls rolls.safetensors --held held.st …
    python benchmarks/real/fit/fit.py vocabulary --dense DIR/dense --texts …
    python benchmarks/real/fit/fit.py chains --dense DIR/dense --output chains.safetensors

``carve``, ``correct`` and ``distil`` write ``benchmarks/real/carved.safetensors`` (``--artefact`` names another file),
in twenty minutes of one core. ``judge`` prints the perplexity beside the dense model's on held-out sources.
``roll`` lets the carved model speak, and ``head`` trains the EAGLE-3 head on what it said. ``prune`` trains a
draft model of a third of the parent's layers, which nothing is built of. ``vocabulary`` chooses the tokens that the
head drafts. ``chains`` records what each drafter would draft behind every token (for
``benchmarks/replay/drafts.py``).
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
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

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import artefact
import chains
import eagle
import held
import prune
from artefact import ModelChange
from carve import CarvedLayer, Plan, carved, corrected
from distill import Student, distilled
from llama import Llama, windows

LENGTH = 256
SIZES = (8192, 16384, 24576)  # of draft vocabularies that are compared
TARGET = "target"
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


def carved_layers(model: Llama, path: Path) -> list[CarvedLayer]:
    """The FFNs of the target that an artefact makes of the dense model."""
    target = artefact.load(path)[TARGET]
    top_k = target.numbers["top_k"]
    return [CarvedLayer(layer, experts, top_k) for layer, experts in zip(model.layers, target.layers, strict=True)]


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
    artefact.save({TARGET: ModelChange(layers, numbers)}, artefact_path)


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
    model, target = Llama(dense), artefact.load(artefact_path)[TARGET]
    ids = shuffled(read_texts(texts, "fit"), count, 1)
    ranks = [3 * rank, *[early] * 5, *[rank] * (len(target.layers) - 6)]
    layers = corrected(model, target.layers, ids, target.numbers["top_k"], ranks, ridge, progress())
    numbers = target.numbers | {"corrected": {"windows": count, "ranks": ranks, "ridge": ridge}}
    artefact.save({TARGET: ModelChange(layers, numbers)}, output or artefact_path)


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
    model, target = Llama(dense), artefact.load(artefact_path)[TARGET]
    student = Student(model, target.layers, target.numbers["top_k"])
    begun = time.monotonic()
    run = {"minutes": minutes, "rate": rate, "batch": batch, "balance": balance, "seed": seed}

    def save(**ended: float) -> None:
        numbers = target.numbers | {"distilled": [*target.numbers.get("distilled", []), run | ended]}
        artefact.save({TARGET: ModelChange(student.result(), numbers)}, output or artefact_path)

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
def roll(
    dense: Dense,
    texts: Texts,
    output: Annotated[Path, typer.Option(help="the safetensors file to write")],
    artefact_path: Artefact = artefact.PATH,
    side: Annotated[
        str, typer.Option(help="fit: half of the prompts are chats, half of the rows sample; or held")
    ] = "fit",
    count: Annotated[int, typer.Option(help="rows")] = 192,
    seed: Annotated[int, typer.Option(help="which prompts")] = 0,
) -> None:
    """Lets the carved model go on from prompts of all kinds, and keeps its streams."""
    model = Llama(dense)
    layers = carved_layers(model, artefact_path)
    found = read_texts(texts, side)
    if "chat" not in found:
        raise typer.BadParameter(f"none has chats to {side} on; also give chats.py's file", param_hint="--texts")
    chat = found.pop("chat").long()
    starts = ((chat[:-1] == chat[0]) & (chat[1:] == chat[1])).nonzero()[:-1, 0]  # of chats: <|im_start|>system
    chosen = starts[torch.randperm(len(starts), generator=torch.Generator().manual_seed(seed))][: count // 2]
    rows = [torch.stack([chat[start : start + eagle.PROMPT] for start in chosen.tolist()])]
    share = (count - len(chosen)) // len(found)
    rows += [windows(text, share, eagle.PROMPT, seed + i) for i, text in enumerate(found.values())]
    prompts = torch.cat(rows)
    greedy = torch.ones(len(prompts), dtype=torch.bool)
    if side == "fit":
        greedy[1::2] = False
    eagle.save(eagle.rolled_out(model, layers, prompts, eagle.ROLL, greedy, eagle.TEMPERATURE), output)


@app.command()
def head(
    dense: Dense,
    texts: Texts,
    rolls: Annotated[list[Path], typer.Option(help="files of roll; may be given several times")],
    held: Annotated[Path | None, typer.Option(help="a file of roll on held texts, to judge by")] = None,
    output: Annotated[Path, typer.Option(help="the file to write")] = artefact.HEAD,
    minutes: Annotated[float, typer.Option(help="how long to learn")] = 25.0,
    rate: Annotated[float, typer.Option(help="learning rate")] = 1.5e-3,
    batch: Annotated[int, typer.Option(help="rows of a step")] = 4,
    neurons: Annotated[int, typer.Option(help="of the head's FFN")] = 1024,
    start: Annotated[Path | None, typer.Option(help="a head to go on from")] = None,
) -> None:
    """Trains the EAGLE-3 head; keeps what there is every 200 steps."""
    model = Llama(dense)
    found = eagle.joined([eagle.load(path) for path in rolls])
    judged_by = eagle.load(held) if held else None
    learned = [*read_texts(texts, "fit").values(), found.ids[:, found.begun :].flatten()]
    common = by_frequency(learned, len(model.embedding))[: eagle.COMMON]
    trainee, begun = eagle.Head(model, neurons), time.monotonic()
    if start:
        trainee.load_state_dict(artefact.load_head(start).weights)
    numbers = {"depths": list(eagle.DEPTHS), "tokens": found.ids.numel(), "minutes": minutes, "rate": rate}

    def said(step: int, loss: float, agreed: list[float]) -> None:
        if step % 20 == 0:
            parts = " ".join(f"{part:.3f}" for part in agreed)
            console.print(f"step {step:5}  loss {loss:.3f}  agreed {parts}  {time.monotonic() - begun:.0f} s")
        if step % 200 == 199:
            finish()

    def finish() -> None:
        weights = {name: weight.detach() for name, weight in trainee.named_parameters()}
        artefact.save_head(artefact.Head(weights, numbers), output)
        if judged_by:
            console.print(f"tokens a step on held prompts: {eagle.tokens_a_step(trainee, model, judged_by):.3f}")

    eagle.trained(trainee, model, found, common, minutes * 60, rate, batch, said)
    finish()


@app.command("prune")
def prune_command(
    dense: Dense,
    texts: Texts,
    rolls: Annotated[list[Path], typer.Option(help="files of roll; may be given several times")],
    held: Annotated[Path, typer.Option(help="a file of roll on held texts, to judge by")],
    output: Annotated[Path, typer.Option(help="folder for the draft model")],
    kept: Annotated[str, typer.Option(help="layers of the parent that stay")] = "0,1,2,6,10,14,18,22,27,29",
    minutes: Annotated[float, typer.Option(help="how long to learn")] = 50.0,
    rate: Annotated[float, typer.Option(help="learning rate")] = 6e-4,
    batch: Annotated[int, typer.Option(help="windows of a step")] = 5,
    every: Annotated[int, typer.Option(help="steps between judgements")] = 200,
    artefact_path: Artefact = artefact.PATH,
) -> None:
    """Trains a draft model of some layers of the parent, and says how well it drafts."""
    model = Llama(dense)
    layers = carved_layers(model, artefact_path)
    found, said = read_texts(texts, "fit"), eagle.joined([eagle.load(path) for path in rolls])
    common = by_frequency([*found.values(), said.ids[:, said.begun :].flatten()], len(model.embedding))[: eagle.COMMON]
    ids = torch.cat([shuffled(found, 6000, 2000, eagle.ROLL), said.ids])
    ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(4))]
    judged_by, trainee = eagle.load(held), prune.Pruned(model, [int(number) for number in kept.split(",")])
    begun, tokens = time.monotonic(), batch * eagle.ROLL

    def report(step: int, loss: float, agreed: float) -> None:
        if step % 20 == 0:
            seconds = time.monotonic() - begun
            console.print(
                f"step {step:5}  {step * tokens:8} tokens  loss {loss:.3f}  agreed {agreed:.3f}  {seconds:.0f} s"
            )
        if step % every == every - 1:
            judge_it()

    def judge_it() -> None:
        with torch.no_grad():
            prune.write(trainee.model(), dense, output)
            console.print(f"tokens a step on held prompts: {prune.tokens_a_step(trainee.model(), judged_by):.3f}")

    judge_it()
    prune.trained(trainee, model, layers, ids, common, minutes * 60, rate, batch, report)
    judge_it()


@app.command()
def vocabulary(
    dense: Dense,
    texts: Texts,
    size: Annotated[int, typer.Option(help="tokens that the head drafts")] = 16384,
    count: Annotated[int, typer.Option("--prompts", help="held prompts to judge by; texts lie beside the model")] = 0,
    tokens: Annotated[int, typer.Option(help="that the target says after each")] = 80,
    output: Annotated[Path, typer.Option(help="the file to write")] = artefact.VOCABULARY,
) -> None:
    """Chooses the tokens that the head drafts: what ends a text, and the most frequent ones of the texts to fit on."""
    model, known = Llama(dense), artefact.load_head().weights
    order = by_frequency(list(read_texts(texts, "fit").values()), len(model.embedding))
    ends = torch.tensor(json.loads((dense / "generation_config.json").read_text())["eos_token_id"])
    order = torch.cat([ends, order[~torch.isin(order, ends)]])
    artefact.save_vocabulary(order[:size].sort().values, len(order), output)
    judged_by, rolls = read_texts(texts, "held"), None
    if count:
        asked = held.prompts(dense, held.beside(dense), count, eagle.PROMPT, 11)
        length = min(map(len, asked))
        starts, greedy = torch.tensor([ids[-length:] for ids in asked]), torch.ones(count, dtype=torch.bool)
        rolls = eagle.rolled_out(model, carved_layers(model, artefact.PATH), starts, length + tokens, greedy, 1.0)
        judged_by["what the target says"] = rolls.ids[:, length:].flatten()
    table = Table("coverage", *judged_by, *(("tokens per step",) if rolls else ()))
    for drafted in (*SIZES, len(order)):
        ids = order[:drafted].sort().values
        row = [float(torch.isin(text, ids).float().mean()) for text in judged_by.values()]
        if rolls:
            trained = eagle.Head(model, len(known["gate"]), ids)
            trained.load_state_dict(known)
            row.append(eagle.tokens_a_step(trained, model, rolls))
        table.add_row(f"{drafted:,}", *(f"{figure:.3f}" for figure in row))
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
    known = artefact.load_head(artefact.HEAD).weights
    trained = eagle.Head(model, len(known["gate"]), artefact.load_vocabulary())
    trained.load_state_dict(known)
    tensors: dict[str, torch.Tensor] = {}
    slots = tuple(int(share) for share in shares.split(","))
    for number, prompt in enumerate(held.prompts(dense, held.beside(dense), count, eagle.PROMPT, seed)):
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
        output.write_text(json.dumps(rows, indent=1) + "\n")


def judged(model: Llama, layers: list[CarvedLayer], ids: torch.Tensor) -> dict[str, float]:
    """One kind's figures; ids int64 [windows, LENGTH]."""

    def ffn(number: int, h: torch.Tensor) -> torch.Tensor:
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
    }


if __name__ == "__main__":
    app()
