"""Verifies draft trees: the target's own choice at a node is emitted, and decides which child is visited next."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_spac.speculation.trees.draft_tree import DraftTree


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
