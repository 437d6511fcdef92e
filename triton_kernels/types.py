"""Tables, work lists and constants shared by kernels, their torch twins and the host. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .formats import Format

UNUSED, HIT, STREAMED, ADMITTED = -1, 0, 1, 2  # how an expert was reached in a step


class Blocks(NamedTuple):
    """The work list of a grouped GEMM over pairs, pair = row * k + slot; all int32.

    Attributes:
        pairs: [blocks * block_m], the pair of each GEMM row; ``topk_ids.numel()`` for an empty row.
        experts: [blocks], the expert of each block; -1 after the last.
        counts: [experts], pairs of each expert.
    """

    pairs: Tensor
    experts: Tensor
    counts: Tensor


class Experts(NamedTuple):
    """The locations of experts. Keys number the experts of all layers; names, the tensors of an expert.

    Attributes:
        slot_of: [keys] int32, the slot of each expert; -1: none.
        owner: [slots] int32, the expert of each slot.
        table: [names, keys] int64, the address that each tensor is read from: in the slot, or in host memory.
        hosts: [names, keys] int64, the addresses in host memory.
        places: [names, slots] int64, the addresses of the slots.
    """

    slot_of: Tensor
    owner: Tensor
    table: Tensor
    hosts: Tensor
    places: Tensor


class Quantised(NamedTuple):
    """Quantised experts of a layer, beside the tables of their codes.

    Attributes:
        format: how they are stored.
        s13, s2: [experts] int64, the addresses of the scales.
    """

    format: Format
    s13: Tensor
    s2: Tensor


class Offers(NamedTuple):
    """Slots that the layers of a step may take, lowest worth to their owners first.

    Attributes:
        state: [2] int32, the next offer and the end of the offers.
        slots: int32, the slots offered.
        owners: int32, the experts in them.
        kept: float32, ascending, what each slot is worth to its owner.
        used: [keys] float32, what a slot is worth to each expert if the step uses it.
    """

    state: Tensor
    slots: Tensor
    owners: Tensor
    kept: Tensor
    used: Tensor


def block_bound(pairs: int, experts: int, block_m: int) -> int:
    """Returns the most blocks any routing needs, >= 1: sum of ceil(c / m) <= E + (pairs - E) / m, E experts busy."""
    busy = min(pairs, experts)
    return max(1, busy + (pairs - busy) // block_m)


def lanes(experts: int) -> int:
    """Returns the most offers that a layer of N experts considers: a power of 2 above N."""
    return max(32, 1 << experts.bit_length())
