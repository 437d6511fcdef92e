"""An EAGLE-3 head for the carved model, in the form that stock vLLM runs (``LlamaForCausalLMEagle3``).

At position t it reads the target's residual streams of t at three depths, each normed (a few entries of a stream are a
thousand times the others), and the embedding of token t+1, and predicts token t+2. Its own stream then replaces the
target's at t+1, and so on. ``unrolled`` runs such chains from many positions at once, as training does ("training-time
test" of the EAGLE-3 paper): the keys of step 0, which come from the target's streams, are causal; step j also attends
to the keys of its own steps 1 to j.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real.fit.llama import COMPUTE, FFN, Llama, normed, rotated
from benchmarks.real.fit.rolls import LENGTH, Rolls

DRAFTS = 4  # of a chain that is judged
DEPTHS = (10, 20, 30)  # the streams before these layers; 30 is the one after the last
RANK = 64  # of what the head adds to the target's output rows


class Eagle(nn.Module):
    """The head. Embeddings are the target's, and so are the output rows, but for a difference of a low rank.

    Args:
        neurons: of its FFN.
        vocabulary: tokens that it drafts, int64 [drafted]; None: all.
        rank: of what it adds to the target's output rows; 0: nothing.
        seed: of its first weights.
    """

    def __init__(
        self, model: Llama, neurons: int, vocabulary: Tensor | None = None, rank: int = 0, seed: int = 0
    ) -> None:
        super().__init__()
        self.shape = shape = model.shape
        hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
        self.vocabulary = torch.arange(len(model.embedding)) if vocabulary is None else vocabulary
        self._output = model.embedding if vocabulary is None else model.embedding[vocabulary]
        self._generator = torch.Generator().manual_seed(seed)
        self._rotations = model.rotations(LENGTH)
        self.norm = nn.Parameter(model.norm.float().clone())
        if rank:
            self.rows_left = nn.Parameter(torch.zeros(len(self.vocabulary), rank))
            self.rows_right = self.linear(hidden, rank)
        self.fc = self.linear(len(DEPTHS) * hidden, hidden, 0.3)
        with torch.no_grad():
            self.fc[:, -hidden:] += 0.3 * torch.eye(hidden)
        self.qkv = self.linear(2 * hidden, queries + 2 * keys)
        self.o = self.linear(queries, hidden, 0.5)
        self.gate, self.up = self.linear(hidden, neurons), self.linear(hidden, neurons)
        self.down = self.linear(neurons, hidden, 0.5)
        self.fc_norms = nn.Parameter(torch.ones(len(DEPTHS), hidden))
        self.embedding_norm, self.hidden_norm, self.ffn_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(3))

    @classmethod
    def of(cls, model: Llama, weights: dict[str, Tensor], vocabulary: Tensor | None = None) -> Eagle:
        """The head with these weights."""
        rank = weights["rows_right"].shape[0] if "rows_right" in weights else 0
        head = cls(model, len(weights["gate"]), vocabulary, rank)
        head.load_state_dict(weights)
        return head

    def linear(self, inputs: int, outputs: int, gain: float = 1.0) -> nn.Parameter:
        """A matrix [outputs, inputs] that keeps lengths, times ``gain``."""
        return nn.Parameter(torch.randn(outputs, inputs, generator=self._generator) * gain / math.sqrt(inputs))

    @property
    def depths(self) -> tuple[int, ...]:
        """The streams that it reads: those before these layers; the number of layers is the one after the last."""
        return DEPTHS

    def read(self, streams: Tensor) -> Tensor:
        """What the first step goes on from [batch, tokens, hidden], of streams [batch, tokens, depths, hidden]."""
        return F.linear(self.normed(streams, self.fc_norms).flatten(-2), self.fc.to(COMPUTE))

    def entered(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream and what the attention projects, of the embedding and of what the step before left."""
        parts = self.normed(embedded, self.embedding_norm), self.normed(before, self.hidden_norm)
        return before, torch.cat(parts, -1)

    def ffn(self, x: Tensor) -> Tensor:
        """What the FFN adds to the residual stream x."""
        h = self.normed(x, self.ffn_norm)
        active = F.silu(F.linear(h, self.gate.to(COMPUTE))) * F.linear(h, self.up.to(COMPUTE))
        return F.linear(active, self.down.to(COMPUTE))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return normed(x, weight.to(COMPUTE), self.shape.epsilon)

    def begun(self, embedded: Tensor, before: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The residual stream, and q, k and v [batch, heads, rows, head] at positions ``rows`` [rows]."""
        shape = self.shape
        x, h = self.entered(embedded, before)
        heads = F.linear(h, self.qkv.to(COMPUTE)).unflatten(-1, (-1, shape.head)).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        cos, sin = (table[rows] for table in self._rotations)
        groups = shape.heads // shape.kv_heads
        k, v = (part.repeat_interleave(groups, 1) for part in (rotated(k, cos, sin), v))
        return x, rotated(q, cos, sin), k, v

    def finished(self, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after the layer, of x [batch, rows, hidden] and what was attended.

        Args:
            mixed: [batch, heads, rows, head].
        """
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.o.to(COMPUTE))
        return x + self.ffn(x)

    def finals(self, x: Tensor) -> Tensor:
        """What output rows are multiplied with."""
        return self.normed(x, self.norm)

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
        x, q, base_k, base_v = self.begun(embedded, self.read(streams[:, : len(every)]), every)
        x = self.finished(x, F.scaled_dot_product_attention(q, base_k, base_v, is_causal=True))
        yield every, x
        x, chain = x[:, bases], []
        future = every > bases[:, None]
        for step in range(1, steps):
            rows = bases + step
            x, q, k, v = self.begun(embedded[:, rows], x, rows)
            chain.append((k, v))
            x = self.finished(x, attended(q, base_k, base_v, chain, future))
            yield bases, x


def widened(weights: dict[str, Tensor], neurons: int, seed: int = 0) -> dict[str, Tensor]:
    """The weights of a head whose FFN has ``neurons``; the new ones are drawn, and add nothing yet."""
    more, generator = neurons - len(weights["gate"]), torch.Generator().manual_seed(seed)
    if more < 0:
        raise ValueError(f"the head has {len(weights['gate'])} neurons already, more than {neurons}")

    def drawn(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows.std() * torch.randn(more, rows.shape[1], generator=generator)])

    gate, up, down = (weights[name].float() for name in ("gate", "up", "down"))
    return weights | {"gate": drawn(gate), "up": drawn(up), "down": F.pad(down, (0, more))}


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


@torch.inference_mode()
def streams_of(model: Llama, ids: Tensor, ffn: FFN, depths: tuple[int, ...]) -> Tensor:
    """The target's streams at ``depths`` of a text [tokens]: [1, tokens, depths, hidden]."""
    found = list(model.streams(ids[None], ffn))
    return torch.stack([found[depth] for depth in depths], 2)


@torch.inference_mode()
def engine_counters(head: Eagle, model: Llama, ffn: FFN, rolls: Rolls) -> list[dict[str, int]]:
    """What an engine counts that drafts ``DRAFTS``, of each window of ``rolls``, which are greedy.

    Returns:
        "drafts": steps with drafts; "accepted_tokens", as ``benchmarks.toy.accept`` makes tokens a step of.
    """
    found = []
    for number in range(len(rolls)):
        ids, begun = rolls.window(number)
        bases = torch.arange(begun - 1, len(ids) - 1 - DRAFTS)
        if not len(bases):
            continue
        streams, embedded = streams_of(model, ids, ffn, head.depths), F.embedding(ids[None, 1:], model.embedding)
        right = torch.ones(len(bases), dtype=torch.long)
        accepted = torch.zeros_like(right)
        for step, (_, x) in enumerate(head.unrolled(embedded, streams, bases, DRAFTS)):
            drafts = head.vocabulary[head.logits(x if step else x[:, bases])[0].argmax(-1)]
            right = right * (drafts == ids[bases + step + 2])
            accepted += right
        passed = steps_through(accepted.tolist())
        found.append({"drafts": len(passed), "accepted_tokens": sum(passed)})
    return found


def steps_through(accepted: Sequence[int]) -> list[int]:
    """The drafts that each step accepts, of how many behind each place of a text are right.

    An easy stretch is passed in few steps, so a mean over places would be too good.
    """
    found, place = [], 0
    while place < len(accepted):
        found.append(accepted[place])
        place += 1 + accepted[place]
    return found
