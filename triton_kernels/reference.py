"""Torch twins of the kernels: naive loops in float64, the truth that every kernel is compared with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Activation = Literal["silu", "swigluoai"]

_ALPHA, _LIMIT = 1.702, 7.0  # of swigluoai, fixed by GPT-OSS


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "silu",
) -> Tensor:
    """Routed experts of one MoE layer, one token and one expert at a time, summed in the order of top-k.

    Args:
        x: [tokens, hidden].
        w13: [experts, 2 * intermediate, hidden]; the rows are as ``gate_up`` says.
        w2: [experts, hidden, intermediate].
        topk_weights: [tokens, top_k].
        topk_ids: [tokens, top_k], each an index into the experts; one may occur twice in a row.
        b13: [experts, 2 * intermediate] or None.
        b2: [experts, hidden] or None.
        activation: ``silu`` or ``swigluoai``.

    Returns:
        [tokens, hidden] in float64, whatever the dtype of the inputs: rounding is left to the caller.
    """
    x, w13, w2, topk_weights = x.double(), w13.double(), w2.double(), topk_weights.double()
    out = torch.zeros_like(x)
    for token, (weights, ids) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, expert in zip(weights, ids, strict=True):
            hidden = w13[expert] @ x[token]
            if b13 is not None:
                hidden = hidden + b13[expert].double()
            result = w2[expert] @ activate(hidden, activation)
            if b2 is not None:
                result = result + b2[expert].double()
            out[token] += weight * result
    return out


def gate_up(hidden: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Split [..., 2 * intermediate] into gate and up: two halves for ``silu``, interleaved for ``swigluoai``."""
    if activation == "silu":
        half = hidden.shape[-1] // 2
        return hidden[..., :half], hidden[..., half:]
    if activation == "swigluoai":
        return hidden[..., ::2], hidden[..., 1::2]
    raise ValueError(f"activation {activation!r} is not known; use silu or swigluoai")


def activate(hidden: Tensor, activation: Activation) -> Tensor:
    """[..., 2 * intermediate] -> [..., intermediate]."""
    gate, up = gate_up(hidden, activation)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
    return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)
