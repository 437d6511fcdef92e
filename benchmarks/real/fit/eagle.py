"""Trains an EAGLE-3 head on the carved model, in the form that stock vLLM runs (``LlamaForCausalLMEagle3``).

At position t the head reads the target's residual stream of t at three depths (each normed: a few entries of a stream
are a thousand times the others) and the embedding of token t+1, and predicts token t+2. Its own stream then replaces
the target's at t+1, and so on. Training unrolls that chain ("training-time test" of the EAGLE-3 paper): the keys of
step 0, which come from the target's streams, are causal; step j also attends to the keys of its own steps 1 to j.

The head learns what the target itself goes on to say, greedily or sampled (``rolls.py``): at that it has to be good.
Its goal is the target's distribution over the tokens that it drafts. What it has learned is a running mean of its
weights, so that training can end, and go on, at any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from llama import COMPUTE, FFN, Llama, normed, rotated
from rolls import LENGTH, Rolls
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

DEPTHS = (10, 20, 30)  # the streams before these layers; 30 is the one after the last
STEPS = 7  # of a chain while it learns
DRAFTS = 4  # of a chain that is judged
DECAY = 0.8  # weight of step j in the loss: later steps matter only if the earlier ones were right
BASES = 64  # positions of a window whose chains go on after step 0
RANK = 64  # of what the head adds to the target's output rows
ROWS = 0.1  # the rate of these, as a part of that of all others
HIDDEN = 1.0  # weight of the relative error of the last streams, where training begins
HIDDEN_TOKENS = 300_000  # after which it has fallen to nothing
WARM_UP = 50  # steps to the full rate
MEAN = 0.999  # of the weights' running mean, a step


@torch.inference_mode()
def streams_of(model: Llama, ids: Tensor, ffn: FFN) -> Tensor:
    """The target's streams at ``DEPTHS`` of a text [tokens]: [1, tokens, depths, hidden]."""
    rotations, x = model.rotations(len(ids)), F.embedding(ids[None], model.embedding)
    found = {}
    for number in range(model.shape.layers):
        found[number] = x
        x = model.attended(number, x, rotations)
        x = x + ffn(number, model.ffn_input(number, x))
    found[model.shape.layers] = x
    return torch.stack([found[depth] for depth in DEPTHS], 2)


class Head(nn.Module):
    """The head. Embeddings are the target's, and so are its output rows, but for a difference of a low rank.

    Args:
        neurons: of its FFN.
        vocabulary: tokens that it drafts, int64 [drafted]; None: all.
        rank: of what it adds to the target's output rows; 0: nothing.
    """

    def __init__(self, model: Llama, neurons: int, vocabulary: Tensor | None = None, rank: int = 0) -> None:
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
        if rank:
            self.rows_left = nn.Parameter(torch.zeros(len(self.vocabulary), rank))
            self.rows_right = linear(hidden, rank)
        self._rotations = model.rotations(LENGTH)

    @classmethod
    def of(cls, model: Llama, weights: dict[str, Tensor], vocabulary: Tensor | None = None) -> Head:
        """The head with these weights."""
        rank = weights["rows_right"].shape[0] if "rows_right" in weights else 0
        head = cls(model, len(weights["gate"]), vocabulary, rank)
        head.load_state_dict(weights)
        return head

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
        final = self.finals(x)
        logits = F.linear(final, self._output)
        if hasattr(self, "rows_right"):
            logits = logits + F.linear(F.linear(final, self.rows_right.to(COMPUTE)), self.rows_left.to(COMPUTE))
        return logits.float()

    def goals(self, finals: Tensor) -> Tensor:
        """The target's logits of the tokens that are drafted, float32 [..., drafted], of its normed last streams."""
        return F.linear(finals, self._output).float()

    def unrolled(self, embedded: Tensor, streams: Tensor, bases: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (positions [n] that the chain starts from, residual stream [batch, n, hidden]) for each step.

        Step 0 runs at all positions, later ones at ``bases`` [n], of which each has ``steps - 1`` positions behind it.

        Args:
            embedded: of the token after each position, [batch, positions, hidden].
            streams: of at least as many positions, [batch, more, depths, hidden].
        """
        every = torch.arange(embedded.shape[1])
        x = self.combined(streams[:, : len(every)])
        q, base_k, base_v = self.projected(embedded, x, every)
        x = self.finished(x, F.scaled_dot_product_attention(q, base_k, base_v, is_causal=True))
        yield every, x
        x, chain = x[:, bases], []
        future = every > bases[:, None]
        for step in range(1, steps):
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


@dataclass
class Learned:
    """How far training is: what a later run goes on from.

    Attributes:
        windows: that were learned from, each pass counted.
        tokens: of these, without their prompts.
        curve: (tokens, tokens a step on held prompts), by time.
    """

    windows: int
    tokens: int
    curve: list[tuple[int, float]]


class Trainer:
    """Trains a head, ``batch`` windows of ``rolls`` at a time.

    Args:
        ffn: of the target.
        rate: learning rate, after a warm-up.
    """

    def __init__(self, head: Head, model: Llama, ffn: FFN, rolls: Rolls, rate: float, batch: int) -> None:
        self.head, self.learned = head, Learned(0, 0, [])
        self._model, self._ffn, self._rolls, self._rate, self._batch = model, ffn, rolls, rate, batch
        named = dict(head.named_parameters())
        rows = [named.pop(name) for name in ("rows_left", "rows_right") if name in named]
        groups = [{"params": [*named.values()], "share": 1.0}, {"params": rows, "share": ROWS}]
        self._optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), weight_decay=0.05)
        self._mean = {name: weight.detach().clone() for name, weight in head.named_parameters()}
        self._drafted = torch.zeros(len(model.embedding), dtype=torch.bool)
        self._drafted[head.vocabulary] = True

    @property
    def steps(self) -> int:
        return self.learned.windows // self._batch

    def mean(self) -> dict[str, Tensor]:
        """The running mean of the weights, by name, float32."""
        return self._mean

    def step(self) -> tuple[float, list[float]]:
        """Learns from the next windows.

        Returns:
            the loss, and how often each step of a chain agrees with the target's choice.
        """
        self._optimiser.zero_grad()
        losses, agreed, parts = 0.0, torch.zeros(STEPS), torch.zeros(STEPS)
        for number in range(self.learned.windows, self.learned.windows + self._batch):
            turn, place = divmod(number, len(self._rolls))
            order = torch.randperm(len(self._rolls), generator=torch.Generator().manual_seed(turn))
            ids, begun = self._rolls.window(int(order[place]))
            generator = torch.Generator().manual_seed(number)
            loss, same = self._loss(ids, begun, generator)
            (loss / self._batch).backward()
            losses += float(loss.detach()) / self._batch
            known = ~same.isnan()
            agreed[known] += same[known]
            parts += known
            self.learned.tokens += len(ids) - begun
        self.learned.windows += self._batch
        for group in self._optimiser.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
            group["lr"] = self._rate * group["share"] * min(1, self.steps / WARM_UP)
        self._optimiser.step()
        keep = min(MEAN, self.steps / (self.steps + 10))
        for name, weight in self.head.named_parameters():
            self._mean[name].lerp_(weight.detach(), 1 - keep)
        return losses, (agreed / parts).tolist()

    def _loss(self, ids: Tensor, begun: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Of one window [tokens]; and how often each step agrees [STEPS], NaN where it drafted nothing."""
        head, model = self.head, self._model
        streams = streams_of(model, ids, self._ffn)
        finals = normed(streams[:, 1:, -1], model.norm, model.shape.epsilon)  # of position t + 1 at index t
        size = finals.float().pow(2).mean()
        last = len(ids) - 2  # positions from which a known token is drafted
        first = max(0, begun - 1)
        bases = first + torch.randperm(max(0, last - first - STEPS + 1), generator=generator)[:BASES].sort().values
        loss, weights, agreed = torch.zeros(()), 0.0, torch.full((STEPS,), torch.nan)
        embedded = F.embedding(ids[None, 1:], model.embedding)
        near = HIDDEN * max(0.0, 1 - self.learned.tokens / HIDDEN_TOKENS)
        for number, (starts, x) in enumerate(head.unrolled(embedded, streams, bases, STEPS)):
            rows = starts + number
            # Where the target says a token that is never drafted, the chain ends whatever is drafted.
            kept = (rows >= first) & (rows < last) & self._drafted[ids[(rows + 2).clamp_max(len(ids) - 1)]]
            if not kept.any():
                continue
            x, rows = x[:, kept], rows[kept]
            goal = head.goals(finals[:, rows])
            got = head.logits(x).log_softmax(-1)
            apart = F.kl_div(got, goal.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
            if near:
                apart = apart + near * (head.finals(x).float() - finals[:, rows].float()).pow(2).mean() / size
            loss = loss + DECAY**number * apart
            weights += DECAY**number
            agreed[number] = (goal.argmax(-1) == got.argmax(-1)).float().mean()
        return loss / max(weights, 1e-9), agreed

    def save(self, path: Path) -> None:
        """Writes all that ``resume`` needs."""
        tensors = {}
        for name, weight in self.head.named_parameters():
            moments = self._optimiser.state.get(weight, {})
            parts = {"weight": weight.detach(), "mean": self._mean[name]}
            parts |= {part: moments[part] for part in ("exp_avg", "exp_avg_sq") if part in moments}
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        scratch = path.with_name(f"{path.name}.part")
        save_file(tensors, scratch, {"learned": json.dumps(self.learned.__dict__)})
        scratch.replace(path)

    def resume(self, path: Path) -> None:
        """Goes on from what ``save`` wrote."""
        with safe_open(path, "pt") as file, torch.no_grad():
            self.learned = Learned(**json.loads(file.metadata()["learned"]))
            names = set(file.keys())
            for name, weight in self.head.named_parameters():
                weight.copy_(file.get_tensor(f"{name}.weight"))
                self._mean[name].copy_(file.get_tensor(f"{name}.mean"))
                if f"{name}.exp_avg" in names:
                    state: dict[str, Any] = {"step": torch.tensor(float(self.steps))}
                    state |= {part: file.get_tensor(f"{name}.{part}") for part in ("exp_avg", "exp_avg_sq")}
                    self._optimiser.state[weight] = state


@torch.inference_mode()
def tokens_a_step(head: Head, model: Llama, ffn: FFN, rolls: Rolls) -> list[float]:
    """Tokens a step as an engine counts them that drafts ``DRAFTS``, in each window of ``rolls``, which are greedy."""
    found = []
    for number in range(len(rolls)):
        ids, begun = rolls.window(number)
        bases = torch.arange(begun - 1, len(ids) - 1 - DRAFTS)
        streams, embedded = streams_of(model, ids, ffn), F.embedding(ids[None, 1:], model.embedding)
        right = torch.ones(len(bases), dtype=torch.long)
        accepted = torch.zeros_like(right)
        for step, (_, x) in enumerate(head.unrolled(embedded, streams, bases, DRAFTS)):
            drafts = head.vocabulary[head.logits(x if step else x[:, bases])[0].argmax(-1)]
            right = right * (drafts == ids[bases + step + 2])
            accepted += right
        if len(bases):
            found.append(passed(accepted[None]))
    return found


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
