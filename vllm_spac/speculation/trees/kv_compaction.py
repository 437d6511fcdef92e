"""Which blocks of the KV cache are copied before and after a tree is verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.speculation.trees.virtual_batch import TreeRows


class BlockCopies(NamedTuple):
    """Whole blocks to copy, in every layer: int64 [copies] each. No block is both read and written."""

    sources: Tensor
    targets: Tensor

    def apply(self, cache: Tensor) -> None:
        """Copies inside the cache of one layer, [blocks, ...]."""
        if len(self.sources):
            cache[self.targets] = cache[self.sources]


def before_forward(trees: Sequence[TreeRows], block_table: Tensor, block_size: int) -> BlockCopies:
    """Copies the last, partly filled block of each prefix to the first scratch block of each path."""
    sources, targets = [], []
    for tree in trees:
        if tree.base % block_size:
            own = block_table[tree.request, tree.first_block(block_size)].long()
            targets.append(tree.scratch[:, 0])
            sources.append(own.expand(len(tree.scratch)))
    return _copies(sources, targets)


def after_walk(
    trees: Sequence[TreeRows], paths: Sequence[Sequence[int]], block_table: Tensor, block_size: int
) -> BlockCopies:
    """Copies the scratch of the path that the last accepted row is on over the request's own blocks.

    It holds the row's ancestors. Slots behind the row receive what scratch holds there: each is written again before it
    is read. Rows of a tree's first path are in the request's own blocks already.

    Args:
        trees: verified in this step.
        paths: accepted rows of each tree, without the root; they may be of several of its ``paths``.
        block_table: [requests, blocks], of the whole batch.
        block_size: tokens per block.
    """
    sources, targets = [], []
    for tree, path in zip(trees, paths, strict=True):
        last = path[-1] if path else 0
        number = next(number for number, rows in enumerate(tree.paths) if last in rows)
        if number:
            used = (tree.base + len(path)) // block_size - tree.first_block(block_size) + 1
            blocks = tree.blocks(block_table, block_size)[:, :used]
            sources.append(blocks[number])
            targets.append(blocks[0])
    return _copies(sources, targets)


def _copies(sources: list[Tensor], targets: list[Tensor]) -> BlockCopies:
    nothing = [torch.empty(0, dtype=torch.long)]
    return BlockCopies(torch.cat(sources or nothing), torch.cat(targets or nothing))
