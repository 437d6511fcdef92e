"""Knobs of the engine; ``config.SpacConfig`` has those of the product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_spac.errors import ConfigError
from vllm_spac.predictors.utility import UtilityEstimator, Variant


@dataclass(frozen=True, kw_only=True)
class EngineKnobs:
    """What the engine moves ahead of need.

    The paper's ablations: ``prefetch="off"`` is "w/o SG-Prefetcher"; policy ``lru`` beside ``prefetch="utility"`` is
    "w/o SG-Evictor"; ``upper=1`` is "w/o SpecUE"; ``boundaries=(3, 1)`` "w/o AdaBC"; ``threshold=2`` "w/o HetWB".

    Attributes:
        prefetch: ``utility`` reads missing experts whose score reaches the threshold.
        threshold: the lowest score worth fetching (the paper's tau), where no balancer says it.
        depth: experts that have a slot and are not read yet, at most; what they evicted is gone while they wait.
        background: reads ahead in flight at once; None is half of the I/O threads.
        gamma, upper, forget, variant, boundaries: of ``UtilityEstimator``, for a policy that has no ``scores`` to lend.
        poison: fill slots with NaN before they are loaded; for tests.
    """

    prefetch: Literal["off", "utility"] = "off"
    threshold: int = 1
    depth: int = 16
    background: int | None = None
    gamma: int = 8
    upper: int = 4
    forget: float = 0.1
    variant: Variant = "paper"
    boundaries: tuple[int, int] | None = None
    poison: bool = False

    def __post_init__(self) -> None:
        if self.prefetch not in ("off", "utility"):
            raise ConfigError(f"spac: prefetch={self.prefetch!r} is not known; use off or utility")
        if self.threshold < 1 or self.depth < 1 or (self.background is not None and self.background < 1):
            raise ConfigError("spac: threshold, depth and background of the prefetcher must be at least 1")
        self.estimator(1)  # refuses wrong knobs now, not in the first forward

    def estimator(self, experts: int) -> UtilityEstimator:
        """Scores for so many experts."""
        return UtilityEstimator(experts, self.gamma, self.upper, self.forget, self.variant, boundaries=self.boundaries)
