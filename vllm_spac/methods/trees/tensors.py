"""Draft trees as tensors of fixed shape, for a model runner whose drafts never leave the device.

What ``draft_tree`` and ``virtual_batch`` do tree by tree on the host is done here
for all requests at once and without waiting for the device, whose trees' paths the host does not know: each row has
blocks of its own, as if it were a path. Property tests compare the two.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vllm_spac.methods.trees.growth import Chosen
from vllm_spac.methods.trees.virtual_batch import BlockCopies, Scattered, with_scratch

FILLER = -2  # parent of a row that is no draft: it fills up a chain that is shorter than a tree
NOWHERE = -1  # slot that no key is written to; ancestor that a row does not have


class TreeTensors(NamedTuple):
    """Trees of n drafts and at most D levels, one per request.

    Attributes:
        parents: int64 [requests, n + 1], row that each row follows; -1 for the root, ``FILLER`` for rows to be ignored.
        depths: int64 [requests, n + 1], number of ancestors; 1 for filler.
        lineage: int64 [requests, n + 1, D + 1], a row's ancestor at each depth, itself at its own, then ``NOWHERE``.
    """

    parents: Tensor
    depths: Tensor
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


def best_chains(tokens: Tensor, trees: TreeTensors, where: Tensor) -> tuple[Tensor, TreeTensors]:
    """Replaces some trees by the path to the most probable of their deepest nodes, as ``DraftTree.best_chain``.

    Args:
        tokens: int64 [requests, n].
        trees: of the same requests.
        where: bool [requests], which are replaced.

    Returns:
        (tokens, trees), with filler behind the drafts of a chain.
    """
    nodes, depth = tokens.shape[1], trees.lineage.shape[2] - 1
    deepest = trees.depths.argmax(1)  # the first of them, which is the most probable
    path = trees.lineage[torch.arange(len(tokens), device=tokens.device), deepest][:, 1 : nodes + 1]
    along = tokens.gather(1, (path - 1).clamp(min=0))
    shown = torch.cat([along, tokens[:, :1].expand(-1, max(0, nodes - depth))], 1)
    row = torch.arange(-1, nodes, device=tokens.device)
    parents = torch.where(row < trees.depths.amax(1, keepdim=True), row, FILLER)
    chains = TreeTensors.of(torch.where(where[:, None], parents, trees.parents), depth)
    return torch.where(where[:, None], shown, tokens), chains


def trees_of(chosen: Chosen, depth: int, chain: Tensor) -> tuple[Tensor, TreeTensors]:
    """(tokens [requests, n], trees) of what the drafter chose; requests where ``chain`` is set get a chain."""
    return best_chains(chosen.tokens, TreeTensors.of(chosen.parents, depth), chain)


class TensorRows(NamedTuple):
    """The rows of the trees in a forward, one tree after the other, int64 [N] each.

    Attributes:
        tree: number of the row's tree.
        row: the row's number in it.
        token: the row of the forward.
        sequence: the sequence that attention sees the row as.
    """

    tree: Tensor
    row: Tensor
    token: Tensor
    sequence: Tensor


class StepTrees(NamedTuple):
    """The trees that a step verifies, T of them.

    Attributes:
        trees: [T, ...].
        rows: those that are verified: a tree may have been cut.
        bases: int64 [T], position of each root.
        tables: int [T, blocks], block table of each request.
        scratch: int64 [T, n + 1, blocks per node].
    """

    trees: TreeTensors
    rows: TensorRows
    bases: Tensor
    tables: Tensor
    scratch: Tensor

    @property
    def positions(self) -> Tensor:
        """int64 [N], of each row."""
        return self.bases[self.rows.tree] + self.trees.depths[self.rows.tree, self.rows.row]

    @property
    def linear(self) -> Tensor:
        """int64 [N], the position of each row in a chain."""
        return self.bases[self.rows.tree] + self.rows.row

    def sequences(self, owner: Tensor, lengths: Tensor, table: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """(tokens, block table) of each sequence, as ``virtual_batch`` makes them.

        Args:
            owner: int64 [S], request of the batch that each sequence is of.
            lengths: int32 [requests], tokens of each request, its rows included.
            table: [requests, blocks].
            block_size: tokens per block.
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
    """What the target accepted.

    Attributes:
        last: int64 [requests], last accepted row of each tree; 0: none but the root.
        path: int64 [requests, D + 1], the rows from the root to ``last``, then -1.
        tokens: int64 [requests, D + 1], emitted: the target's choice at each row of the path, then -1.
        emitted: int32 [requests], how many those are.
    """

    last: Tensor
    path: Tensor
    tokens: Tensor
    emitted: Tensor


def walk(trees: TreeTensors, tokens: Tensor, rows: Tensor, chosen: Tensor) -> Walked:
    """Walks all trees, as ``draft_tree.Walk`` does.

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
        match = known & (trees.parents == at[:, None]) & (tokens == chosen.gather(1, at[:, None]))
        at = torch.where(match.any(1), match.int().argmax(1), at)
    path = trees.lineage[everyone, at]
    emitted = chosen.gather(1, path.clamp(min=0)).masked_fill(path < 0, -1)
    return Walked(at, path, emitted, (path >= 0).sum(1).int())
