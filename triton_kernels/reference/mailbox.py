"""Torch twins of ``mailbox``: the threads are the same, and a wait lets them run."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..types import ADMITTED, COMPUTED, LATE, Division, Experts, Mail, Orders, Reach, Request
from .route import routed

_NAP = 20e-6  # seconds


def post(topk_ids: Tensor, topk_weights: Tensor, first: int, sources: Tensor, request: Request) -> None:
    """Divides the pairs of a layer, whose ``sources`` say which experts are ``COMPUTED``, and asks the CPU for its own.

    ``first``: key of the layer's expert 0.
    """
    x, all_live, counts, division, mail, kept = request
    n, rows = len(division.shares) - 1, len(x)
    mine = slice(first, first + n)
    counts[mine] = torch.bincount(routed(topk_ids, topk_weights, n, all_live) + 1, minlength=n + 1)[1:].int()
    pairs = min(int(division.pairs), topk_ids.numel())
    expert = routed(topk_ids, topk_weights, n, torch.tensor(pairs)).view(topk_ids.shape)
    cpu = (expert >= 0) & (sources[mine][expert] == COMPUTED)
    division.kept[:rows] = topk_weights.masked_fill(cpu, 0)
    division.left[:rows] = topk_weights.masked_fill(~cpu, 0)
    division.state[0] = bool(cpu.any())
    if not cpu.any():
        return
    asks_for = expert if kept is None else kept.place_of[mine][expert] - n
    mail.ids[:rows], mail.weights[:rows] = asks_for.masked_fill(~cpu, -1).int(), division.left[:rows]
    asked = pairs // topk_ids.shape[1]
    mail.x[:asked] = x[:asked]
    mail.head[0], mail.head[1] = first // n if kept is None else 0, asked
    mail.answered[0] = 0
    division.number.add_(1)
    mail.asked[0] = division.number[0]


def wait_for_answer(
    topk_ids: Tensor, layer: int, sources: Tensor, division: Division, mail: Mail, patience: int
) -> None:
    """Twin of ``mailbox.wait_for_answer``."""
    n, arrived = len(division.shares) - 1, False
    if division.state[0]:
        wanted, limit = int(division.number), time.monotonic_ns() + patience
        while not (arrived := int(mail.answered) == wanted) and time.monotonic_ns() < limit:
            time.sleep(_NAP)
        if not arrived:
            source = sources[layer * n : layer * n + n]
            source[source == COMPUTED] = LATE
            division.pairs[0] = 0
    division.state[1] = arrived
    division.late[0] = topk_ids.numel() if division.state[0] and not arrived else 0


def wait_for_experts(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    sources: Tensor,
    orders: Orders,
    reach: Reach,
    live: Tensor | None = None,
) -> None:
    """Twin of ``mailbox.wait_for_experts``."""
    n = len(orders.keys)
    used = {int(expert) for expert in routed(topk_ids, topk_weights, n, live) if expert >= 0}
    wanted, outside = [], []
    for expert in sorted(used):
        key = first + expert
        missed = int(experts.slot_of[key]) < 0
        if (missed or int(sources[key]) == ADMITTED) and int(reach.place_of[key]) < 0:
            wanted.append(key)
            outside.append(missed)
    if not wanted:
        return
    for turn, key in enumerate(wanted):
        orders.keys[turn] = key
    orders.ordered[0] = len(wanted)
    reach.number.add_(1)
    order = int(reach.number)
    orders.asked[0] = order
    while int(orders.answered) != order and not int(orders.ended):
        time.sleep(_NAP)
    arrived = int(orders.answered) == order
    for turn, (key, missed) in enumerate(zip(wanted, outside, strict=True)):
        given = int(orders.places[turn]) if arrived else -1
        reach.place_of[key] = max(-1, given)
        addresses = reach.at[:, given if given >= 0 else -1 - given]
        experts.hosts[:, key] = addresses
        if missed:
            experts.table[:, key] = addresses
