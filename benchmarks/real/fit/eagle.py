"""Trains an EAGLE-3 head on the carved model, in the form that stock vLLM runs (``LlamaForCausalLMEagle3``).

At position t the head reads the target's residual stream of t at three depths (each normed: a few entries of a stream
are a thousand times the others) and the embedding of token t+1, and predicts token t+2. Its own stream then replaces
the target's at t+1, and so on. Training unrolls that chain ("training-time test" of the EAGLE-3 paper): the keys of
step 0, which come from the target's streams, are causal; step j also attends to the keys of its own steps 1 to j.

The head learns on what the target itself goes on to say, greedily or sampled: at that it has to be good.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from carve import CarvedLayer
from llama import COMPUTE, Llama, normed, rotated
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

DEPTHS = (10, 20, 30)  # the streams before these layers; 30 is the one after the last
STEPS = 4
DECAY = 0.8  # weight of step j in the loss: later steps matter only if the earlier ones were right
PROMPT = 48  # tokens
ROLL = 224  # tokens, with the prompt
TEMPERATURE = 0.7  # of the rows that are sampled
COMMON = 8192  # tokens that are in every softmax
RANDOM = 2048
HIDDEN = 1.0  # weight of the relative error of the last hidden states
BASES = 48  # positions of a window whose chains go on after step 0


@dataclass(frozen=True)
class Rollouts:
    """What the target said, and its streams."""

    ids: Tensor  # int64 [count, length]
    streams: Tensor  # [count, length, depths, hidden]
    greedy: Tensor  # bool [count]
    begun: int
    """Tokens of a prompt; the others are the target's."""


@torch.inference_mode()
def rolled_out(
    model: Llama, layers: list[CarvedLayer], prompts: Tensor, length: int, greedy: Tensor, temperature: float
) -> Rollouts:
    """The target's continuations of prompts int64 [count, prompt] to ``length`` tokens, all at once.

    Rows with ``greedy`` [count] take the likeliest token, others sample. The stream of the last token is not known.
    """
    count, prompt = prompts.shape
    shape = model.shape
    ids = F.pad(prompts, (0, length - prompt))
    keys, values = (
        torch.zeros(shape.layers, count, shape.kv_heads, length, shape.head, dtype=COMPUTE) for _ in range(2)
    )
    streams = torch.zeros(count, length, len(DEPTHS), shape.hidden, dtype=COMPUTE)
    cosines, sines = model.rotations(length)
    generator = torch.Generator().manual_seed(int(prompts.sum()) % 2**31)
    begin = 0
    for end in range(prompt, length):
        rotations = cosines[begin:end], sines[begin:end]
        x = F.embedding(ids[:, begin:end], model.embedding)
        for number, layer in enumerate(layers):
            if number in DEPTHS:
                streams[:, begin:end, DEPTHS.index(number)] = x
            x = _attended_from(model, number, x, rotations, keys[number], values[number], begin)
            x = x + layer(model.ffn_input(number, x))
        streams[:, begin:end, DEPTHS.index(len(layers))] = x
        logits = model.logits(x[:, -1])
        ids[:, end] = logits.argmax(-1)
        likely = (logits[~greedy] / temperature).softmax(-1).cumsum(-1)
        drawn = torch.rand(len(likely), 1, generator=generator) * likely[:, -1:]
        ids[~greedy, end] = torch.searchsorted(likely, drawn)[:, 0].clamp_max(likely.shape[1] - 1)
        begin = end
    return Rollouts(ids, streams, greedy, prompt)


def save(rollouts: Rollouts, path: Path) -> None:
    tensors = {"ids": rollouts.ids.int(), "streams": rollouts.streams, "greedy": rollouts.greedy}
    save_file(tensors, path, {"begun": str(rollouts.begun)})


def load(path: Path) -> Rollouts:
    with safe_open(path, "pt") as file:
        ids, streams, greedy = (file.get_tensor(name) for name in ("ids", "streams", "greedy"))
        return Rollouts(ids.long(), streams.to(COMPUTE), greedy, int(file.metadata()["begun"]))


def joined(parts: list[Rollouts]) -> Rollouts:
    ids, streams, greedy = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "streams", "greedy"))
    return Rollouts(ids, streams, greedy, parts[0].begun)


def _attended_from(
    model: Llama, number: int, x: Tensor, rotations: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, begin: int
) -> Tensor:
    """``Llama.attended`` for tokens from ``begin`` on; fills the cache [count, heads, length, head]."""
    shape, layer = model.shape, model.layers[number]
    batch, tokens, _ = x.shape
    end = begin + tokens
    qkv = F.linear(normed(x, layer.attention_norm, shape.epsilon), layer.qkv)
    heads = qkv.view(batch, tokens, -1, shape.head).transpose(1, 2)
    q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    keys[:, :, begin:end], values[:, :, begin:end] = rotated(k, *rotations), v
    q, k, v = rotated(q, *rotations), keys[:, :, :end], values[:, :, :end]
    if tokens > 1:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:  # the queries of a group as if they were tokens: no copies of the keys
        mixed = F.scaled_dot_product_attention(q.view(batch, shape.kv_heads, -1, shape.head), k, v).view(q.shape)
    return x + F.linear(mixed.transpose(1, 2).reshape(batch, tokens, shape.hidden), layer.o)


class Head(nn.Module):
    """The head. Embeddings and output rows are the target's.

    Args:
        vocabulary: tokens that it drafts, int64 [drafted]; None: all.
    """

    def __init__(self, model: Llama, neurons: int, vocabulary: Tensor | None = None) -> None:
        super().__init__()
        self.vocabulary = torch.arange(len(model.embedding)) if vocabulary is None else vocabulary
        self._output = model.embedding if vocabulary is None else model.embedding[vocabulary]
        shape = model.shape
        self.shape = shape
        hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
        generator = torch.Generator().manual_seed(0)

        def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Parameter:
            return nn.Parameter(torch.randn(outputs, inputs, generator=generator) * gain / math.sqrt(inputs))

        self.fc = linear(len(DEPTHS) * hidden, hidden, 0.3)
        with torch.no_grad():
            self.fc[:, -hidden:] += 0.3 * torch.eye(hidden)
        self.qkv = linear(2 * hidden, queries + 2 * keys)
        self.o = linear(queries, hidden, 0.5)
        self.gate, self.up = linear(hidden, neurons), linear(hidden, neurons)
        self.down = linear(neurons, hidden, 0.5)
        self.fc_norms = nn.Parameter(torch.ones(len(DEPTHS), hidden))
        self.embedding_norm, self.hidden_norm, self.ffn_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(3))
        self.norm = nn.Parameter(model.norm.float().clone())
        self._rotations = model.rotations(512)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return normed(x, weight.to(COMPUTE), self.shape.epsilon)

    def combined(self, streams: Tensor) -> Tensor:
        """streams [batch, tokens, depths, hidden] -> the residual stream that the head starts from."""
        return F.linear(self._normed(streams, self.fc_norms).flatten(-2), self.fc.to(COMPUTE))

    def projected(self, embedded: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch, heads, rows, head] at positions ``rows`` [rows]."""
        shape = self.shape
        joined = torch.cat([self._normed(embedded, self.embedding_norm), self._normed(x, self.hidden_norm)], -1)
        heads = F.linear(joined, self.qkv.to(COMPUTE)).unflatten(-1, (-1, shape.head)).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cos, sin = (table[rows] for table in self._rotations)
        groups = shape.heads // shape.kv_heads
        return (
            rotated(q, cos, sin),
            rotated(k, cos, sin).repeat_interleave(groups, 1),
            v.repeat_interleave(groups, 1),
        )

    def finished(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The next residual stream, of x [batch, rows, hidden] and what was attended [batch, heads, rows, head]."""
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.o.to(COMPUTE))
        h = self._normed(x, self.ffn_norm)
        active = F.silu(F.linear(h, self.gate.to(COMPUTE))) * F.linear(h, self.up.to(COMPUTE))
        return x + F.linear(active, self.down.to(COMPUTE))

    def finals(self, x: Tensor) -> Tensor:
        """What output rows are multiplied with."""
        return self._normed(x, self.norm)

    def logits(self, x: Tensor) -> Tensor:
        """Of each token of the draft vocabulary, float32 [..., drafted]."""
        return F.linear(self.finals(x), self._output).float()

    def unrolled(self, embedded: Tensor, streams: Tensor, bases: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (positions [n] that the chain starts from, residual stream [batch, n, hidden]) for each step.

        embedded [batch, length + STEPS, hidden]: of the token after each position; streams [batch, more, …] are read
        up to ``length``.
        Step 0 runs at all positions, later ones at ``bases`` [n].
        """
        every = torch.arange(embedded.shape[1] - STEPS)
        x = self.combined(streams[:, : len(every)])
        q, base_k, base_v = self.projected(embedded[:, every], x, every)
        x = self.finished(x, F.scaled_dot_product_attention(q, base_k, base_v, is_causal=True))
        yield every, x
        x, chain = x[:, bases], []
        future = every > bases[:, None]
        for step in range(1, STEPS):
            rows = bases + step
            q, k, v = self.projected(embedded[:, rows], x, rows)
            chain.append((k, v))
            x = self.finished(x, attended(q, base_k, base_v, chain, future))
            yield bases, x


def attended(q: Tensor, base_k: Tensor, base_v: Tensor, chain: list[tuple[Tensor, Tensor]], future: Tensor) -> Tensor:
    """The keys of step 0 up to the base, and the chain's own: row i of the chain is visible to row i only."""
    scale = q.shape[-1] ** -0.5
    before = (q @ base_k.mT * scale).masked_fill(future, -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) * scale for k, _ in chain]
    weights = torch.cat([before, *own], -1).softmax(-1)
    length = base_k.shape[2]
    mixed = weights[..., :length] @ base_v
    for i, (_, v) in enumerate(chain):
        mixed = mixed + weights[..., length + i, None] * v
    return mixed


Report = Callable[[int, float, list[float]], None]
"""Told the step, its loss, and how often each step of the chain agrees with the target so far."""


def trained(
    head: Head,
    model: Llama,
    rollouts: Rollouts,
    common: Tensor,
    seconds: float,
    rate: float,
    batch: int,
    report: Report,
) -> None:
    """Trains for a time, in as many passes as there are.

    The softmax of a step is over the ``common`` tokens, int64 [common], what the target prefers in the batch, and as
    many other tokens. The last hidden states are matched too: they say more than tokens where texts are few.
    """
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
    begun, mean = time.monotonic(), [0.0] * STEPS
    generator = torch.Generator().manual_seed(2)
    length = rollouts.ids.shape[1] - 1 - STEPS
    step, order = 0, torch.empty(0, dtype=torch.long)
    while (done := (time.monotonic() - begun) / seconds) < 1:
        if len(order) < batch:
            order = torch.randperm(len(rollouts.ids), generator=generator)
        pick, order = order[:batch], order[batch:]
        bases = torch.randperm(length, generator=generator)[:BASES].sort().values
        streams, ids = rollouts.streams[pick], rollouts.ids[pick]
        others = torch.randint(0, len(model.embedding), (RANDOM,), generator=generator)
        output = model.embedding[torch.cat([common, ids.flatten(), others]).unique()]
        with torch.no_grad():
            finals = normed(streams[:, 1:-1, -1], model.norm, model.shape.epsilon)
            goals = F.linear(finals, output)  # of position t + 1 at index t
        loss, total = torch.zeros(()), 0.0
        for number, (starts, x) in enumerate(head.unrolled(F.embedding(ids[:, 1:], model.embedding), streams, bases)):
            rows, final = starts + number, head.finals(x)
            goal, got = goals[:, rows].float().softmax(-1), F.linear(final, output).float()
            apart = (final.float() - finals[:, rows].float()).pow(2).mean() / finals.float().pow(2).mean()
            entropy = -(goal * got.log_softmax(-1)).sum(-1).mean()
            loss = loss + DECAY**number * (entropy + HIDDEN * apart)
            total += DECAY**number
            same = float((goal.argmax(-1) == got.argmax(-1)).float().mean())
            mean[number] = 0.98 * mean[number] + 0.02 * same if step else same
        descended(optimiser, loss / total, rate, step, done)
        report(step, float(loss.detach()) / total, mean)
        step += 1


def descended(optimiser: torch.optim.Optimizer, loss: Tensor, rate: float, step: int, done: float) -> None:
    """One step down the loss: 50 steps to the full rate, then along a cosine to a twentieth of it at ``done`` = 1."""
    optimiser.zero_grad()
    loss.backward()
    for group in optimiser.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = rate * min(1, (step + 1) / 50) * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * done)))
    optimiser.step()


@torch.inference_mode()
def tokens_a_step(head: Head, model: Llama, rollouts: Rollouts) -> float:
    """As an engine counts them that drafts STEPS tokens, on what the target said greedily."""
    length = rollouts.ids.shape[1] - 1 - STEPS
    bases = torch.arange(rollouts.begun - 1, length)
    found = []
    for ids, streams in zip(rollouts.ids.split(16), rollouts.streams.split(16), strict=True):
        right = torch.ones(len(ids), len(bases), dtype=torch.long)
        accepted = torch.zeros_like(right)
        embedded = F.embedding(ids[:, 1:], model.embedding)
        for number, (_, x) in enumerate(head.unrolled(embedded, streams, bases)):
            drafts = head.vocabulary[head.logits(x if number else x[:, bases]).argmax(-1)]
            right = right * (drafts == ids[:, bases + number + 2])
            accepted += right
        found.append(accepted)
    return passed(torch.cat(found))


def passed(accepted: Tensor) -> float:
    """Tokens a step, where each of a text's places [texts, places] says how many drafts behind it are right.

    An easy stretch is passed in few steps, so a mean over places would be too good.
    """
    steps = tokens = 0
    for row in accepted.tolist():
        place = 0
        while place < len(row):
            steps, tokens, place = steps + 1, tokens + 1 + row[place], place + 1 + row[place]
    return tokens / steps
