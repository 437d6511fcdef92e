"""What drafts of Qwen3-30B-A3B, and what a draft costs on a machine: one account for every replay."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_spac.decisions.costs import Costs


@dataclass(frozen=True)
class DraftCost:
    """What a draft takes: ``nbytes`` of weights that it reads, and kernels of so many ``layers``."""

    nbytes: float
    layers: int

    def seconds(self, costs: Costs) -> float:
        """Returns the seconds of a draft on a machine."""
        return self.nbytes / costs.fast.bytes_per_second + self.layers * costs.vllm.layer


@dataclass(frozen=True)
class Drafter:
    """What drafts.

    Attributes:
        chains: whose chains it drafts, one of ``chains.DRAFTERS``; ``before``: whose are taken before them, if any.
        most: drafts of a step.
        chosen: whether the chooser says how many of them are verified.
    """

    chains: str
    cost: DraftCost
    most: int = 4
    before: str = ""
    chosen: bool = False


FREE = DraftCost(0, 0)
HEAD = DraftCost(290e6, 1)  # EAGLE-3 of Qwen3-30B-A3B: one layer, three of the target's streams in, 32,000 rows out
PARENT = DraftCost(4e9, 36)  # Qwen3-4B in FP8
