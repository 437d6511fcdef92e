"""A draft tree as lists: tokens that continue one another along several paths; each prefix of it is a tree.

The target's own choice at a node is emitted, and decides which child is visited next (``Walk``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
