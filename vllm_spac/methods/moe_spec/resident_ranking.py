"""Ranking by router mass with a bonus for resident experts, so that the budget mainly cuts misses (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking, best, router_mass


@dataclass(kw_only=True, eq=False)
class Resident(Ranking):
    """The experts with the highest s_i + bonus * mean(s) * resident_i.

    Attributes:
        bonus: >= 0, in units of the mean router mass per expert. 0 gives the ranking ``router``.
    """

    bonus: float = 1.0
    needs_resident: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bonus >= 0:
            raise ConfigError(f"spac: bonus={self.bonus}: use 0 or more")

    def rank(self, probs: Tensor, votes: Tensor | None, budget: int, context: LayerContext | None = None) -> Tensor:
        assert context is not None and context.resident is not None, "the ranking resident needs context.resident"
        return rank(probs, votes, budget, context.resident, self.bonus)

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        assert context.resident is not None, "the ranking resident needs context.resident"
        return preferred(router_mass(probs), context.resident, self.bonus)


def rank(probs: Tensor, votes: Tensor | None, budget: int, resident: Tensor, bonus: float = 1.0) -> Tensor:
    """float [rows, N], float64 [rows], bool [N] -> int64 [budget]; see ``Ranking.rank``."""
    mass = router_mass(probs, votes)
    assert resident.shape == mass.shape, "whether each expert is resident"
    return best(preferred(mass, resident, bonus), budget)


def preferred(mass: Tensor, resident: Tensor, bonus: float) -> Tensor:
    """float64 [N]: the router mass [N] of each expert, and ``bonus`` mean masses for those that are resident."""
    return mass + bonus * mass.mean() * resident
