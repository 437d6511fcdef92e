"""Tables, work lists and constants shared by kernels, their torch twins and the host. Imports no Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .formats import Format

UNUSED, HIT, STREAMED, ADMITTED = -1, 0, 1, 2  # how an expert was reached in a step
COMPUTED, LATE = 3, 4  # by the CPU, see ``mailbox``; was to be, and the device streamed it in the end


class Blocks(NamedTuple):
    """The work list of a grouped GEMM over pairs, pair = row * k + slot; all int32."""

    pairs: Tensor  # [blocks * block_m], the pair of each GEMM row; ``topk_ids.numel()`` for an empty row
    experts: Tensor  # [blocks], the expert of each block; -1 after the last
    counts: Tensor  # [experts], pairs of each expert


class Experts(NamedTuple):
    """The locations of experts. Keys number the experts of all layers; names, the tensors of an expert."""

    slot_of: Tensor  # [keys] int32, the slot of each expert; -1: none
    owner: Tensor  # [slots] int32, the expert of each slot
    table: Tensor  # [names, keys] int64, the address that each tensor is read from: in the slot, or in host memory
    hosts: Tensor  # [names, keys] int64, the addresses in host memory
    places: Tensor  # [names, slots] int64, the addresses of the slots


class Quantised(NamedTuple):
    """Quantised experts of a layer, beside the tables of their codes."""

    format: Format  # how they are stored
    # s13, s2: [experts] int64, the addresses of the scales
    s13: Tensor
    s2: Tensor


class Fills(NamedTuple):
    """What a grouped GEMM copies from host memory to where it reads it: the experts that a layer has just admitted.

    Attributes:
        sources: [experts] int32 from ``admit``, those that are ``ADMITTED`` are copied.
        w13, w2, b13, b2, s13, s2: [experts] int64, the addresses of the host copies; None where there is no tensor.
    """

    sources: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    s13: Tensor | None = None
    s2: Tensor | None = None


class Early(NamedTuple):
    """Parts of some experts of a layer that may have been read ahead of need, into memory of their own.

    Part p of W13 is its rows of gate and up for columns 32 p ... of h, of W2 rows 32 p ... A part is there when all
    ``READERS`` programs of ``fetch.read_early`` have done their share.

    Attributes:
        keys: [entries] int32, the experts, as keys of all layers; -1: none. Those of other layers are not looked at.
        done13, done2: [entries, parts] int32, the programs that have done their share of each part.
        w13, w2: [entries] int64, the addresses of this memory.
    """

    keys: Tensor
    done13: Tensor
    done2: Tensor
    w13: Tensor
    w2: Tensor


EARLY_ROWS = 32  # of a part
READERS = 16  # programs that share each part: with 8 KB each in flight PCIe 5 is busy. Not measured.


class Pieces(NamedTuple):
    """A grouped GEMM in several launches, each over some pairs of a layer, with the bits of one over all."""

    y: Tensor  # [M * k, d] like x: the weighted results of the pairs; each launch writes its own
    ids: Tensor | None  # of the last launch: [M, k], all pairs, whose results are summed; else None


class Offers(NamedTuple):
    """Slots that the layers of a step may take, lowest worth to their owners first."""

    state: Tensor  # [2] int32, the next offer and the end of the offers
    slots: Tensor  # int32, the slots offered
    owners: Tensor  # int32, the experts in them
    kept: Tensor  # float32, ascending, what each slot is worth to its owner
    used: Tensor  # [keys] float32, what a slot is worth to each expert if the step uses it


class Mail(NamedTuple):
    """A mailbox in host memory that the device addresses, too: requests of layers, and the answers of a CPU thread.

    Attributes:
        asked: [1] int64, the number of the last request; the device writes it after all that belongs to the request.
    """

    asked: Tensor
    answered: Tensor  # [1] int64, the number of the last answer; the thread writes it after the results
    head: Tensor  # [2] int32, layer and rows of the request
    ids: Tensor  # [rows, k] int32, -1 where a pair is not the CPU's
    weights: Tensor  # [rows, k] float32, 0 where a pair is not the CPU's
    x: Tensor  # [rows, d]
    results: Tensor  # [rows, d] float32


class Division(NamedTuple):
    """How a layer's pairs are divided between device and CPU, on the device.

    Attributes:
        kept, left: [rows, k] float32: the weights of the device's pairs and those of the CPU's, 0 elsewhere.
    """

    number: Tensor  # [1] int64, the number of the last request
    pairs: Tensor  # [1] int32, leading pairs of which the CPU may take some in this step; 0 after an answer was late
    state: Tensor  # [2] int32, whether the layer has made a request; whether its answer has arrived
    shares: Tensor  # [experts + 1] int32, how many experts the CPU takes where so many have no slot before the layer
    kept: Tensor
    left: Tensor
    late: Tensor  # [1] int32, leading pairs among which the device computes ``left``: 0 unless an answer is late


class Kept(NamedTuple):
    """Rows of host memory before a disk, which the CPU computes experts from: those alone that have one.

    Row r is place N + r of ``Reach.at``. The CPU is asked for rows of one layer, 0, that has all of them.
    """

    place_of: Tensor  # [keys] int32, as of ``Reach``
    shares: Tensor  # [experts + 1] int32, as of ``Division``, where the layer waits for the disk besides


class Request(NamedTuple):
    """What the admission of a layer needs to leave some of its missed experts to the CPU."""

    x: Tensor  # [M, d], contiguous, of ``mail``'s dtype
    live: Tensor  # [1] int32, pairs from this one on are padding
    counts: Tensor  # [keys] int32, those of the layer are overwritten with the pairs of each expert
    division: Division  # ``pairs`` and ``shares`` are read; the others are written, but for ``late``
    mail: Mail  # is written, but for ``results``
    kept: Kept | None = None  # None: the CPU has every expert in memory, and is asked by the layer's numbers


class Orders(NamedTuple):
    """Orders of layers for experts that the device cannot address, in host memory that both sides do; see ``mailbox``.

    Attributes:
        asked: [1] int64, the number of the last order; the device writes it after all that belongs to the order.
    """

    asked: Tensor
    answered: Tensor  # [1] int64, the number of the last answer; the host writes it after the places
    ended: Tensor  # [1] int32, not 0: the host answers no more
    ordered: Tensor  # [1] int32, experts of the order
    keys: Tensor  # [experts] int32, which; ascending
    places: Tensor  # [experts] int32, by the host: where each is; -1 - place where it does not stay


class Reach(NamedTuple):
    """What the device can address of experts without a slot, on the device."""

    number: Tensor  # [1] int64, the number of the last order
    place_of: Tensor  # [keys] int32, -1: the host must be asked; of others the address in ``Experts.hosts`` holds
    at: Tensor  # [names, places] int64, the addresses of places in pinned memory


def block_bound(pairs: int, experts: int, block_m: int) -> int:
    """Returns the most blocks any routing needs, >= 1: sum of ceil(c / m) <= E + (pairs - E) / m, E experts busy."""
    busy = min(pairs, experts)
    return max(1, busy + (pairs - busy) // block_m)


def lanes(experts: int) -> int:
    """Returns the most offers that a layer of N experts considers: a power of 2 above N."""
    return max(32, 1 << experts.bit_length())
