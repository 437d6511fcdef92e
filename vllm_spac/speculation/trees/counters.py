"""Counts of verified trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from vllm_spac.speculation.trees.draft_tree import DraftTree


@dataclass
class TreeCounters:
    """Counts since the start of the worker.

    Attributes:
        trees: verified trees that branch.
        chains: verified drafts that do not.
        unknown: of these, drafts that the trees' drafter did not propose, e.g. vLLM's padding of a resumed request.
        nodes: draft tokens that were verified.
        accepted: verified drafts by the number of their tokens that were accepted.
    """

    trees: int = 0
    chains: int = 0
    unknown: int = 0
    nodes: int = 0
    accepted: dict[str, int] = field(default_factory=dict)

    def verified(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Adds one request's drafts; ``path``: its accepted rows."""
        if tree.branches:
            self.trees += 1
        else:
            self.chains += 1
        self.nodes += len(tree.tokens)
        depth = str(len(path))
        self.accepted[depth] = self.accepted.get(depth, 0) + 1

    def snapshot(self) -> dict[str, dict[str, int]]:
        """A copy as plain data: ``trees``, and ``tree_accepted`` by the number of accepted tokens."""
        counts = asdict(self)
        return {"tree_accepted": counts.pop("accepted"), "trees": counts}
