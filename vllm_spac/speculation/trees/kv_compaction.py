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
    """Copies the last, partly filled block of each prefix to the first scratch block of each node."""
    sources, targets = [], []
    for tree in trees:
        if tree.base % block_size and tree.tree.rows > 1:
            own = block_table[tree.request, tree.first_block(block_size)].long()
            targets.append(tree.scratch[1:, 0])
            sources.append(own.expand(tree.tree.rows - 1))
    return _copies(sources, targets)


def after_walk(
    trees: Sequence[TreeRows], paths: Sequence[Sequence[int]], block_table: Tensor, block_size: int
) -> BlockCopies:
    """Copies the scratch of the last accepted row, which holds its whole path, over the request's own blocks.

    Slots behind the path receive what scratch happens to hold: each is written again before it is read.

    Args:
        trees: verified in this step.
        paths: accepted rows of each tree, without the root.
        block_table: [requests, blocks], of the whole batch.
        block_size: tokens per block.
    """
    sources, targets = [], []
    for tree, path in zip(trees, paths, strict=True):
        if path:
            block = tree.first_block(block_size)
            used = (tree.base + len(path)) // block_size - block + 1
            sources.append(tree.scratch[path[-1], :used])
            targets.append(block_table[tree.request, block : block + used].long())
    return _copies(sources, targets)


def _copies(sources: list[Tensor], targets: list[Tensor]) -> BlockCopies:
    nothing = [torch.empty(0, dtype=torch.long)]
    return BlockCopies(torch.cat(sources or nothing), torch.cat(targets or nothing))
