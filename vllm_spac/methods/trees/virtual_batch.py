"""The batch as attention sees it while trees are verified: a row is a sequence.

Each row of a tree is a one-token decode of its own sequence, in which it is at the position that it would have in a
chain. A tree is divided into paths, whose rows share the blocks behind the request's prefix: those of the first path,
which begins at the root, are the request's own; each other path has scratch blocks, which hold a copy of the prefix's
last, partly filled block and the keys and values of the path's rows and of their ancestors. A row's sequence ends at
the row, so that it does not see those that follow on its path. An ordinary causal kernel then computes attention over
the tree, and the blocks of an accepted row's path are the request's next blocks: they are copied after verification.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.methods.trees.draft_tree import DraftTree

Paths = tuple[tuple[int, ...], ...]


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
        paths: its rows, those of the root's path first; within each, a row's parent comes right before it.
        scratch: int64 [paths - 1, blocks], scratch blocks of each path but the first.
    """

    request: int
    start: int
    base: int
    tree: DraftTree
    paths: Paths
    scratch: Tensor

    def first_block(self, block_size: int) -> int:
        """Number, in the request, of the first block that scratch replaces."""
        return self.base // block_size

    def positions(self) -> Tensor:
        """int64 [rows]: the position of each row."""
        return self.base + torch.tensor(self.tree.depths)

    def blocks(self, block_table: Tensor, block_size: int) -> Tensor:
        """int64 [paths, blocks]: where the rows of each path, and their ancestors behind the prefix, are stored."""
        columns = self.first_block(block_size) + torch.arange(self.scratch.shape[1])
        own = block_table[self.request, columns.clamp(max=block_table.shape[1] - 1)].long()
        return torch.cat([own[None], self.scratch])


class VirtualBatch(NamedTuple):
    """Attention metadata of a batch whose sequences are the rows of trees, and requests without one.

    Attributes:
        query_start: int32 [S + 1], first row of each sequence.
        lengths: int32 [S], tokens of each sequence, its query rows included.
        block_table: [S, blocks], as the request's own.
    """

    query_start: Tensor
    lengths: Tensor
    block_table: Tensor


class Scattered(NamedTuple):
    """Keys and values that are written besides the slots that their rows have in a chain.

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
    rows = [1] * len(lengths)
    for tree in trees:
        rows[tree.request] = tree.tree.rows
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(rows))
    first = list(itertools.accumulate(rows, initial=0))
    starts, ends, table = query_start[owner], lengths[owner], block_table[owner]
    for tree in trees:
        here = slice(first[tree.request], first[tree.request + 1])
        starts[here] = torch.arange(tree.start, tree.start + tree.tree.rows, dtype=starts.dtype)
        ends[here] = (tree.positions() + 1).to(ends.dtype)
        block = tree.first_block(block_size)
        used = min(tree.scratch.shape[1], table.shape[1] - block)
        path, elsewhere = _places(tree.paths)
        table[here][elsewhere, block : block + used] = tree.scratch[path, :used].to(table.dtype)
    return VirtualBatch(torch.cat([starts, query_start[-1:]]), ends, table)


@lru_cache(maxsize=256)
def _places(paths: Paths) -> tuple[Tensor, Tensor]:
    """(path, row), int64 [rows] each, of the rows with scratch; the paths are counted from the first with scratch."""
    found = [(number, row) for number, path in enumerate(paths[1:]) for row in path]
    path, row = torch.tensor(found, dtype=torch.long).view(-1, 2).T
    return path, row


def scattered(trees: Sequence[TreeRows], block_table: Tensor, block_size: int) -> Scattered:
    """Where the keys and values of each path's rows and their ancestors go, if they are not there.

    Args:
        trees: verified in this step.
        block_table: [requests, blocks], of the whole batch.
        block_size: tokens per block.
    """
    rows, slots = [], []
    for tree in trees:
        path, row, depth = _lineage(tree.tree.parents, tree.paths)
        place = tree.base % block_size + depth
        rows.append(tree.start + row)
        blocks = tree.blocks(block_table, block_size)[path, place // block_size]
        slots.append(blocks * block_size + place % block_size)
    return Scattered(torch.cat(rows), torch.cat(slots))


@lru_cache(maxsize=256)
def _lineage(parents: tuple[int, ...], paths: Paths) -> Tensor:
    """(path, row, depth), int64 [3, pairs]: the rows from the root to each path's last one that are written again.

    The first path is in the request's own blocks, where a row has its slot already if it is as deep as in a chain.
    """
    lines: list[list[int]] = [[0]]
    for row, parent in enumerate(parents[1:], 1):
        lines.append([*lines[parent], row])
    written = [(0, row, depth) for depth, row in enumerate(paths[0]) if row != depth]
    for number, path in enumerate(paths[1:], 1):
        written += [(number, row, depth) for depth, row in enumerate(lines[path[-1]])]
    return torch.tensor(written, dtype=torch.long).view(-1, 3).T


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
