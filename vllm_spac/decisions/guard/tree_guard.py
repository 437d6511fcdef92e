"""The guard for draft trees: chooses among a few numbers of nodes, none included, as ``Guard`` does among lengths.

Nodes are in the order in which they are drafted, the most probable first. So a tree of n nodes shows what each smaller
one would have yielded: the accepted nodes among its first ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_spac.decisions.guard.acceptance import Acceptance
from vllm_spac.decisions.guard.guard import Guard

_STEPS = 4  # sizes besides none: each twice the one before
_SPREAD = 1.0  # assumed variance of what a step gains by a size, weighted as one step


def sizes_of(nodes: int) -> list[int]:
    """Numbers of nodes that are chosen among, ascending from 0 to ``nodes``."""
    return [0, *sorted({max(1, nodes >> power) for power in range(_STEPS)})]


class TreeAcceptance(Acceptance):
    """Mean tokens that each size of tree adds to the next smaller one; a decayed estimate.

    Args:
        sizes: as from ``sizes_of``.
        memory: verified steps after which an observation counts 1/e.
    """

    def __init__(self, sizes: Sequence[int], memory: int) -> None:
        super().__init__(len(sizes) - 1, memory)
        self._sizes = sizes
        self._squares = [0.0] * (len(sizes) - 1)
        self.paths: Sequence[Sequence[int]] | None = None  # accepted nodes per request of the step that is added next

    def update(self, drafts: int, emitted: Sequence[int]) -> None:
        """Adds one step; ``drafts``: number of its size. ``paths``, if given, divide the tokens among the sizes."""
        paths, self.paths = self.paths, None
        for size in range(drafts):
            low, high = self._sizes[size], self._sizes[size + 1]
            if paths is not None:
                gains = [sum(low < node <= high for node in path) for path in paths]
            elif drafts == 1:
                gains = [tokens - 1 for tokens in emitted]
            else:
                return
            self._trials[size] = self._keep * self._trials[size] + len(gains)
            self._accepted[size] = self._keep * self._accepted[size] + sum(gains)
            self._squares[size] = self._keep * self._squares[size] + sum(gain * gain for gain in gains)

    def fade(self, weight: float, start: int = 0) -> None:
        for size in range(start, len(self._trials)):
            keep = min(1.0, weight / max(1.0, self._trials[size]))
            for sums in (self._trials, self._accepted, self._squares):
                sums[size] *= keep

    def tokens(self) -> list[float]:
        """Expected tokens per request and step with each size; one not yet seen gains as much as the one before."""
        expected, gain = [1.0], 0.0
        for trials, accepted in zip(self._trials, self._accepted, strict=True):
            gain = accepted / trials if trials else gain
            expected.append(expected[-1] + gain)
        return expected

    def most(self, drafts: int) -> float:
        return 1.0 + self._sizes[drafts]

    def error(self, drafts: int) -> float:
        variance = 0.0
        for size in range(drafts):
            trials = self._trials[size] + 1
            mean = self._accepted[size] / trials
            variance += ((self._squares[size] + _SPREAD) / trials - mean * mean) / trials
        return math.sqrt(variance) / self.tokens()[drafts]


class TreeGuard(Guard):
    """A guard whose lengths are numbers of nodes.

    Args:
        nodes: of the largest tree.
    """

    def __init__(self, nodes: int, memory: int = 100) -> None:
        self.sizes = sizes_of(nodes)
        self._yield = TreeAcceptance(self.sizes, memory)
        super().__init__(len(self.sizes) - 1, memory=memory, acceptance=self._yield)

    def choose(self, requests: int | None = None) -> int:
        return self.sizes[super().choose(requests)]

    def accepted(self, paths: Sequence[Sequence[int]]) -> None:
        """Gives the accepted nodes per request of the step that is observed next."""
        self._yield.paths = paths

    def observe(self, drafts: int, emitted: Sequence[int], requests: int, seconds: float | None = None) -> None:
        """As ``Guard.observe``; ``drafts``: nodes, one of ``sizes``."""
        super().observe(self.sizes.index(drafts), emitted, requests, seconds)
        self._yield.paths = None

    def facts(self) -> dict:
        facts = super().facts()
        steps = {self.sizes[length]: count for length, count in facts["steps"].items()}
        return facts | {"draft_length": self.sizes[facts["draft_length"]], "steps": steps}
