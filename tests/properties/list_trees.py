"""Draft trees one at a time, in plain Python: what trees as tensors are compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from vllm_spac.methods.trees.growth import Growth


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


def walk(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """(accepted rows without the root, emitted tokens) of one tree, given the target's choice at every row."""
    path, tokens = [0], [chosen[0]]
    while (child := tree.children[path[-1]].get(tokens[-1])) is not None:
        path.append(child)
        tokens.append(chosen[child])
    return path[1:], tokens


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
