"""Ranking by router mass with a bonus for resident experts, so that the budget mainly cuts misses (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vllm_spac.errors import ConfigError
from vllm_spac.methods.moe_spec.rankings import LayerContext, Scored, router_mass


@dataclass(kw_only=True, eq=False)
class Resident(Scored):
    """The experts with the highest s_i + bonus * mean(s) * resident_i.

    Attributes:
        bonus: >= 0, in units of the mean router mass per expert. 0 gives the ranking ``router``.
    """

    bonus: float = 1.0
    needs_resident: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bonus >= 0:
            raise ConfigError(f"spac: bonus={self.bonus}: use 0 or more")

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        assert context.resident is not None, "the ranking resident needs context.resident"
        mass = router_mass(probs)
        return mass + self.bonus * mass.mean() * context.resident
