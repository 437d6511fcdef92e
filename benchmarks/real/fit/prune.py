"""Trains a draft model of some of the parent's layers: its next-token distribution is to be the carved model's.

All weights of the layers that stay are free, and the streams that they start from are matched as well as the last one.
What it reaches in an hour is a bound for what a correction of few bytes could.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from carve import CarvedLayer
from chains import Text, drafted
from eagle import RANDOM, STEPS, Rollouts, descended, passed
from export import write_checkpoint
from llama import COMPUTE, Layer, Llama, normed
from torch import Tensor

BETWEEN = 1.0  # weight of the relative error of streams, at first: it falls to nothing
LAST = 1.0  # weight of the relative error of what output rows are multiplied with

Report = Callable[[int, float, float], None]
"""Told the step, its loss, and how often the first choice is the target's so far."""


class Pruned:
    """The draft model: float32 weights that learn, and a ``Llama`` of them as they are now."""

    def __init__(self, parent: Llama, kept: Sequence[int]) -> None:
        self.kept = tuple(kept)
        self._parent = parent
        self._layers = [[part.float().clone().requires_grad_() for part in astuple(parent.layers[i])] for i in kept]
        self._norm = parent.norm.float().clone().requires_grad_()

    @property
    def parameters(self) -> list[Tensor]:
        return [self._norm, *(part for layer in self._layers for part in layer)]

    def model(self) -> Llama:
        """Its embeddings are the parent's."""
        model = copy.copy(self._parent)
        model.shape = replace(self._parent.shape, layers=len(self.kept))
        model.layers = [Layer(*(part.to(COMPUTE) for part in layer)) for layer in self._layers]
        model.norm = self._norm.to(COMPUTE)
        return model


def write(model: Llama, dense: Path, folder: Path) -> None:
    """A checkpoint of the draft model for vLLM's ``LlamaForCausalLM``."""
    shape = model.shape
    keys = shape.head * shape.kv_heads
    new = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    for number, layer in enumerate(model.layers):
        prefix = f"model.layers.{number}."
        for part, weight in zip("qkv", layer.qkv.split([shape.hidden, keys, keys]), strict=True):
            new[f"{prefix}self_attn.{part}_proj.weight"] = weight
        new[f"{prefix}self_attn.o_proj.weight"] = layer.o
        new |= {f"{prefix}mlp.{part}_proj.weight": getattr(layer, part) for part in ("gate", "up", "down")}
        new[f"{prefix}input_layernorm.weight"] = layer.attention_norm
        new[f"{prefix}post_attention_layernorm.weight"] = layer.ffn_norm
    tensors = {name: weight.to(torch.bfloat16).contiguous() for name, weight in new.items()}
    write_checkpoint(tensors, dense, {"num_hidden_layers": shape.layers}, folder)


@torch.no_grad()
def streams(model: Llama, layers: list[CarvedLayer], ids: Tensor, kept: Sequence[int]) -> list[Tensor]:
    """The target's residual stream [batch, tokens, hidden] before each of the layers, and after the last of all."""
    rotations, x, found = model.rotations(ids.shape[1]), F.embedding(ids, model.embedding), []
    for number, layer in enumerate(layers):
        if number in kept:
            found.append(x)
        x = model.attended(number, x, rotations)
        x = x + layer(model.ffn_input(number, x).flatten(0, 1)).view(x.shape)
    return [*found, x]


def apart(got: Tensor, goal: Tensor) -> Tensor:
    """The squared error over the goal's square."""
    return (got.float() - goal.float()).pow(2).mean() / goal.float().pow(2).mean()


def trained(
    trainee: Pruned,
    parent: Llama,
    layers: list[CarvedLayer],
    ids: Tensor,
    common: Tensor,
    seconds: float,
    rate: float,
    batch: int,
    report: Report,
) -> None:
    """Learns for a time on windows int64 [count, length]; each is read once.

    The softmax of a step is over the ``common`` tokens, int64 [common], those of the batch, and as many other tokens.
    """
    shape = parent.shape
    optimiser = torch.optim.AdamW(trainee.parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    begun, mean, generator = time.monotonic(), 0.0, torch.Generator().manual_seed(3)
    for step, rows in enumerate(ids.split(batch)):
        done = (time.monotonic() - begun) / seconds
        if done >= 1:
            break
        others = torch.randint(0, len(parent.embedding), (RANDOM,), generator=generator)
        output = parent.embedding[torch.cat([common, rows.flatten(), others]).unique()]
        *goals, last = streams(parent, layers, rows, trainee.kept)
        model = trainee.model()
        rotations, x = model.rotations(rows.shape[1]), F.embedding(rows, model.embedding)
        between = torch.zeros(())
        for number, (goal, kept) in enumerate(zip(goals, trainee.kept, strict=True)):
            norm = parent.layers[kept].attention_norm
            between = between + apart(normed(x, norm, shape.epsilon), normed(goal, norm, shape.epsilon))
            x = model.attended(number, x, rotations)
            x = x + model.ffn(number, model.ffn_input(number, x))
        final, aim = normed(x, model.norm, shape.epsilon), normed(last, parent.norm, shape.epsilon)
        with torch.no_grad():
            right = F.linear(aim, output).float().softmax(-1)
        got = F.linear(final, output).float()
        entropy = -(right * got.log_softmax(-1)).sum(-1).mean()
        loss = entropy + LAST * apart(final, aim) + BETWEEN * (1 - done) * between / len(goals)
        descended(optimiser, loss, rate, step, done)
        same = float((right.argmax(-1) == got.argmax(-1)).float().mean())
        mean = 0.98 * mean + 0.02 * same if step else same
        report(step, float(loss.detach()), mean)


@torch.inference_mode()
def tokens_a_step(model: Llama, rollouts: Rollouts) -> float:
    """As an engine counts them that drafts STEPS tokens, on what the target said greedily."""
    places = torch.arange(rollouts.begun - 1, rollouts.ids.shape[1] - 1 - STEPS)
    found = []
    for ids in rollouts.ids:
        text = Text.read(model, ids[None], model.ffn)
        drafts, _ = drafted(model, model.ffn, text, ids[places + 1], places, STEPS)
        said = torch.stack([ids[places + 2 + step] for step in range(STEPS)], 1)
        found.append((drafts == said).long().cumprod(1).sum(1))
    return passed(torch.stack(found))
