"""Torch twin of ``route``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Blocks, block_bound


def routed(topk_ids: Tensor, topk_weights: Tensor, experts: int, live: Tensor | None) -> Tensor:
    """Returns [pairs] int64: the expert of each pair; -1 where it is padding or has weight 0."""
    ids, weights = topk_ids.flatten().long(), topk_weights.flatten()
    before = torch.arange(len(ids)) < (len(ids) if live is None else int(live))
    return torch.where(before & (ids >= 0) & (ids < experts) & (weights != 0), ids, -1)


def align(
    topk_ids: Tensor,
    topk_weights: Tensor,
    experts: int,
    block_m: int,
    counts: Tensor | None = None,
    live: Tensor | None = None,
) -> Blocks:
    """Twin of ``route.align``."""
    ids, n_pairs = routed(topk_ids, topk_weights, experts, live), topk_ids.numel()
    pairs, blocks, sizes = [], [], []
    for expert in range(experts):
        mine = (ids == expert).nonzero().flatten().tolist()
        needed = -(-len(mine) // block_m)
        sizes.append(len(mine))
        blocks += [expert] * needed
        pairs += mine + [n_pairs] * (needed * block_m - len(mine))
    most = block_bound(n_pairs, experts, block_m)
    pairs += [n_pairs] * (most * block_m - len(pairs))
    blocks += [-1] * (most - len(blocks))
    made = Blocks(*(torch.tensor(values, dtype=torch.int32) for values in (pairs, blocks, sizes)))
    return made if counts is None else made._replace(counts=counts.copy_(made.counts))
