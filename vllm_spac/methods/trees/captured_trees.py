"""What a full CUDA graph of a step with draft trees reads: memory at fixed addresses, written before each replay.

In such a graph each row of the step is a sequence of one token, also where a request has a chain. So its shape depends
on nothing but the number of rows. Rows behind those of the step pad the graph: they attend to one token of vLLM's own
block, which no request has, and write nowhere.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vllm_spac.methods.trees.tensors import NOWHERE, Layout, Scattered, StepTrees


class CapturedBatch(NamedTuple):
    """The sequences that attention sees in a graph of some rows, S of them, and what is written besides."""

    starts: Tensor  # int32 [S + 1], first row of each: its number
    lengths: Tensor  # int32 [S], tokens of each, its row included
    table: Tensor  # int32 [S, blocks]
    scattered: Scattered


class CapturedTrees:
    """The memory of all graphs of an engine.

    Args:
        rows: most of a graph.
        blocks: of a block table.
        depth: most levels of a tree.
    """

    def __init__(self, rows: int, blocks: int, depth: int, device: torch.device | str) -> None:
        self._pairs = depth + 1  # of a row: its ancestors, itself included
        starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        lengths = torch.ones(rows, dtype=torch.int32, device=device)
        table = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        pairs = torch.zeros(rows * self._pairs, dtype=torch.int64, device=device)
        self._all = CapturedBatch(starts, lengths, table, Scattered(pairs, torch.full_like(pairs, NOWHERE)))

    def batch(self, rows: int) -> CapturedBatch:
        """What a graph of so many rows refers to."""
        starts, lengths, table, (pairs, slots) = self._all
        scattered = Scattered(pairs[: rows * self._pairs], slots[: rows * self._pairs])
        return CapturedBatch(starts[: rows + 1], lengths[:rows], table[:rows], scattered)

    def reset(self) -> None:
        """Has all rows be padding."""
        _, lengths, table, (pairs, slots) = self._all
        lengths.fill_(1)
        table.zero_()
        pairs.zero_()
        slots.fill_(NOWHERE)

    def write(self, positions: Tensor, owner: Tensor, table: Tensor, step: StepTrees | None, block_size: int) -> None:
        """Writes a step.

        Args:
            positions: int64 [N], of each row, in its tree where it is of one.
            owner: int64 [N], request of each row.
            table: [requests, blocks].
            step: its trees, ``rows.sequence`` the row of the forward; None: all requests have chains.
        """
        self.reset()
        _, lengths, tables, (pairs, slots) = self._all
        lengths[: len(positions)] = (positions + 1).int()
        if step is None:
            tables[: len(owner)] = table[owner]
            return
        tables[: len(owner)] = step.sequences(owner, lengths, table, block_size)[1]
        also = step.scattered(block_size)
        pairs[: len(also.rows)], slots[: len(also.rows)] = also.rows, also.slots


def every_row(layout: Layout, requests: int) -> tuple[np.ndarray, np.ndarray]:
    """The layout of a batch whose requests all have as many rows, if each row is a sequence.

    Returns:
        int64 [4, N], as ``Layout.rows``, and int64 [rows], the request of each row.
    """
    tree, row, token, _ = layout.rows
    return np.stack([tree, row, token, token]), np.repeat(np.arange(requests), layout.starts[-1] // requests)
