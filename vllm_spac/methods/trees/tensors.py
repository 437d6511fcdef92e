"""Draft trees as tensors of fixed shape: all requests at once, and without waiting for the device.

The batch as attention sees it while trees are verified: a row is a sequence. Each row of a tree is a one-token decode
of its own sequence, in which it is at the position that it would have in a chain. A root's keys are the request's own;
each other row has scratch blocks, which hold a copy of the prefix's last, partly filled block and the keys and values
of the row and its ancestors. A sequence ends at its row. An ordinary causal kernel then computes attention over the
tree, and the blocks of the last accepted row are the request's next blocks: they are copied after verification.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from vllm_spac.config.tree_shape import TreeShape
from vllm_spac.methods.trees.growth import Chosen

FILLER = -2  # parent of a row that is no draft: it fills up a chain that is shorter than a tree
NOWHERE = -1  # slot that no key is written to; ancestor that a row does not have


class VirtualBatch(NamedTuple):
    """Attention metadata of a batch whose sequences are the rows of trees, and requests without one."""

    query_start: Tensor  # int32 [S + 1], first row of each sequence
    lengths: Tensor  # int32 [S], tokens of each sequence, its query rows included
    block_table: Tensor  # [S, blocks], as the request's own


def scratch_blocks(depth: int, block_size: int) -> int:
    """Most blocks that the tokens behind a prefix of any length need: a root, and a path of ``depth`` drafts."""
    return (block_size - 1 + depth) // block_size + 1


class Scattered(NamedTuple):
    """Keys and values that are written besides the slots that their rows have in a chain."""

    rows: Tensor  # int64 [pairs], row of the forward that they are of
    slots: Tensor  # int64 [pairs], slot in the cache that they go to


class LevelBatch(NamedTuple):
    """A level of growing trees, as the drafter's attention sees it: each expanded node is a sequence of one token."""

    lengths: Tensor  # int32 [R * F], tokens of each sequence, its query included
    positions: Tensor  # int64 [R * F], position of each query
    block_table: Tensor  # [R * F, blocks]
    slots: Tensor  # int64 [R * F], slot of each query's keys and values


def level_batch(block_table: Tensor, bases: Tensor, level: int, scratch: Tensor, block_size: int) -> LevelBatch:
    """The sequences of one level of growth.

    Args:
        block_table: [R, blocks] of the requests.
        bases: int64 [R], tokens of each request in the drafter's cache.
        level: of the nodes that are expanded, from 1.
        scratch: int64 [R, F, blocks per node].
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
        """Copies inside the cache of one layer, [blocks, ...]; on a CPU three times as fast as by indices."""
        if len(self.sources):
            cache.index_copy_(0, self.targets, cache.index_select(0, self.sources))


class TreeTensors(NamedTuple):
    """Trees of n drafts and at most D levels, one per request."""

    # int64 [requests, n + 1], row that each row follows; -1 for the root, ``FILLER`` for rows to be ignored
    parents: Tensor
    depths: Tensor  # int64 [requests, n + 1], number of ancestors; 1 for filler
    # int64 [requests, n + 1, D + 1], a row's ancestor at each depth, itself at its own, then ``NOWHERE``
    lineage: Tensor

    @classmethod
    def of(cls, parents: Tensor, depth: int) -> TreeTensors:
        """Trees with these ``parents``, [requests, n + 1], none deeper than ``depth``."""
        before, row = parents.clamp(min=0), torch.arange(parents.shape[1], device=parents.device)
        climbed = [row.expand_as(parents)]
        for _ in range(depth):
            climbed.append(before.gather(1, climbed[-1]))
        ancestors = torch.stack(climbed, 2)  # the row itself, its parent, ...; at last the root again and again
        depths = (ancestors != 0).sum(2)
        steps = depths[..., None] - torch.arange(depth + 1, device=parents.device)
        lineage = ancestors.gather(2, steps.clamp(min=0)).masked_fill(steps < 0, NOWHERE)
        return cls(parents, depths, lineage)

    @classmethod
    def chains(cls, requests: int, nodes: int, depth: int, device: torch.device) -> TreeTensors:
        """Chains of ``depth`` drafts, filled up to ``nodes``."""
        row = torch.arange(-1, nodes, device=device)
        return cls.of(torch.where(row < depth, row, FILLER).expand(requests, -1).contiguous(), depth)

    def take(self, requests: Tensor) -> TreeTensors:
        """The trees of ``requests``, int64 [T]."""
        return TreeTensors(*(part[requests] for part in self))

    def put(self, requests: Tensor, trees: TreeTensors) -> None:
        """Replaces the trees of ``requests``, int64 [T]."""
        for mine, theirs in zip(self, trees, strict=True):
            mine[requests] = theirs


def best_chains(tokens: Tensor, logp: Tensor, trees: TreeTensors, where: Tensor) -> tuple[Tensor, Tensor, TreeTensors]:
    """Replaces some trees by the path to the most probable of their deepest nodes.

    Args:
        tokens: int64 [requests, n].
        logp: [requests, n], of each node.
        where: bool [requests], which are replaced.

    Returns:
        (tokens, logp, trees), with filler behind the drafts of a chain.
    """
    nodes, depth = tokens.shape[1], trees.lineage.shape[2] - 1
    deepest = trees.depths.argmax(1)  # the first of them, which is the most probable
    path = trees.lineage[torch.arange(len(tokens), device=tokens.device), deepest][:, 1 : nodes + 1]
    rest = path.new_ones(len(tokens), max(0, nodes - depth))
    source = torch.cat([path.clamp(min=1), rest], 1)[:, :nodes] - 1  # of filler: the first node
    row = torch.arange(-1, nodes, device=tokens.device)
    parents = torch.where(row < trees.depths.amax(1, keepdim=True), row, FILLER)
    chains = TreeTensors.of(torch.where(where[:, None], parents, trees.parents), depth)
    along, also = (torch.where(where[:, None], part.gather(1, source), part) for part in (tokens, logp))
    return along, also, chains


def trees_of(chosen: Chosen, depth: int, chain: Tensor) -> tuple[Tensor, Tensor, TreeTensors]:
    """(tokens, logp, trees) of what the drafter chose; where ``chain`` (bool [requests]) is set, of a chain."""
    return best_chains(chosen.tokens, chosen.logp, TreeTensors.of(chosen.parents, depth), chain)


class TensorRows(NamedTuple):
    """The rows of the trees in a forward, one tree after the other, int64 [N] each."""

    tree: Tensor  # number of the row's tree
    row: Tensor  # the row's number in it
    token: Tensor  # the row of the forward
    sequence: Tensor  # the sequence that attention sees the row as


@dataclass(frozen=True)
class Layout:
    """Where the rows of trees are in a batch; all that is known on the host."""

    requests: np.ndarray  # int64 [T], those whose drafts are trees
    rows: np.ndarray  # int64 [4, N], as ``TensorRows``
    roots: np.ndarray  # int64 [T], row of the forward of each root
    owner: np.ndarray  # int64 [S], request of each sequence that attention sees
    starts: np.ndarray  # int32 [S + 1], first row of each

    @classmethod
    def of(cls, starts: np.ndarray, drafts: np.ndarray, requests: np.ndarray) -> Layout:
        """The layout of a batch.

        Args:
            starts: int [R + 1], first row of each request.
            drafts: int [R], drafts of each.
            requests: int [T], ascending, those whose drafts are trees; each of their rows is one of a tree.
        """
        sequences = np.ones(len(drafts), dtype=np.int64)
        sequences[requests] = drafts[requests] + 1
        owner = np.repeat(np.arange(len(drafts)), sequences)
        first = np.cumsum(sequences) - sequences
        row = np.arange(len(owner)) - first[owner]  # 0 for plain requests
        begins = starts[:-1][owner] + row
        tree = np.full(len(drafts), -1)
        tree[requests] = np.arange(len(requests))
        sequence = np.flatnonzero(tree[owner] >= 0)
        rows = np.stack([tree[owner][sequence], row[sequence], begins[sequence], sequence])
        return cls(
            requests,
            rows.astype(np.int64),
            starts[requests].astype(np.int64),
            owner,
            np.append(begins, starts[-1]).astype(np.int32),
        )


class StepTrees(NamedTuple):
    """The trees that a step verifies, T of them."""

    trees: TreeTensors  # [T, ...]
    rows: TensorRows  # those that are verified: a tree may have been cut
    bases: Tensor  # int64 [T], position of each root
    tables: Tensor  # int [T, blocks], block table of each request
    scratch: Tensor  # int64 [T, n + 1, blocks per node]

    @property
    def positions(self) -> Tensor:
        """int64 [N], of each row."""
        return self.bases[self.rows.tree] + self.trees.depths[self.rows.tree, self.rows.row]

    @property
    def linear(self) -> Tensor:
        """int64 [N], the position of each row in a chain."""
        return self.bases[self.rows.tree] + self.rows.row

    def sequences(self, owner: Tensor, lengths: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """Returns the tokens [S] that each sequence attends to, and its block table [S, blocks].

        Args:
            owner: int64 [S], request of the batch that each sequence is of.
            lengths: int32 [requests], tokens of each request, its rows included.
            table: [requests, blocks].
        """
        tree, row, _, sequence = self.rows
        ends, tables = lengths[owner], table[owner]
        ends[sequence] = (self.positions + 1).to(ends.dtype)
        placed = with_scratch(tables[sequence], self.bases[tree] // block_size, self.scratch[tree, row])
        tables[sequence] = torch.where(row[:, None] == 0, tables[sequence], placed)  # a root's keys are the request's
        return ends, tables

    def scattered(self, block_size: int) -> Scattered:
        """Where the keys and values of each node's ancestors, its own included, go; ``NOWHERE`` for absent ones."""
        tree, row, _, _ = self.rows
        lineage = self.trees.lineage[tree, row]  # [N, D + 1]
        place = (self.bases[tree] % block_size)[:, None] + torch.arange(lineage.shape[1], device=lineage.device)
        blocks = self.scratch[tree, row].gather(1, (place // block_size).clamp(max=self.scratch.shape[2] - 1))
        slots = (blocks * block_size + place % block_size).masked_fill((lineage < 0) | (row == 0)[:, None], NOWHERE)
        first = self.rows.token - row
        return Scattered((first[:, None] + lineage.clamp(min=0)).flatten(), slots.flatten())

    def before_forward(self, block_size: int) -> BlockCopies:
        """Copies each prefix's last block to the first scratch block of each row; what a root gets is not used."""
        tree, row, _, _ = self.rows
        own = self.tables.gather(1, (self.bases // block_size)[:, None])[:, 0].long()
        return BlockCopies(own[tree], self.scratch[tree, row, 0])

    def after_walk(self, last: Tensor, block_size: int) -> BlockCopies:
        """Copies the scratch of the last accepted rows, int64 [T], over the requests' own blocks.

        Where fewer blocks are needed, the root's scratch, which is not used, is copied to itself.
        """
        tree = torch.arange(len(last), device=last.device)
        first = self.bases // block_size
        end = (self.bases + self.trees.depths[tree, last]) // block_size
        block = first[:, None] + torch.arange(self.scratch.shape[2], device=last.device)
        own = self.tables.gather(1, block.clamp(max=self.tables.shape[1] - 1)).long()
        used = (block <= end[:, None]) & (last != 0)[:, None]
        unused = self.scratch[:, 0, :1]
        return BlockCopies(
            torch.where(used, self.scratch[tree, last], unused).flatten(), torch.where(used, own, unused).flatten()
        )

    def as_chains(self, last: Tensor, rows: int) -> Tensor:
        """Order of the rows of the forward in which accepted ones come first in each tree, int64 [rows]."""
        tree, row, token, _ = self.rows
        lineage = self.trees.lineage[torch.arange(len(last), device=last.device), last]
        levels = lineage.shape[1]
        source = lineage[tree, row.clamp(max=levels - 1)]
        moved = (row < levels) & (source >= 0)
        order = torch.arange(rows, device=last.device)
        order[token] = torch.where(moved, token - row + source, token)
        return order


class Walked(NamedTuple):
    """What the target accepted."""

    last: Tensor  # int64 [requests], last accepted row of each tree; 0: none but the root
    path: Tensor  # int64 [requests, D + 1], the rows from the root to ``last``, then -1
    tokens: Tensor  # int64 [requests, D + 1], emitted: the target's choice at each row of the path, then -1
    emitted: Tensor  # int32 [requests], how many those are


def walk(trees: TreeTensors, tokens: Tensor, rows: Tensor, chosen: Tensor) -> Walked:
    """Walks all trees: at each node the target chooses once, and a choice that is a child of the node is visited next.

    The emitted tokens are distributed exactly as without drafts, and no lossless rule accepts more of a given set of
    candidates: the chance to go on is the target's mass on the children.

    Args:
        trees: [requests, ...].
        tokens: int64 [requests, n + 1], token of each row; negative: never accepted. That of the root is not read.
        rows: int64 [requests], rows of each tree that are verified.
        chosen: int64 [requests, n + 1], the target's choice at each row.
    """
    count, nodes = tokens.shape[0], tokens.shape[1] - 1
    everyone = torch.arange(count, device=tokens.device)
    row = torch.arange(nodes + 1, device=tokens.device)
    known = (row < rows[:, None]) & (tokens >= 0)
    at = torch.zeros_like(everyone)
    for _ in range(trees.lineage.shape[2] - 1):  # a leaf has no children: the walk stays there
        at, _ = descend(trees, tokens, known, at, chosen.gather(1, at[:, None])[:, 0])
    path = trees.lineage[everyone, at]
    emitted = chosen.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return Walked(at, path, emitted, (path >= 0).sum(1).int())


def descend(trees: TreeTensors, tokens: Tensor, known: Tensor, at: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """One level of all walks.

    Args:
        trees, tokens: as for ``walk``.
        known: bool [requests, n + 1], rows that may be accepted.
        at: int64 [requests], where each walk is.
        chosen: int64 [requests], the target's choice there.

    Returns:
        int64 [requests], where each walk is then; and bool [requests], whether it went on.
    """
    match = known & (trees.parents == at[:, None]) & (tokens == chosen[:, None])
    on = match.any(1)
    return torch.where(on, match.int().argmax(1), at), on


class Scratch:
    """The scratch blocks of an engine: the ids 1 to ``count``, which a new pool hands out first (0 is vLLM's own).

    Args:
        requests: most requests of a step.
    """

    def __init__(self, shape: TreeShape, requests: int, block_size: int, device: torch.device | str = "cpu") -> None:
        self.each = scratch_blocks(shape.depth, block_size)
        self._rows, self._front = shape.nodes + 1, shape.expanded
        self.count = requests * self.each * max(self._rows, 2 * self._front)
        self._ids = torch.arange(1, self.count + 1, device=device)

    def trees(self, count: int) -> Tensor:
        """Blocks of all rows of ``count`` trees of a step, int64 [count, n + 1, blocks of each]."""
        return self._of(count, self._rows)

    def levels(self, requests: int) -> Tensor:
        """Blocks of two levels of growth, int64 [2, requests, front, blocks of each].

        More requests than an engine has pad a graph: they all write to vLLM's own block.
        """
        return self._of(requests, 2, self._front).transpose(0, 1)

    def _of(self, *parts: int) -> Tensor:
        size = math.prod(parts) * self.each
        ids = self._ids[:size]
        return (ids if len(ids) == size else pad(ids, (0, size - len(ids)))).view(*parts, self.each)
