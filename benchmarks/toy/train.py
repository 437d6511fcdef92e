"""Trains the toy models and their drafts.

    python benchmarks/toy/train.py target  --minutes 60   # flat routing
    python benchmarks/toy/train.py local   --minutes 45   # continues it: local routing, more kinds of text
    python benchmarks/toy/train.py draft   --minutes 15 --model local
    python benchmarks/toy/train.py eagle3  --minutes 25 --model local --answers answers.safetensors

Each command writes a checkpoint that stock vLLM loads, and a ``training.json`` next to it. The learning
rate follows the fraction of the minutes spent, so a slower machine sees fewer tokens, not another schedule.
"""

from __future__ import annotations

import itertools
import json
import platform
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, cast

import corpus
import locality
import numpy as np
import streams
import torch
import torch.nn.functional as F
import typer
from eagle import Head, evaluate, head_shape, unrolled_loss, write_head
from export import load_moe, write_dense, write_moe, write_tokenizer
from nets import CausalLM, Shape, SparseMLP
from optim import optimizers, schedule
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from streams import CACHE, MODELS
from torch import Tensor
from validation import validate

DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, experts=0, top_k=0, intermediate=384)
BALANCE = 1e-2  # so that no expert dies early ...
BALANCED_UNTIL = 0.75  # ... and no longer: caching needs the skew of the text
SHARE_EVERY, SHARE_UNTIL = 50, 0.7  # steps; of the run: how often and how long unused experts are replaced
LOCAL_FROM = 0.25  # of the run: until then the losses of locality grow from 0


class Model(StrEnum):
    """A toy model; its drafts are in the folder next to it, and trained on the text that it is trained on."""

    FLAT = "flat"
    LOCAL = "local"

    @property
    def folder(self) -> Path:
        return MODELS if self is Model.FLAT else MODELS / "local"

    def text(self) -> streams.Split:
        return streams.library() if self is Model.FLAT else streams.kinds()


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Minutes = Annotated[float, typer.Option(help="Wall-clock minutes to train.")]
Threads = Annotated[int, typer.Option(help="Torch threads.")]
Of = Annotated[Model, typer.Option("--model", help="The model that it drafts for.")]


def run(name: str, model: torch.nn.Module, minutes: float, groups, loss_of, report) -> dict:
    """Trains for ``minutes``; saves a checkpoint every five minutes so that a stopped run can be resumed."""
    state_file = CACHE / f"{name}.pt"
    state = {"seconds": 0.0, "steps": 0, "tokens": 0}
    if state_file.exists():
        saved = torch.load(state_file, weights_only=True)
        state = saved["state"]
        model.load_state_dict(saved["model"])
        for optimizer, values in zip(groups, saved["optimizers"], strict=True):
            optimizer.load_state_dict(values)
    saved_at = mark = time.monotonic()
    percentage = TextColumn("{task.percentage:>3.0f}%")
    with Progress(TextColumn("{task.description}"), BarColumn(), percentage, TimeRemainingColumn()) as progress:
        task = progress.add_task(name, total=minutes * 60)
        while state["seconds"] < minutes * 60:
            schedule(groups, state["seconds"] / (minutes * 60))
            loss, tokens = loss_of(state["steps"], state["seconds"] / (minutes * 60))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in groups:
                optimizer.step()
                optimizer.zero_grad()
            now = time.monotonic()
            state["seconds"] += now - mark
            mark = now
            state["steps"] += 1
            state["tokens"] += tokens
            progress.update(task, completed=state["seconds"])
            if state["steps"] % 20 == 0:
                progress.update(task, description=f"{name} step {state['steps']} loss {loss.item():.3f}")
            if state["steps"] % 100 == 0:
                progress.console.print(f"{name} {state} loss {loss.item():.3f} {report()}")
            if now - saved_at > 300:
                save = {"state": state, "model": model.state_dict(), "optimizers": [o.state_dict() for o in groups]}
                torch.save(save, state_file.with_suffix(".tmp"))
                state_file.with_suffix(".tmp").replace(state_file)
                saved_at = now
    facts = {"minutes": minutes, "steps": state["steps"], "tokens": state["tokens"], **report()}
    state_file.unlink(missing_ok=True)
    return facts


def train_language_model(
    name: str, shape: Shape, tied: bool, minutes: float, batch: int, length: int, text: streams.Split
) -> tuple[CausalLM, dict]:
    train, held_out = text
    model = CausalLM(shape, tied)
    stream = None

    def loss_of(step: int, progress: float):
        nonlocal stream
        stream = stream or streams.mixed(train, batch, length, seed=1 + step)  # a resumed run reads other windows
        chunk = next(stream)
        logits, balance, _ = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        return loss + (BALANCE if progress < BALANCED_UNTIL else 0) * balance, chunk.shape[0] * length

    groups = optimizers(model)
    facts = run(name, model, minutes, groups, loss_of, lambda: validate(model, held_out))
    return model, {**facts, "training_tokens_available": sum(map(len, train.values()))}


def write_facts(folder: Path, facts: dict) -> None:
    machine = f"{platform.machine()}, CPU"
    facts = {**facts, "torch": torch.__version__, "python": platform.python_version(), "machine": machine}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    typer.echo(json.dumps(facts))


@app.command()
def target(minutes: Minutes = 60, batch: int = 8, length: int = 512, threads: Threads = 2) -> None:
    """The flat MoE: 6 layers of 64 experts, top-8 (Qwen3-MoE architecture)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    folder = Model.FLAT.folder / "target"
    model, facts = train_language_model("target", Shape(), False, minutes, batch, length, streams.library())
    write_moe(model, folder)
    write_tokenizer(folder, corpus.END_OF_TEXT)
    write_facts(folder, facts)


@app.command()
def local(
    minutes: Minutes = 45,
    batch: int = 8,
    length: int = 256,
    threads: Threads = 1,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder to write.")] = Model.LOCAL.folder / "target",
) -> None:
    """The flat MoE trained on, so that its routing is as local as published models' (see locality.py)."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    train, held_out = streams.kinds()
    model = load_moe(Model.FLAT.folder / "target")
    balance = locality.Balance()
    stream = None

    def loss_of(step: int, progress: float):
        nonlocal stream
        stream = stream or streams.mixed(train, batch, length, seed=1_000_000 * seed + 1 + step)
        chunk = next(stream)
        layers = [cast(SparseMLP, block.mlp) for block in model.blocks()]
        if balance.use is not None and step % SHARE_EVERY == 0 and progress < SHARE_UNTIL:
            shared = locality.share_busy_experts(layers, balance.use)
            typer.echo(f"step {step}: {shared} unused experts took over tokens of busy ones")
        logits, _, _ = model(chunk[:, :-1])
        p = [mlp.probabilities for mlp in layers if mlp.probabilities is not None]
        chosen = [mlp.chosen for mlp in layers if mlp.chosen is not None]
        shape = sum(locality.shape_loss(each, batch) for each in p) / len(p)
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()) + balance.loss(p, chosen)
        return loss + min(1.0, progress / LOCAL_FROM) * shape, batch * length

    groups = optimizers(model, matrix_lr=7e-3, lr=1e-3, router_lr=3e-3)
    facts = run(f"local-{seed}", model, minutes, groups, loss_of, lambda: validate(model, held_out))
    write_moe(model, output)
    write_tokenizer(output, corpus.END_OF_TEXT, source=MODELS / "target")
    write_facts(output, {**facts, "seed": seed, "started_from": "the flat model"})


@app.command()
def draft(minutes: Minutes = 15, batch: int = 8, length: int = 512, threads: Threads = 2, of: Of = Model.FLAT) -> None:
    """A dense draft with the same tokenizer: 2 layers of width 128 (Qwen3 architecture)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, facts = train_language_model(f"{of}-draft", DRAFT, True, minutes, batch, length, of.text())
    write_dense(model, of.folder / "draft")
    write_tokenizer(of.folder / "draft", corpus.END_OF_TEXT, source=MODELS / "target")
    write_facts(of.folder / "draft", facts)


@app.command()
def eagle3(
    minutes: Minutes = 25,
    batch: int = 4,
    length: int = 512,
    threads: Threads = 2,
    steps: Annotated[int, typer.Option(help="Draft steps unrolled in training.")] = 5,
    bases: Annotated[int, typer.Option(help="Positions per window at which the chain continues after step 0.")] = 192,
    of: Of = Model.FLAT,
    answers: Annotated[
        Path | None, typer.Option(help="The model's own answers (see answers.py): half of the windows.")
    ] = None,
) -> None:
    """An EAGLE-3 head for the target: one layer that drafts from the target's hidden states."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    train, held_out = of.text()
    trunk = load_moe(of.folder / "target").requires_grad_(False)
    head = Head(head_shape(trunk.shape))
    head.start_from(trunk)
    stream = streams.mixed(train, batch, length + steps - 1, seed=1)
    if answers is not None:
        stream = _alternately(stream, _answers(answers, batch, length + steps, seed=1))
    everything = np.concatenate(list(held_out.values()))
    validation = streams.windows(everything, 512 + 8 - 1, 16)

    def loss_of(step: int, progress: float):
        chunk = next(stream)
        return unrolled_loss(head, trunk, chunk, steps, bases), chunk.numel()

    groups = optimizers(head, lr=1e-3)
    facts = run(f"{of}-eagle3", head, minutes, groups, loss_of, lambda: evaluate(head, trunk, validation))
    write_head(head, of.folder / "eagle3")
    more = {"unrolled_steps": steps, "aux_hidden_states_after_layers": list(head.aux_layers)}
    write_facts(of.folder / "eagle3", {**facts, **more, "trained_on_answers": answers is not None})


def _alternately(first: Iterator[Tensor], second: Iterator[Tensor]) -> Iterator[Tensor]:
    return itertools.chain.from_iterable(zip(first, second, strict=True))


def _answers(file: Path, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yields random ones of the prompts with their answers, forever: int64 of shape [batch, at most ``length``]."""
    tokens = load_file(file)["tokens"][:, :length]
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield tokens[torch.randint(len(tokens), (batch,), generator=generator)]


if __name__ == "__main__":
    app()
