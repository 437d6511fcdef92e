"""Torch twins of ``mailbox``: the thread is the same one, and the wait lets it run."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..types import ADMITTED, COMPUTED, LATE, STREAMED, Division, Mail
from .route import routed

_NAP = 20e-6  # seconds


def post(
    topk_ids: Tensor,
    topk_weights: Tensor,
    layer: int,
    x: Tensor,
    used: Tensor,
    counts: Tensor,
    sources: Tensor,
    division: Division,
    mail: Mail,
    live: Tensor | None = None,
) -> None:
    """Twin of ``mailbox.post``."""
    n, rows = len(division.shares) - 1, len(x)
    mine = slice(layer * n, layer * n + n)
    counts[mine] = torch.bincount(routed(topk_ids, topk_weights, n, live) + 1, minlength=n + 1)[1:].int()
    source, pairs = sources[mine], min(int(division.pairs), topk_ids.numel())
    streamed = (source == STREAMED).nonzero().flatten().tolist() if pairs else []
    missing = len(streamed) + int((source == ADMITTED).sum())
    order = sorted(streamed, key=lambda expert: (int(counts[mine][expert]), float(used[mine][expert]), expert))
    taken = order[: int(division.shares[missing])]
    source[taken] = COMPUTED
    expert = routed(topk_ids, topk_weights, n, torch.tensor(pairs)).view(topk_ids.shape)
    cpu = (expert >= 0) & (source[expert] == COMPUTED)
    division.kept[:rows] = topk_weights.masked_fill(cpu, 0)
    division.left[:rows] = topk_weights.masked_fill(~cpu, 0)
    division.state[0] = bool(taken)
    if not taken:
        return
    mail.ids[:rows], mail.weights[:rows] = expert.masked_fill(~cpu, -1).int(), division.left[:rows]
    asked = pairs // topk_ids.shape[1]
    mail.x[:asked] = x[:asked]
    mail.head[0], mail.head[1] = layer, asked
    mail.answered[0] = 0
    division.number.add_(1)
    mail.asked[0] = division.number[0]


def wait_for_answer(
    topk_ids: Tensor, layer: int, sources: Tensor, division: Division, mail: Mail, patience: int
) -> None:
    """Twin of ``mailbox.wait_for_answer``."""
    rows, n, arrived = len(topk_ids), len(division.shares) - 1, False
    if division.state[0]:
        wanted, limit = int(division.number), time.monotonic_ns() + patience
        while not (arrived := int(mail.answered) == wanted) and time.monotonic_ns() < limit:
            time.sleep(_NAP)
        if not arrived:
            source = sources[layer * n : layer * n + n]
            source[source == COMPUTED] = LATE
            division.pairs[0] = 0
    division.state[1] = arrived
    division.again[:rows] = 0 if arrived else division.left[:rows]


def add(out: Tensor, late: Tensor, division: Division, mail: Mail) -> None:
    """Twin of ``mailbox.add``."""
    given = (division.left[: len(out)] != 0).any(dim=1)
    part = mail.results[: len(out)] if division.state[1] else late.float()
    out[given] = (out[given].float() + part[given]).to(out.dtype)
