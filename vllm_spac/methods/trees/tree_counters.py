"""Counts of verified trees, added up where the trees are."""

from __future__ import annotations

import torch
from torch import Tensor


class TreeCounters:
    """Counts since the start of the worker; ``depth``: most tokens of a tree that can be accepted."""

    def __init__(self, depth: int, device: torch.device | str = "cpu") -> None:
        # verified drafts that the trees' drafter did not propose, e.g. vLLM's padding of a resumed request
        self.unknown = self._skipped = 0
        self._accepted = torch.zeros(depth + 1, dtype=torch.long, device=device)
        self._kinds = torch.zeros(3, dtype=torch.long, device=device)  # trees, chains, nodes

    def add_unknown(self, requests: int) -> None:
        """Adds drafts that are unknown, and that ``add_step`` is not told of."""
        self.unknown += requests
        self._skipped += requests

    def add_step(self, parents: Tensor, rows: Tensor, accepted: Tensor) -> None:
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
        """The counts as plain data; waits for the device.

        Returns:
            ``trees``: ``trees`` that branch, ``chains``, ``unknown`` (of the chains), and their ``nodes``.
            ``tree_accepted``: verified drafts by the number of their tokens that were accepted.
        """
        trees, chains, nodes = self._kinds.tolist()
        accepted = {str(depth): count for depth, count in enumerate(self._accepted.tolist()) if count}
        counts = {"trees": trees, "chains": chains + self._skipped, "unknown": self.unknown, "nodes": nodes}
        return {"tree_accepted": accepted, "trees": counts}
