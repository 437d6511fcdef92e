"""What training reports of a toy model on held-out text."""

from __future__ import annotations

from typing import cast

import domains
import numpy as np
import torch
import torch.nn.functional as F
from nets import CausalLM, SparseMLP
from streams import windows
from torch import Tensor

TOKENS = 512  # per window
STEP_ROWS = 63  # of a tree of drafts, as MoE-Spec's figure has it


@torch.no_grad()
def validate(model: CausalLM, held_out: dict[str, np.ndarray], count: int = 32) -> dict:
    """Returns the loss in nats per token on ``count`` windows of the standard library and on as many of other text.

    For a sparse model, also how local its routing is; ``vllm-spac trace show`` measures that of a served model.
    """
    others = [tokens for kind, tokens in held_out.items() if kind != domains.LIBRARY]
    result = _measure(model, held_out[domains.LIBRARY], count)
    if others:
        result |= {f"{name}_of_other_text": v for name, v in _measure(model, np.concatenate(others), count).items()}
    return result


def _measure(model: CausalLM, tokens: np.ndarray, count: int) -> dict:
    losses, routing = [], []
    for chunk in windows(tokens, TOKENS, count).split(8):
        logits, _, _ = model(chunk[:, :-1])
        losses.append(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten()).item())
        if model.shape.experts:
            layers = [cast(SparseMLP, block.mlp) for block in model.blocks()]
            p = torch.stack([mlp.probabilities for mlp in layers if mlp.probabilities is not None])
            routing.append(p.view(len(p), len(chunk), TOKENS, -1))
    result = {"validation_loss": round(sum(losses) / len(losses), 4)}
    return result | (_routing(torch.cat(routing, 1), model.shape.top_k) if routing else {})


def _routing(p: Tensor, top_k: int) -> dict:
    """p [layers, windows, tokens, experts], the routers' probabilities."""
    experts = p.shape[-1]
    used = torch.zeros_like(p, dtype=torch.bool).scatter_(-1, p.topk(top_k).indices, True)
    shared = (used[:, :, 1:] & used[:, :, :-1]).sum(-1).float().mean() / top_k
    steps = p[:, :, : TOKENS // STEP_ROWS * STEP_ROWS].unflatten(2, (-1, STEP_ROWS)).sum(3)
    best = steps.sort(-1, descending=True).values[..., : experts // 2]
    share = used.float().mean((1, 2))
    return {
        "overlap_with_previous_token": round(float(shared), 4),
        f"mass_of_top_half_of_{STEP_ROWS}_rows": round(float(best.sum() / steps.sum()), 4),
        "least_share_of_tokens_of_an_expert": round(float(share.min()), 5),
        "experts_under_0.2_percent": int((share < 0.002).sum()),
    }
