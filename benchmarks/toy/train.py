"""Trains the toy model and its drafts from the standard library's text.

    python benchmarks/toy/train.py target  --minutes 60
    python benchmarks/toy/train.py draft   --minutes 15
    python benchmarks/toy/train.py eagle3  --minutes 25

Each command writes a checkpoint that stock vLLM loads, and a ``training.json`` next to it. The learning
rate follows the fraction of the minutes spent, so a slower machine sees fewer tokens, not another schedule.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, cast

import corpus
import numpy as np
import torch
import torch.nn.functional as F
import typer
from eagle import Head, evaluate, head_shape, unrolled_loss, write_head
from export import load_moe, write_dense, write_moe, write_tokenizer
from nets import CausalLM, Shape, SparseMLP
from optim import optimizers, schedule
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

HERE = Path(__file__).parent
MODELS = HERE / "models"
CACHE = HERE.parents[1] / ".cache" / "toy"
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, experts=0, top_k=0, intermediate=384)
BALANCE = 1e-2  # so that no expert dies early ...
BALANCED_UNTIL = 0.75  # ... and no longer: caching needs the skew of the text

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Minutes = Annotated[float, typer.Option(help="Wall-clock minutes to train.")]
Threads = Annotated[int, typer.Option(help="Torch threads.")]


def load_tokens() -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) token ids; the tokenizer is trained at the first call, then kept."""
    path = MODELS / "target" / "tokenizer.json"
    if not path.exists():
        tokenizer = corpus.train_tokenizer([p for p in corpus.files() if not corpus.is_held_out(p)])
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    cache = CACHE / "tokens.npz"
    if not cache.exists():
        train, held_out = corpus.splits(Tokenizer.from_file(str(path)))
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, train=train, held_out=held_out)
    arrays = np.load(cache)
    return arrays["train"], arrays["held_out"]


def batches(tokens: np.ndarray, batch: int, length: int, seed: int):
    """Yields random windows forever: int64 of shape [batch, length + 1]."""
    generator = np.random.default_rng(seed)
    while True:
        starts = generator.integers(0, len(tokens) - length - 1, batch)
        yield torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))


def windows(tokens: np.ndarray, length: int, count: int) -> torch.Tensor:
    """Returns the same ``count`` windows at every call: int64 of shape [count, length + 1]."""
    starts = np.linspace(0, len(tokens) - length - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]))


@torch.no_grad()
def validate(model: CausalLM, held_out: np.ndarray, length: int = 512, count: int = 32) -> dict:
    """Returns the loss in nats per token and, if sparse, the share of routes to the busier half of the experts."""
    losses, counts = [], None
    for chunk in windows(held_out, length, count).split(8):
        logits, _, _ = model(chunk[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()).item())
        if model.shape.experts:
            chosen = [cast(SparseMLP, block.mlp).chosen for block in model.blocks()]
            now = torch.stack(
                [torch.bincount(ids.flatten(), minlength=model.shape.experts) for ids in chosen if ids is not None]
            )
            counts = now if counts is None else counts + now
    result: dict[str, Any] = {"validation_loss": round(sum(losses) / len(losses), 4)}
    if counts is not None:
        share = counts.sort(-1, descending=True).values.float()
        share = share[:, : model.shape.experts // 2].sum(-1) / share.sum(-1)
        result["mass_of_top_half"] = [round(v, 3) for v in share.tolist()]
    return result


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
    return {"minutes": minutes, "steps": state["steps"], "tokens": state["tokens"], **report()}


def train_language_model(
    name: str, shape: Shape, tied: bool, minutes: float, batch: int, length: int
) -> tuple[CausalLM, dict]:
    train, held_out = load_tokens()
    model = CausalLM(shape, tied)
    stream = None

    def loss_of(step: int, progress: float):
        nonlocal stream
        stream = stream or batches(train, batch, length, seed=1 + step)  # a resumed run reads other windows
        chunk = next(stream)
        logits, balance, _ = model(chunk[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten())
        return loss + (BALANCE if progress < BALANCED_UNTIL else 0) * balance, chunk.shape[0] * length

    groups = optimizers(model)
    facts = run(name, model, minutes, groups, loss_of, lambda: validate(model, held_out))
    return model, {**facts, "training_tokens_available": len(train)}


def write_facts(folder: Path, facts: dict) -> None:
    import platform

    machine = f"{platform.machine()}, CPU"
    facts = {**facts, "torch": torch.__version__, "python": platform.python_version(), "machine": machine}
    (folder / "training.json").write_text(json.dumps(facts, indent=1) + "\n")
    typer.echo(json.dumps(facts))


@app.command()
def target(minutes: Minutes = 60, batch: int = 8, length: int = 512, threads: Threads = 2) -> None:
    """The MoE itself: 6 layers of 64 experts, top-8 (Qwen3-MoE architecture)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, facts = train_language_model("target", Shape(), False, minutes, batch, length)
    torch.save(model.state_dict(), CACHE / "target-final.pt")
    write_moe(model, MODELS / "target")
    write_tokenizer(MODELS / "target", corpus.END_OF_TEXT)
    write_facts(MODELS / "target", facts)


@app.command()
def draft(minutes: Minutes = 15, batch: int = 8, length: int = 512, threads: Threads = 2) -> None:
    """A dense draft with the same tokenizer: 2 layers of width 128 (Qwen3 architecture)."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, facts = train_language_model("draft", DRAFT, True, minutes, batch, length)
    write_dense(model, MODELS / "draft")
    write_tokenizer(MODELS / "draft", corpus.END_OF_TEXT, source=MODELS / "target")
    write_facts(MODELS / "draft", facts)


@app.command()
def eagle3(
    minutes: Minutes = 25,
    batch: int = 4,
    length: int = 512,
    threads: Threads = 2,
    steps: Annotated[int, typer.Option(help="Draft steps unrolled in training.")] = 5,
    bases: Annotated[int, typer.Option(help="Positions per window at which the chain continues after step 0.")] = 192,
    source: Annotated[Path, typer.Option(help="The trained target's folder.")] = MODELS / "target",
    output: Annotated[Path, typer.Option(help="Folder to write.")] = MODELS / "eagle3",
) -> None:
    """An EAGLE-3 head for the target: one layer that drafts from the target's hidden states."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    train, held_out = load_tokens()
    trunk = load_moe(source).requires_grad_(False)
    head = Head(head_shape(trunk.shape))
    head.start_from(trunk)
    stream = batches(train, batch, length + steps - 1, seed=1)
    validation = windows(held_out, 512 + 8 - 1, 16)

    def loss_of(step: int, progress: float):
        return unrolled_loss(head, trunk, next(stream), steps, bases), batch * length

    groups = optimizers(head, lr=1e-3)
    facts = run("eagle3", head, minutes, groups, loss_of, lambda: evaluate(head, trunk, validation))
    write_head(head, output)
    write_facts(output, {**facts, "unrolled_steps": steps, "aux_hidden_states_after_layers": list(head.aux_layers)})


if __name__ == "__main__":
    app()
