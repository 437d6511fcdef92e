"""Torch twins of the kernels, one of the same name and signature for each: the CPU path, and what kernels are
compared with. ``moe`` is the truth behind ``grouped_gemm``: naive loops in float64. Runs without Triton.
"""

from __future__ import annotations

import ctypes
import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "swigluoai"]

_ALPHA, _LIMIT = 1.702, 7.0  # of swigluoai, fixed by GPT-OSS


class Blocks(NamedTuple):
    """The work list of a grouped GEMM over pairs, pair = row * k + slot; all int32.

    Attributes:
        pairs: [blocks * block_m], the pair of each GEMM row; ``topk_ids.numel()`` where there is none.
        experts: [blocks], the expert of each block; -1 after the last.
        counts: [experts], pairs of each expert.
    """

    pairs: Tensor
    experts: Tensor
    counts: Tensor


class Shortlist(NamedTuple):
    """Attributes: scores [N] float64; ranks [N] int32, 0 is best; members [N] bool; size [1] int32."""

    scores: Tensor
    ranks: Tensor
    members: Tensor
    size: Tensor


class Experts(NamedTuple):
    """Where experts are. Keys number those of all layers; names, an expert's tensors.

    Attributes:
        slot_of: [keys] int32, the slot of each expert; -1: it has none.
        owner: [slots] int32, the expert of each slot.
        table: [names, keys] int64, where each tensor is read: in the slot, or in host memory.
        hosts: [names, keys] int64, the addresses in host memory.
        places: [names, slots] int64, the addresses of the slots.
    """

    slot_of: Tensor
    owner: Tensor
    table: Tensor
    hosts: Tensor
    places: Tensor


class Offers(NamedTuple):
    """Slots that the layers of a step may take, those worth least to their owners first.

    Attributes:
        state: [2] int32, the next offer and the end of them.
        slots: int32; owners: int32, the experts that have them; kept: float32, ascending, what they are worth to them.
        used: [keys] float32, what a slot is worth to each expert if the step uses it.
    """

    state: Tensor
    slots: Tensor
    owners: Tensor
    kept: Tensor
    used: Tensor


# --- the experts ---------------------------------------------------------------------------------------------------


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
        activation: ``silu``, ``gelu``, ``gelu_tanh`` or ``swigluoai``.

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
    """Split [..., 2 * intermediate] into gate and up: two halves, but interleaved for ``swigluoai``."""
    if activation in ("silu", "gelu", "gelu_tanh"):
        half = hidden.shape[-1] // 2
        return hidden[..., :half], hidden[..., half:]
    if activation == "swigluoai":
        return hidden[..., ::2], hidden[..., 1::2]
    raise ValueError(f"activation {activation!r} is not known; use silu, gelu, gelu_tanh or swigluoai")


def activate(hidden: Tensor, activation: Activation, rounded: torch.dtype | None = None) -> Tensor:
    """[..., 2 * intermediate] -> [..., intermediate]; act(gate) goes through ``rounded`` before it multiplies up."""
    gate, up = gate_up(hidden, activation)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)
    if activation == "silu":
        acted = gate * torch.sigmoid(gate)
    elif activation == "gelu":
        acted = 0.5 * gate * (1 + torch.erf(gate * math.sqrt(0.5)))
    else:
        acted = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (acted if rounded is None else acted.to(rounded).to(acted.dtype)) * up


def grouped_gemm(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    intermediate: int,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "silu",
    out: Tensor | None = None,
    tile: object = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Twin of ``grouped_gemm.grouped_gemm``: the addresses are the CPU's, ``tile`` is ignored."""
    (rows, d), k, dtype = x.shape, topk_ids.shape[1], x.dtype
    ids, weights = topk_ids.flatten().long(), topk_weights.flatten()
    ids = torch.where((ids >= 0) & (ids < len(w13)) & (weights != 0), ids, -1)
    if counts is not None:
        counts.copy_(torch.bincount(ids + 1, minlength=len(w13) + 1)[1:])
    y = torch.zeros(rows * k, d)
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        pairs = (ids == expert).nonzero().flatten()
        hidden = x[pairs // k].float() @ _at(w13, expert, (2 * intermediate, d), dtype).T
        if b13 is not None:
            hidden += _at(b13, expert, (2 * intermediate,), dtype)
        h = activate(hidden.to(dtype).float(), activation, dtype).to(dtype).float()
        result = h @ _at(w2, expert, (d, intermediate), dtype).T
        if b2 is not None:
            result += _at(b2, expert, (d,), dtype)
        y[pairs] = (result * weights[pairs, None]).to(dtype).float()
    total = torch.zeros(rows, d)
    for slot in range(k):
        total += y.view(rows, k, d)[:, slot]
    return total.to(dtype) if out is None else out.copy_(total)


def _at(table: Tensor, expert: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor at ``table[expert]``, as float32."""
    size = math.prod(shape) * dtype.itemsize
    memory = (ctypes.c_byte * size).from_address(int(table[expert]))
    return torch.frombuffer(memory, dtype=dtype).view(shape).float()


# --- routing -------------------------------------------------------------------------------------------------------


def block_bound(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing needs, at least 1: sum of ceil(c / m) <= E + (pairs - E) / m, E experts busy."""
    busy = min(pairs, experts)
    return max(1, busy + (pairs - busy) // block_m)


def topk(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Twin of ``route.topk``."""
    logits = logits.float()
    p = torch.softmax(logits, -1) if scoring == "softmax" else torch.sigmoid(logits)
    return _choose(p, p if bias is None else p + bias, k, renormalize, scale)


def _choose(p: Tensor, choice: Tensor, k: int, renormalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The k greatest of ``choice``, ties to the lowest id; below -inf there is only the row's first, with weight 0."""
    choice = choice.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    ids = choice.argsort(dim=-1, descending=True, stable=True)[:, :k]
    some = choice.gather(1, ids) > -math.inf
    first = torch.where(some[:, :1], ids[:, :1], 0)
    weights = torch.where(some, p.gather(1, ids), 0.0)
    if renormalize:
        total = torch.zeros(len(p), 1)
        for slot in range(k):
            total += weights[:, slot, None]
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * scale, torch.where(some, ids, first).int()


def align(topk_ids: Tensor, topk_weights: Tensor, experts: int, block_m: int, counts: Tensor | None = None) -> Blocks:
    """Twin of ``route.align``."""
    ids, n_pairs = topk_ids.flatten().tolist(), topk_ids.numel()
    weights = topk_weights.flatten().tolist()
    pairs, blocks, sizes = [], [], []
    for expert in range(experts):
        mine = [pair for pair in range(n_pairs) if ids[pair] == expert and weights[pair] != 0]
        needed = -(-len(mine) // block_m)
        sizes.append(len(mine))
        blocks += [expert] * needed
        pairs += mine + [n_pairs] * (needed * block_m - len(mine))
    most = block_bound(n_pairs, experts, block_m)
    pairs += [n_pairs] * (most * block_m - len(pairs))
    blocks += [-1] * (most - len(blocks))
    made = Blocks(*(torch.tensor(values, dtype=torch.int32) for values in (pairs, blocks, sizes)))
    return made if counts is None else made._replace(counts=counts.copy_(made.counts))


# --- who gets a slot -----------------------------------------------------------------------------------------------

UNUSED, HIT, STREAMED, ADMITTED = -1, 0, 1, 2  # how an expert was reached in a step


def lanes(experts: int) -> int:
    """Offers that a layer of so many experts looks at, at most: a power of 2, greater than its experts."""
    return max(32, 1 << experts.bit_length())


def admit(
    topk_ids: Tensor,
    topk_weights: Tensor,
    first: int,
    experts: Experts,
    offers: Offers,
    counts: Tensor,
    sources: Tensor,
    copies: Tensor,
) -> None:
    """Twin of ``admit.admit``, step by step as its module has it."""
    n, (begin, end) = len(copies) // 2, offers.state.tolist()
    ids = topk_ids.flatten().long()
    ids = ids[(ids >= 0) & (ids < n) & (topk_weights.flatten() != 0)]
    mine = slice(first, first + n)
    counts[mine] = torch.bincount(ids, minlength=n).int()
    needed = counts[mine] > 0
    missed = needed & (experts.slot_of[mine] < 0)
    seen = range(begin, min(end, begin + lanes(n)))
    old, slots = offers.owners[seen.start : seen.stop].long(), offers.slots[seen.start : seen.stop].long()
    unused = (old >= first + n) | (counts[old] == 0)
    opened = ((experts.owner[slots] == old) & unused).nonzero().flatten()
    worth, kept = offers.used[mine], offers.kept[seen.start : seen.stop]
    wants = (missed & (worth >= kept[opened[0]])).nonzero().flatten() if len(opened) else opened
    pairs = min(len(wants), len(opened))
    expert, offer = wants[:pairs], opened[:pairs]
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
    source[expert] = ADMITTED
    sources[mine] = source.int()
    experts.owner[slot] = key.int()
    experts.slot_of[victim] = -1
    experts.slot_of[key] = slot.int()
    experts.table[:, victim] = experts.hosts[:, victim]
    experts.table[:, key] = experts.places[:, slot]


def fetch(copies: Tensor, experts: Experts, words: Tensor) -> None:
    """Twin of ``fetch.fetch``."""
    total, n = int(copies[0]), len(copies) // 2
    for key, slot in zip(copies[1 : 1 + total].tolist(), copies[1 + n : 1 + n + total].tolist(), strict=True):
        for source, target, size in zip(experts.hosts[:, key], experts.places[:, slot], words, strict=True):
            ctypes.memmove(int(target), int(source), 8 * int(size))


# --- the shortlist -------------------------------------------------------------------------------------------------


def rank(p: Tensor, votes: Tensor, least: int, budget: int | None = None, epsilon: float | None = None) -> Shortlist:
    """Twin of ``rank.rank``."""
    scores = (p.double() * votes[:, None]).sum(0)
    order = scores.argsort(descending=True, stable=True)
    size = len(scores) if budget is None else budget
    if epsilon is not None:
        before = scores[order].cumsum(0) - scores[order]
        wanted = int((before < (1 - epsilon) * scores.sum()).sum())
        size = max(least, min(size, wanted))
    members = torch.zeros(len(scores), dtype=torch.bool)
    members[order[:size]] = True
    ranks = torch.empty(len(scores), dtype=torch.int32)
    ranks[order] = torch.arange(len(scores), dtype=torch.int32)
    return Shortlist(scores, ranks, members, torch.tensor([size], dtype=torch.int32))


def truncate(
    topk_weights: Tensor, topk_ids: Tensor, members: Tensor, budgeted: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of ``remap.truncate``."""
    weights, ids = torch.zeros_like(topk_weights), torch.empty_like(topk_ids, dtype=torch.int32)
    dropped = torch.zeros(len(topk_ids))
    lowest = int(members.nonzero()[0])
    for row, natural in enumerate(topk_ids.tolist()):
        real = [0 <= expert < len(members) for expert in natural]
        keep = [ok and (not budgeted[row] or bool(members[expert])) for ok, expert in zip(real, natural, strict=True)]
        fallback = next((expert for expert, kept in zip(natural, keep, strict=True) if kept), lowest)
        ids[row] = torch.tensor([expert if kept else fallback for expert, kept in zip(natural, keep, strict=True)])
        weights[row] = topk_weights[row] * torch.tensor(keep)
        dropped[row] = _lost(topk_weights[row] * torch.tensor(real), torch.tensor(keep))
    return weights, ids, dropped


def substitute(
    p: Tensor,
    topk_ids: Tensor,
    members: Tensor,
    budgeted: Tensor,
    renormalize: bool = False,
    bias: Tensor | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of ``remap.substitute``."""
    allowed = members | ~budgeted[:, None]
    choice = (p if bias is None else p + bias).masked_fill(~allowed, -math.inf)
    weights, ids = _choose(p, choice, topk_ids.shape[1], renormalize, scale)
    natural = topk_ids.long().clamp(0, len(members) - 1)
    real = natural == topk_ids
    lost = [_lost(*pair) for pair in zip(p.gather(1, natural) * real, allowed.gather(1, natural) & real, strict=True)]
    return weights, ids, torch.tensor(lost)


def _lost(weights: Tensor, keep: Tensor) -> float:
    total = float(weights.sum())
    return float((weights * ~keep).sum()) / total if total > 0 else 0.0


# --- the estimator -------------------------------------------------------------------------------------------------


def update_utility(
    counts: Tensor,
    last: Tensor,
    score: Tensor,
    up: Tensor,
    down: Tensor,
    highest: int = 4,
    lam: float = 0.1,
    literal: bool = False,
) -> None:
    """Twin of ``utility.update_utility``."""
    delta = counts - last
    size = delta.abs().double()
    climbs = delta >= (up if literal else up.floor().clamp(min=1))
    sinks = -delta >= (down if literal else down.floor().clamp(min=1))
    lower = torch.where(sinks, (score - 1).clamp(min=0), score)
    score.copy_(torch.where(climbs, (score + 1).clamp(max=highest), lower))
    for boundary, moves in ((up, delta > 0), (down, delta < 0)):
        moved = (1 - lam) * boundary + lam * size
        boundary.copy_(torch.where(moves, moved.floor() if literal else moved.clamp(min=1), boundary))
    last.copy_(counts)
