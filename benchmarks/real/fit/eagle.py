"""The EAGLE-3 head in torch, as stock vLLM runs it (``LlamaForCausalLMEagle3``), and what the target says greedily.

At position t the head reads the target's residual stream of t at three depths (each normed: a few entries of a stream
are a thousand times the others) and the embedding of token t+1, and predicts token t+2. Its own stream then replaces
the target's at t+1, and so on.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from carve import CarvedLayer
from llama import BF16, Llama, normed, rotated
from torch import Tensor, nn

DEPTHS = (10, 20, 30)  # the streams before these layers; 30 is the one after the last
PROMPT = 48  # tokens


@torch.inference_mode()
def continued(model: Llama, layers: list[CarvedLayer], prompt: Tensor, length: int) -> Tensor:
    """A prompt int64 [1, prompt], and what the target greedily says after it: int64 [1, length]."""
    shape = model.shape
    ids = F.pad(prompt, (0, length - prompt.shape[1]))
    keys, values = (torch.zeros(shape.layers, 1, shape.kv_heads, length, shape.head, dtype=BF16) for _ in range(2))
    cosines, sines = model.rotations(length)
    begin = 0
    for end in range(prompt.shape[1], length):
        rotations = cosines[begin:end], sines[begin:end]
        x = F.embedding(ids[:, begin:end], model.embedding)
        for number, layer in enumerate(layers):
            x = _attended_from(model, number, x, rotations, keys[number], values[number], begin)
            x = x + layer(model.ffn_input(number, x))
        ids[:, end] = model.logits(x[:, -1]).argmax(-1)
        begin = end
    return ids


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
    """The head. Embeddings and output rows are the target's."""

    def __init__(self, model: Llama, neurons: int) -> None:
        super().__init__()
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
        return normed(x, weight.to(BF16), self.shape.epsilon)

    def combined(self, streams: Tensor) -> Tensor:
        """streams [batch, tokens, depths, hidden] -> the residual stream that the head starts from."""
        return F.linear(self._normed(streams, self.fc_norms).flatten(-2), self.fc.to(BF16))

    def projected(self, embedded: Tensor, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [batch, heads, rows, head] at positions ``rows`` [rows]."""
        shape = self.shape
        joined = torch.cat([self._normed(embedded, self.embedding_norm), self._normed(x, self.hidden_norm)], -1)
        heads = F.linear(joined, self.qkv.to(BF16)).unflatten(-1, (-1, shape.head)).transpose(1, 2)
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
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), self.o.to(BF16))
        h = self._normed(x, self.ffn_norm)
        active = F.silu(F.linear(h, self.gate.to(BF16))) * F.linear(h, self.up.to(BF16))
        return x + F.linear(active, self.down.to(BF16))

    def finals(self, x: Tensor) -> Tensor:
        """What output rows are multiplied with."""
        return self._normed(x, self.norm)


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
