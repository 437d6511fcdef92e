"""An EAGLE-3 head for the carved model, in the form that stock vLLM runs (``LlamaForCausalLMEagle3``).

It reads the target's residual stream at three depths, each normed: a few entries of a stream are a thousand times the
others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real.fit.drafter import Drafter
from benchmarks.real.fit.llama import COMPUTE, Llama

DEPTHS = (10, 20, 30)  # the streams before these layers; 30 is the one after the last
RANK = 64  # of what the head adds to the target's output rows


class Eagle(Drafter):
    """The head.

    Args:
        neurons: of its FFN.
        vocabulary, rank: as of ``Drafter``.
    """

    def __init__(self, model: Llama, neurons: int, vocabulary: Tensor | None = None, rank: int = 0) -> None:
        super().__init__(model, vocabulary, rank)
        shape = model.shape
        hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
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

    @property
    def depths(self) -> tuple[int, ...]:
        return DEPTHS

    def read(self, streams: Tensor) -> Tensor:
        return F.linear(self.normed(streams, self.fc_norms).flatten(-2), self.fc.to(COMPUTE))

    def entered(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.normed(embedded, self.embedding_norm), self.normed(before, self.hidden_norm)
        return before, torch.cat(parts, -1)

    def ffn(self, x: Tensor) -> Tensor:
        h = self.normed(x, self.ffn_norm)
        active = F.silu(F.linear(h, self.gate.to(COMPUTE))) * F.linear(h, self.up.to(COMPUTE))
        return F.linear(active, self.down.to(COMPUTE))

    def left(self, x: Tensor) -> Tensor:
        return x
