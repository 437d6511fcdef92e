"""Torch twin of ``admit``, with the same steps as the module's docstring."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import ADMITTED, COMPUTED, HIT, STREAMED, UNUSED, Experts, Kept, Offers, Request, lanes
from .mailbox import post
from .route import routed


def admit(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    offers: Offers,
    counts: Tensor,
    sources: Tensor,
    copies: Tensor,
    live: Tensor | None = None,
    request: Request | None = None,
    turn: Tensor | None = None,
) -> None:
    """Twin of ``admit.admit``."""
    if turn is not None:
        n = len(copies) // 2
        needed = routed(topk_ids, topk_weights, n, live).unique()
        turn[0], turn[1] = first // n, (experts.slot_of[first + needed[needed >= 0]] < 0).sum()
    shares, kept = None, None
    if request is not None and request.division.pairs[0] > 0:
        shares, kept = request.division.shares, request.kept
    admit_alone(topk_ids, topk_weights, first, experts, offers, counts, sources, copies, live, shares, kept)
    if request is not None:
        post(topk_ids, topk_weights, first, sources, request)


def admit_alone(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    offers: Offers,
    counts: Tensor,
    sources: Tensor,
    copies: Tensor,
    live: Tensor | None,
    shares: Tensor | None,
    rows: Kept | None = None,
) -> None:
    """What ``admit`` decides, without asking the CPU for its share; arguments as there.

    ``shares``: as of ``Division``; None where the CPU takes no part. ``rows``: as of ``Request``.
    """
    n, (begin, end) = len(copies) // 2, offers.state.tolist()
    mine = slice(first, first + n)
    counts[mine] = torch.bincount(routed(topk_ids, topk_weights, n, live) + 1, minlength=n + 1)[1:].int()
    needed = counts[mine] > 0
    missed = needed & (experts.slot_of[mine] < 0)
    if not missed.any():
        copies[0] = 0
        sources[mine] = torch.where(needed, HIT, UNUSED).int()
        return
    seen = range(begin, min(end, begin + lanes(n)))
    old, slots = offers.owners[seen.start : seen.stop].long(), offers.slots[seen.start : seen.stop].long()
    unused = (old >= first + n) | (counts[old] == 0)
    opened = ((experts.owner[slots] == old) & unused).nonzero().flatten()
    worth, kept = offers.used[mine], offers.kept[seen.start : seen.stop]
    asking = missed.clone()
    if shares is not None:
        near = missed
        if rows is not None and not (near := missed & (rows.place_of[mine] >= 0)).equal(missed):
            shares = rows.shares
        here = near.nonzero().flatten().tolist()
        order = sorted(zip(counts[mine][here].tolist(), worth[here].tolist(), here, strict=True))
        asking[[expert for *_, expert in order[: int(shares[int(missed.sum())])]]] = False
    wants = (asking & (worth >= kept[opened[0]])).nonzero().flatten() if len(opened) else opened
    served = min(len(wants), len(opened))
    expert, offer = wants[:served], opened[:served]
    admitted = worth[expert] >= kept[offer]
    expert, offer = expert[admitted], offer[admitted]
    if len(wants) > len(opened) or not len(opened):
        offers.state[0] = seen.stop
    elif len(wants):
        offers.state[0] = begin + int(opened[len(wants) - 1]) + 1
    key, slot, victim, total = first + expert, slots[offer], old[offer], len(expert)
    copies[0] = total
    copies[1 : 1 + total], copies[1 + n : 1 + n + total] = key.int(), slot.int()
    source = torch.where(needed, HIT, UNUSED).masked_fill(missed, STREAMED)
    source[expert], source[missed & ~asking] = ADMITTED, COMPUTED
    sources[mine] = source.int()
    experts.owner[slot] = key.int()
    experts.slot_of[victim] = -1
    experts.slot_of[key] = slot.int()
    experts.table[:, victim] = experts.hosts[:, victim]
    experts.table[:, key] = experts.places[:, slot]
