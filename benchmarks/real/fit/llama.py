"""The dense parent in plain torch with a replaceable FFN: what fitting needs, and nothing that serving does."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

# Without AVX-512 torch multiplies bfloat16 a hundred times slower than float32.
COMPUTE = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
FFN = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, normed input [batch, tokens, hidden]) -> what the FFN adds to the residual stream, same shape."""


@dataclass(frozen=True)
class Shape:
    """The numbers of ``config.json`` that the forward pass needs."""

    layers: int
    hidden: int
    neurons: int
    heads: int
    kv_heads: int
    epsilon: float
    theta: float

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @classmethod
    def read(cls, folder: Path) -> Shape:
        return cls.of(json.loads((folder / "config.json").read_text()))

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            neurons=config["intermediate_size"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            epsilon=config["rms_norm_eps"],
            theta=config["rope_theta"],
        )


@dataclass
class Layer:
    """The weights of one layer, all ``COMPUTE`` [out, in] or [hidden]."""

    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


class Kept:
    """The keys and values of texts so far: ``keys`` and ``values`` [layers, batch, heads, room, head].

    Attributes:
        length: tokens of each text that are kept.
    """

    def __init__(self, shape: Shape, batch: int, room: int) -> None:
        size = shape.layers, batch, shape.kv_heads, room, shape.head
        self.keys, self.values = torch.zeros(size, dtype=COMPUTE), torch.zeros(size, dtype=COMPUTE)
        self.length = 0

    def extended(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes those of the next tokens, each [batch, heads, tokens, head]; returns those of all tokens so far."""
        end = self.length + k.shape[2]
        self.keys[layer, :, :, self.length : end], self.values[layer, :, :, self.length : end] = k, v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def select(self, rows: torch.Tensor) -> None:
        """Keeps these texts alone, int64 [rows]."""
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


def normed(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype) * weight


class Llama:
    """A dense Llama; its weights take no gradient unless a caller turns that on."""

    def __init__(self, folder: Path) -> None:
        self.shape = Shape.read(folder)
        weights = {name: each.to(COMPUTE) for name, each in load_file(folder / "model.safetensors").items()}
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.layers = []
        for number in range(self.shape.layers):
            prefix = f"model.layers.{number}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            self.layers.append(
                Layer(
                    attention_norm=weights[prefix + "input_layernorm.weight"],
                    ffn_norm=weights[prefix + "post_attention_layernorm.weight"],
                    qkv=torch.cat([weights[f"{attention}{part}_proj.weight"] for part in "qkv"]),
                    o=weights[attention + "o_proj.weight"],
                    gate=weights[mlp + "gate_proj.weight"],
                    up=weights[mlp + "up_proj.weight"],
                    down=weights[mlp + "down_proj.weight"],
                )
            )

    def rotations(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the rotary embedding, each [length, head], ``COMPUTE``."""
        head = self.shape.head
        frequency = 1.0 / self.shape.theta ** (torch.arange(0, head, 2).float() / head)
        angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
        return angles.cos().to(COMPUTE), angles.sin().to(COMPUTE)

    def attended(
        self, number: int, x: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor], kept: Kept | None = None
    ) -> torch.Tensor:
        """The residual stream [batch, tokens, hidden] after the attention of layer ``number``.

        Args:
            kept: the texts before these tokens. They are several only where nothing is kept yet.
        """
        shape, layer = self.shape, self.layers[number]
        batch, tokens, _ = x.shape
        cos, sin = rotations
        qkv = F.linear(normed(x, layer.attention_norm, shape.epsilon), layer.qkv)
        heads = qkv.view(batch, tokens, -1, shape.head).transpose(1, 2)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if kept is not None:
            k, v = kept.extended(number, k, v)
        if tokens > 1:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:  # the queries of a group as if they were tokens: no copies of the keys
            mixed = F.scaled_dot_product_attention(q.reshape(batch, shape.kv_heads, -1, shape.head), k, v).view(q.shape)
        return x + F.linear(mixed.transpose(1, 2).reshape(batch, tokens, shape.hidden), layer.o)

    def ffn_input(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return normed(x, self.layers[number].ffn_norm, self.shape.epsilon)

    def ffn(self, number: int, h: torch.Tensor) -> torch.Tensor:
        """The dense FFN of layer ``number``."""
        layer = self.layers[number]
        return F.linear(F.silu(F.linear(h, layer.gate)) * F.linear(h, layer.up), layer.down)

    def hidden(self, ids: torch.Tensor, ffn: FFN | None = None, kept: Kept | None = None) -> torch.Tensor:
        """ids [batch, tokens] -> the residual stream after the last layer [batch, tokens, hidden]."""
        for x in self.streams(ids, ffn, kept):  # noqa: B007 - the last
            pass
        return x

    def streams(self, ids: torch.Tensor, ffn: FFN | None = None, kept: Kept | None = None) -> Iterator[torch.Tensor]:
        """Yields the streams [batch, tokens, hidden] of ids [batch, tokens] before each layer, and the last one.

        Args:
            kept: the texts before ``ids``; it has these, too, after the last stream.
        """
        ffn, begun = ffn or self.ffn, kept.length if kept else 0
        cos, sin = self.rotations(begun + ids.shape[1])
        x = F.embedding(ids, self.embedding)
        for number in range(self.shape.layers):
            yield x
            x = self.attended(number, x, (cos[begun:], sin[begun:]), kept)
            x = x + ffn(number, self.ffn_input(number, x))
        if kept:
            kept.length += ids.shape[1]
        yield x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [..., vocabulary], of the residual stream after the last layer."""
        return F.linear(normed(x, self.norm, self.shape.epsilon), self.embedding).float()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def windows(ids: torch.Tensor, count: int, length: int, seed: int) -> torch.Tensor:
    """``count`` windows of ``length`` tokens of one text [tokens], int64 [count, length], spread by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(ids) - length, (count,), generator=generator)
    return torch.stack([ids[start : start + length] for start in starts]).long()
