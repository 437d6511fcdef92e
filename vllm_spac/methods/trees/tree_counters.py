"""Counts of verified trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from vllm_spac.methods.trees.draft_tree import DraftTree


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


class DeviceCounters:
    """The same counts, added up on the device.

    Args:
        depth: most tokens of a tree that can be accepted.
        device: of the trees.
    """

    def __init__(self, depth: int, device: torch.device) -> None:
        self.host = TreeCounters()
        self._accepted = torch.zeros(depth + 1, dtype=torch.long, device=device)
        self._kinds = torch.zeros(3, dtype=torch.long, device=device)  # trees, chains, nodes

    def verified(self, parents: Tensor, rows: Tensor, accepted: Tensor) -> None:
        """Adds one step.

        Args:
            parents: int64 [requests, n + 1], as of ``TreeTensors``.
            rows: int64 [requests], rows that were verified; 1: the request had no drafts.
            accepted: int64 [requests], accepted drafts.
        """
        row = torch.arange(parents.shape[1], device=parents.device)
        drafts, known = rows > 1, row < rows[:, None]
        branches = (known & (parents >= 0) & (parents != row - 1)).any(1)
        nodes = (known & (parents >= 0)).sum(1)
        self._kinds += torch.stack([branches.sum(), (drafts & ~branches).sum(), nodes.sum()])
        self._accepted.scatter_add_(0, accepted, drafts.long())

    def snapshot(self) -> dict[str, dict[str, int]]:
        """As ``TreeCounters.snapshot``; waits for the device."""
        trees, chains, nodes = self._kinds.tolist()
        accepted = {str(depth): count for depth, count in enumerate(self._accepted.tolist()) if count}
        return TreeCounters(trees, chains + self.host.unknown, self.host.unknown, nodes, accepted).snapshot()
