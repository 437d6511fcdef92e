"""The batch as attention sees it while trees are verified: a row is a sequence.

Each row of a tree is a one-token decode of its own sequence, whose block table is the request's prefix followed by
scratch blocks of its own. The scratch holds a copy of the prefix's last, partly filled block and the keys and values of
the row's ancestors at the positions that they would have in a chain. An ordinary causal kernel then computes attention
over the tree, and the scratch blocks of the accepted row are the request's next blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.speculation.trees.draft_tree import DraftTree


def scratch_blocks(depth: int, block_size: int) -> int:
    """Most blocks that the tokens behind a prefix of any length need: a root, and a path of ``depth`` drafts."""
    return (block_size - 1 + depth) // block_size + 1


@dataclass(frozen=True)
class TreeRows:
    """The rows of one request's tree in a forward.

    Attributes:
        request: its number in the batch.
        start: first row, the root's.
        base: tokens of the request whose keys and values are in its blocks: the position of the root.
        tree: what is verified.
        scratch: int64 [rows, blocks], scratch blocks of each row; those of the root are not used.
    """

    request: int
    start: int
    base: int
    tree: DraftTree
    scratch: Tensor

    def first_block(self, block_size: int) -> int:
        """Number, in the request, of the first block that scratch replaces."""
        return self.base // block_size

    def positions(self) -> Tensor:
        """int64 [rows]: the position of each row."""
        return self.base + torch.tensor(self.tree.depths)


class VirtualBatch(NamedTuple):
    """Attention metadata of a batch whose tree rows are sequences.

    Attributes:
        query_start: int32 [S + 1], first row of each sequence.
        lengths: int32 [S], tokens of each sequence, its query rows included.
        block_table: [S, blocks], as the request's own.
    """

    query_start: Tensor
    lengths: Tensor
    block_table: Tensor


class Scattered(NamedTuple):
    """Keys and values that are written to scratch besides their own slots.

    Attributes:
        rows: int64 [pairs], row of the forward that they are of.
        slots: int64 [pairs], slot in the cache that they go to.
    """

    rows: Tensor
    slots: Tensor


def virtual_batch(
    query_start: Tensor, lengths: Tensor, block_table: Tensor, trees: Sequence[TreeRows], block_size: int
) -> VirtualBatch:
    """Makes each row of ``trees`` a sequence; other requests remain one each.

    Args:
        query_start: int32 [R + 1], first row of each request.
        lengths: int32 [R], tokens of each request, its rows included.
        block_table: [R, blocks].
        trees: in ascending order of requests.
        block_size: tokens per block.
    """
    rows = torch.ones(len(lengths), dtype=torch.long)
    for tree in trees:
        rows[tree.request] = tree.tree.rows
    owner = torch.arange(len(lengths)).repeat_interleave(rows)
    first = rows.cumsum(0) - rows
    starts, ends, table = query_start[owner], lengths[owner], block_table[owner]
    for tree in trees:
        here = slice(int(first[tree.request]), int(first[tree.request]) + tree.tree.rows)
        starts[here] = torch.arange(tree.start, tree.start + tree.tree.rows, dtype=starts.dtype)
        ends[here] = (tree.positions() + 1).to(ends.dtype)
        block = tree.first_block(block_size)
        used = min(tree.scratch.shape[1], table.shape[1] - block)
        table[here.start + 1 : here.stop, block : block + used] = tree.scratch[1:, :used].to(table.dtype)
    return VirtualBatch(torch.cat([starts, query_start[-1:]]), ends, table)


def scattered(trees: Sequence[TreeRows], block_size: int) -> Scattered:
    """Where the keys and values of each node's ancestors, its own included, go in the node's scratch."""
    rows, slots = [], []
    for tree in trees:
        nodes, ancestors = _lineage(tree.tree.parents)
        place = tree.positions()[ancestors] - tree.first_block(block_size) * block_size
        rows.append(tree.start + ancestors)
        slots.append(tree.scratch[nodes, place // block_size] * block_size + place % block_size)
    return Scattered(torch.cat(rows), torch.cat(slots))


@lru_cache(maxsize=256)
def _lineage(parents: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(node, ancestor) pairs, int64 [pairs] each, of every node but the root; a node is an ancestor of itself."""
    lines: list[list[int]] = [[0]]
    for node, parent in enumerate(parents[1:], 1):
        lines.append([*lines[parent], node])
    nodes = torch.tensor([node for node, line in enumerate(lines) for _ in line if node], dtype=torch.long)
    return nodes, torch.tensor([row for line in lines[1:] for row in line], dtype=torch.long)


class LevelBatch(NamedTuple):
    """A level of growing trees, as the drafter's attention sees it: each expanded node is a sequence of one token.

    Attributes:
        lengths: int32 [R * F], tokens of each sequence, its query included.
        positions: int64 [R * F], position of each query.
        block_table: [R * F, blocks].
        slots: int64 [R * F], slot of each query's keys and values.
    """

    lengths: Tensor
    positions: Tensor
    block_table: Tensor
    slots: Tensor


def level_batch(block_table: Tensor, bases: Tensor, level: int, scratch: Tensor, block_size: int) -> LevelBatch:
    """The sequences of one level of growth.

    Args:
        block_table: [R, blocks] of the requests.
        bases: int64 [R], tokens of each request in the drafter's cache.
        level: of the nodes that are expanded, from 1.
        scratch: int64 [R, F, blocks per node].
        block_size: tokens per block.
    """
    front = scratch.shape[1]
    position = bases + level - 1
    first = bases // block_size
    place = position // block_size - first
    block = scratch.gather(2, place[:, None, None].expand(-1, front, 1))[..., 0]
    table = block_table[:, None].expand(-1, front, -1).flatten(0, 1)
    return LevelBatch(
        lengths=(position + 1).repeat_interleave(front).int(),
        positions=position.repeat_interleave(front),
        block_table=with_scratch(table, first.repeat_interleave(front), scratch.flatten(0, 1)),
        slots=(block * block_size + (position % block_size)[:, None]).flatten(),
    )


def with_scratch(tables: Tensor, first: Tensor, scratch: Tensor) -> Tensor:
    """Block tables in which scratch replaces the blocks from ``first`` on; blocks that do not fit are left out.

    Args:
        tables: [S, blocks].
        first: int64 [S].
        scratch: int64 [S, blocks per node].
    """
    wide = torch.cat([tables, tables.new_zeros(len(tables), scratch.shape[1])], 1)
    columns = first[:, None] + torch.arange(scratch.shape[1], device=tables.device)
    return wide.scatter_(1, columns, scratch.to(tables.dtype))[:, : tables.shape[1]].contiguous()
