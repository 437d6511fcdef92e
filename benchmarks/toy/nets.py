"""The toy networks, written for training on a CPU; exported with the names that vLLM loads.

``MoE`` follows ``Qwen3MoeForCausalLM`` and ``Dense`` follows ``Qwen3ForCausalLM``: RMS norms before
attention and MLP, per-head norms of queries and keys, rotary positions, grouped keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 10_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Sizes of a toy network; ``experts = 0`` is the dense draft."""

    vocab: int = 2048
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 64
    top_k: int = 8
    intermediate: int = 32


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of shape [length, head_dim], the half-split ("NeoX") layout."""
    frequency = ROPE_THETA ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.arange(length).float()[:, None] * frequency
    return torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Applies the rotary embedding to x [..., length, head_dim]."""
    cos, sin = table
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    """Causal attention; ``input_size`` is 2·hidden in an EAGLE-3 head, which has no query/key norm."""

    def __init__(self, shape: Shape, input_size: int | None = None, qk_norm: bool = True) -> None:
        super().__init__()
        self.shape = shape
        size = input_size or shape.hidden
        self.q_proj = nn.Linear(size, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(size, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(size, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(shape.head_dim) if qk_norm else nn.Identity()

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, length, size] -> q, k, v of shape [batch, heads, length, head_dim]."""
        s, (batch, length, _) = self.shape, x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, s.heads, s.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, s.kv_heads, s.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        groups = s.heads // s.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return rotate(q, table), rotate(k, table), v

    def merge(self, heads: Tensor) -> Tensor:
        return self.o_proj(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = self.project(x, table)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class _GroupedSwiGLU(torch.autograd.Function):
    """Experts over rows sorted by expert: one loop, no padding, gradients of all experts at once."""

    @staticmethod
    def forward(ctx, x: Tensor, w13: Tensor, w2: Tensor, counts: list[int]) -> Tensor:
        out = torch.empty_like(x)
        gates = x.new_empty(x.shape[0], w13.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            rows = slice(start, start + count)
            torch.mm(x[rows], w13[expert].t(), out=gates[rows])
            gate, up = gates[rows].chunk(2, -1)
            torch.mm(F.silu(gate) * up, w2[expert].t(), out=out[rows])
            start += count
        ctx.save_for_backward(x, w13, w2, gates)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, w13, w2, gates = ctx.saved_tensors
        grad_x, grad_w13, grad_w2 = torch.empty_like(x), torch.zeros_like(w13), torch.zeros_like(w2)
        start = 0
        for expert, count in enumerate(ctx.counts):
            rows = slice(start, start + count)
            gate, up = gates[rows].chunk(2, -1)
            sigmoid = gate.sigmoid()
            silu = gate * sigmoid
            torch.mm(grad[rows].t(), silu * up, out=grad_w2[expert])
            inner = grad[rows] @ w2[expert]
            d_gate = inner * up * (sigmoid + silu * (1 - sigmoid))
            d_gates = torch.cat([d_gate, inner * silu], -1)
            torch.mm(d_gates.t(), x[rows], out=grad_w13[expert])
            torch.mm(d_gates, w13[expert], out=grad_x[rows])
            start += count
        return grad_x, grad_w13, grad_w2, None


class SparseMLP(nn.Module):
    """Top-k of ``experts`` SwiGLU experts, softmax over all, renormalised over the chosen ones."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.w13 = nn.Parameter(torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden) * shape.hidden**-0.5)
        self.w2 = nn.Parameter(torch.randn(shape.experts, shape.hidden, shape.intermediate) * 0.02)
        self.chosen: Tensor | None = None  # [tokens, top_k], of the last forward
        self.probabilities: Tensor | None = None  # [tokens, experts], of the last forward, with its graph

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> (output [tokens, hidden], load-balancing loss)."""
        s = self.shape
        probs = self.gate(x).softmax(-1)
        weights, ids = probs.topk(s.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        self.chosen, self.probabilities = ids.detach(), probs
        order = ids.flatten().argsort()
        counts = torch.bincount(ids.flatten(), minlength=s.experts)
        rows = order // s.top_k
        y = _GroupedSwiGLU.apply(x[rows], self.w13, self.w2, counts.tolist())
        out = torch.zeros_like(x).index_add_(0, rows, y * weights.flatten()[order, None])
        balance = s.experts * (counts / counts.sum() * probs.mean(0)).sum()
        return out, balance


class DenseMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), x.new_zeros(())


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.mlp = SparseMLP(shape) if shape.experts else DenseMLP(shape)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), table)
        y, balance = self.mlp(self.post_attention_layernorm(x).flatten(0, 1))
        return x + y.view_as(x), balance


class CausalLM(nn.Module):
    """A decoder; ``forward`` returns logits, the balance loss and, if asked, the hidden states."""

    def __init__(self, shape: Shape, tied: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=shape.hidden**-0.5 / 4)
        if tied:
            nn.init.normal_(self.embed_tokens.weight, std=shape.hidden**-0.5 / 4)
            self.lm_head.weight = self.embed_tokens.weight
        for block in self.blocks():
            nn.init.normal_(block.self_attn.o_proj.weight, std=0.02 / math.sqrt(shape.layers))

    def blocks(self) -> Iterator[Block]:
        """Returns the layers with their type."""
        return (cast(Block, layer) for layer in self.layers)

    def forward(self, ids: Tensor, hidden_states: bool = False):
        """ids [batch, length] -> (logits [batch, length, vocab], summed balance loss, layers' inputs and output)."""
        table = rotary_table(ids.shape[1], self.shape.head_dim)
        x, states, balance = self.embed_tokens(ids), [], 0.0
        for block in self.layers:
            states.append(x)
            x, extra = block(x, table)
            balance = balance + extra
        states.append(x)
        x = self.norm(x)
        return self.lm_head(x), balance, (states if hidden_states else None)
