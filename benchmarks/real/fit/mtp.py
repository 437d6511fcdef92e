"""A multi-token prediction layer for the carved model, in DeepSeek's form (vLLM's ``DeepSeekMTPModel``).

It is the target's last layer once more, behind a projection of the normed embedding and of the normed stream. Its
experts hold the same neurons, so the artefact has what it learned: the projection, attention, router, norms, and a
correction of a low rank to the down projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.real.artefact import Experts
from benchmarks.real.fit.carve import always_of, holders_of
from benchmarks.real.fit.distill import added, selected
from benchmarks.real.fit.drafter import Drafter
from benchmarks.real.fit.llama import COMPUTE, Llama


class Mtp(Drafter):
    """The layer.

    Args:
        experts: of the target's last layer.
        top_k: experts that a token selects.
        vocabulary: tokens that it learns of, as of ``Drafter``; vLLM's class drafts all.
    """

    def __init__(self, model: Llama, experts: Experts, top_k: int, vocabulary: Tensor | None = None) -> None:
        super().__init__(model, vocabulary, rank=0)
        layer, hidden = model.layers[-1], model.shape.hidden
        self._layer, self._target_norm, self._top_k = layer, model.norm, top_k
        self._depths = (model.shape.layers,)
        self._holders, self._always = holders_of(experts.sets, experts.neurons), always_of(experts)
        self.project = self.linear(2 * hidden, hidden, 0.3)
        with torch.no_grad():
            self.project[:, hidden:] += 0.3 * torch.eye(hidden)
        self.embedding_norm, self.hidden_norm = (nn.Parameter(torch.ones(hidden)) for _ in range(2))
        self.attention_norm, self.ffn_norm, self.qkv, self.o = (
            nn.Parameter(part.float().clone()) for part in (layer.attention_norm, layer.ffn_norm, layer.qkv, layer.o)
        )
        self.router, self.down_left, self.down_right = (
            nn.Parameter(part.clone()) for part in (experts.router, experts.left, experts.right)
        )

    @property
    def depths(self) -> tuple[int, ...]:
        return self._depths

    def read(self, streams: Tensor) -> Tensor:
        return self.normed(streams[..., 0, :], self._target_norm)

    def begun(self, embedded: Tensor, before: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return super().begun(embedded.masked_fill((rows == 0)[:, None], 0), before, rows)  # as vLLM has it

    def entered(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        parts = self.normed(embedded, self.embedding_norm), self.normed(before, self.hidden_norm)
        x = F.linear(torch.cat(parts, -1), self.project.to(COMPUTE))
        return x, self.normed(x, self.attention_norm)

    def ffn(self, x: Tensor) -> Tensor:
        h = self.normed(x, self.ffn_norm)
        weights, _ = selected(F.linear(h, self.router.to(COMPUTE)).float().flatten(0, -2), self._top_k)
        return added(self._layer, h, self._always + weights @ self._holders, self.down_left, self.down_right)

    def left(self, x: Tensor) -> Tensor:
        return self.finals(x)
