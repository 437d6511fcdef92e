"""Runs rows in waves of whole experts, for kernels whose result for a row depends on an expert's other rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_spac.execution.base import LayerKernel


@dataclass(frozen=True)
class Wave:
    """Rows of a forward whose experts are all resident.

    Attributes:
        rows: a slice, or int64 [wave] on the CPU, ascending.
        slot_ids: slot numbers in place of experts, with the shape and dtype of the rows' routed ids.
    """

    rows: slice | Tensor
    slot_ids: Tensor


def by_expert(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    kernel: LayerKernel,
    waves: Callable[[Tensor], Iterator[Wave]],
    loaded: Callable[[], None] | None = None,
) -> Tensor:
    """Returns what ``kernel`` returns for all rows at once, to the bit, see ``LayerKernel.by_expert``.

    The pairs of a row and an expert are sorted by expert, and divided between experts: each wave has all rows of its
    experts, in their order. The results of a row are then added as the kernel does.

    Args:
        x: [rows, hidden].
        weights: [rows, top_k].
        ids: [rows, top_k], experts of the layer.
        kernel: takes slots.
        waves: makes the experts of pairs [rows * top_k, 1] resident, wave by wave; one has all pairs of its experts.
        loaded: called when a wave's experts are resident, before its kernel runs.
    """
    assert kernel.takes_slots
    top_k, flat, shares = ids.shape[1], ids.flatten(), weights.flatten()
    order = flat.argsort(stable=True)
    parts = x.new_empty(len(flat), x.shape[1])
    for wave in waves(flat[order][:, None]):
        pairs = order[wave.rows]
        if loaded is not None:
            loaded()
        parts[pairs] = kernel(x[pairs // top_k], shares[pairs][:, None], wave.slot_ids)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for choice in parts.view(len(x), top_k, -1).unbind(1):
        out += choice
    return out.to(x.dtype)
