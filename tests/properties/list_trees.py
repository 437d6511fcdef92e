"""Draft trees as lists, one at a time on the host: the twin that trees as tensors are compared with.

A tree is divided into paths, whose rows share the blocks behind the request's prefix: those of the first path, which
begins at the root, are the request's own; each other path has scratch blocks, which hold a copy of the prefix's last,
partly filled block and the keys and values of the path's rows and of their ancestors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from vllm_spac.methods.trees.growth import Growth
from vllm_spac.methods.trees.tensors import BlockCopies, Scattered, VirtualBatch

Paths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DraftTree:
    """Draft tokens of one request. Row 0 is the root, the last token of the request; row i > 0 is draft i - 1.

    A parent comes before its children, and nodes are in descending order of their probability. So the first n rows are
    a tree for each n: the most probable one of this size.

    Attributes:
        tokens: draft tokens, [n].
        parents: row of each row's parent, [n + 1]; -1 for the root.
        reached: probability, by the drafter, that a row is reached, [n + 1]; 1 for the root.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    reached: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.reached) == len(self.tokens) + 1
        assert self.parents[0] == -1 and all(0 <= parent < row for row, parent in enumerate(self.parents) if row)

    @classmethod
    def chain(cls, tokens: Sequence[int], reached: Sequence[float] | None = None) -> DraftTree:
        """Draft tokens that follow one another."""
        count = len(tokens)
        return cls(tuple(tokens), tuple(range(-1, count)), tuple(reached or (1.0,) * (count + 1)))

    @property
    def rows(self) -> int:
        """Number of rows, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Number of ancestors of each row, [n + 1]."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> tuple[dict[int, int], ...]:
        """Children of each row as token -> row, [n + 1]."""
        children: list[dict[int, int]] = [{} for _ in self.parents]
        for row, (parent, token) in enumerate(zip(self.parents[1:], self.tokens, strict=True), 1):
            children[parent].setdefault(token, row)
        return tuple(children)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The rows as one path per leaf: a row's path goes on to its most probable child, the others begin paths."""
        paths: list[list[int]] = [[0]]
        of = [0]  # number of each row's path
        for row, parent in enumerate(self.parents[1:], 1):
            if paths[of[parent]][-1] == parent:
                paths[of[parent]].append(row)
                of.append(of[parent])
            else:
                paths.append([row])
                of.append(len(paths) - 1)
        return tuple(map(tuple, paths))

    @property
    def branches(self) -> bool:
        """Whether some draft token does not follow the one before it."""
        return any(parent != row for row, parent in enumerate(self.parents[1:]))

    def path(self, row: int) -> list[int]:
        """Rows from the root to ``row``, both included."""
        path = [row]
        while path[-1]:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def cut(self, drafts: int) -> DraftTree:
        """The tree of the first ``drafts`` draft tokens."""
        if drafts >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:drafts], self.parents[: drafts + 1], self.reached[: drafts + 1])

    def best_chain(self) -> DraftTree:
        """The path to the most probable of the deepest nodes, as a tree without branches."""
        deepest = max(self.depths)
        path = self.path(self.depths.index(deepest))
        assert math.isclose(self.reached[0], 1.0)
        return self.chain([self.tokens[row - 1] for row in path[1:]], [self.reached[row] for row in path])


class Walk:
    """One step's walk through the trees of its requests, one level at a time, all requests together.

    At each node the target chooses once: its best token, or one draw from its processed distribution. If the choice is
    a child of the node, the walk goes on there. The emitted tokens are distributed exactly as without drafts, and no
    lossless rule accepts more of a given set of candidates: the chance to go on is the target's mass on the children.

    Args:
        trees: one per request; a request without drafts has a tree without draft tokens.

    Attributes:
        at: row of each request's tree that the target chooses at.
        walking: whether each request goes on.
        tokens: emitted tokens per request.
        paths: accepted rows per request, without the root.
    """

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        self._trees = trees
        self.at = [0] * len(trees)
        self.walking = [True] * len(trees)
        self.tokens: list[list[int]] = [[] for _ in trees]
        self.paths: list[list[int]] = [[] for _ in trees]

    @property
    def over(self) -> bool:
        return not any(self.walking)

    def advance(self, chosen: Sequence[int]) -> None:
        """Emits one token per walking request; ``chosen``: the target's choice at each ``at``, any for the others."""
        for request, (tree, token) in enumerate(zip(self._trees, chosen, strict=True)):
            if not self.walking[request]:
                continue
            self.tokens[request].append(token)
            child = tree.children[self.at[request]].get(token)
            if child is None:
                self.walking[request] = False
            else:
                self.at[request] = child
                self.paths[request].append(child)


def walk(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """(accepted rows without the root, emitted tokens) of one tree, given the target's choice at every row."""
    one = Walk([tree])
    while not one.over:
        one.advance([chosen[one.at[0]]])
    return one.paths[0], one.tokens[0]


def trees_of(growth: Growth, nodes: int) -> list[DraftTree]:
    """The tree of each request, with at most ``nodes`` draft tokens."""
    parts = (part.cpu() for part in growth.chosen()[:3])
    return [
        DraftTree(
            tuple(tokens[:nodes].tolist()),
            tuple(parents[: nodes + 1].tolist()),
            (1.0, *logp[:nodes].double().exp().tolist()),
        )
        for tokens, parents, logp in zip(*parts, strict=True)
    ]


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
