"""Tables, work lists and constants that kernels, their torch twins and the host share. Runs without Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

UNUSED, HIT, STREAMED, ADMITTED = -1, 0, 1, 2  # how an expert was reached in a step


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


def block_bound(pairs: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing needs, at least 1: sum of ceil(c / m) <= E + (pairs - E) / m, E experts busy."""
    busy = min(pairs, experts)
    return max(1, busy + (pairs - busy) // block_m)


def lanes(experts: int) -> int:
    """Offers that a layer of so many experts looks at, at most: a power of 2, greater than its experts."""
    return max(32, 1 << experts.bit_length())
