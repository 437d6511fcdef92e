"""MoE-SpAc's score-guided evictor: evicts the expert with the lowest utility."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from vllm_spac.decisions.policies._sorted import SortedPolicy
from vllm_spac.decisions.policies.base import Formula, PolicyContext
from vllm_spac.methods.moe_spac.utility_predictor import UtilityEstimator, Variant


class UtilityFormula(Formula):
    """As ``Utility``, when no layer runs: nothing is recycled between two steps.

    Args:
        estimator: of all experts; owned.
        recycle: what is used now scores 0.
    """

    def __init__(
        self, estimator: UtilityEstimator, recycle: bool, layers: int, experts: int, device: torch.device
    ) -> None:
        super().__init__(layers, experts, device)
        self._estimator, self._recycle = estimator.on(device), recycle

    def observe_counts(self, counts: Tensor) -> None:
        self._estimator.update(counts)
        self.kept.copy_(self._estimator.scores)
        if not self._recycle:
            self.used.copy_(self.kept)


class Utility(SortedPolicy):
    """Evicts the expert with the lowest score, among equals the one used longest ago.

    Scores change in ``observe`` only, O(log n) per resident expert whose score changed; before the first call all are
    0, which is LRU.

    Args:
        gamma, upper, forget, variant, boundaries: as in ``UtilityEstimator``. Of a ``PolicyContext``, the gamma of the
            variant ``paper`` is the number of drafts, if it is known and no gamma is given.
        recycle: an expert's score counts as 0 from its use to the next ``observe`` (MoE-SpAc, appendix D), so that
            loads and reads ahead for later layers take the slots of layers that have finished.
    """

    predictor = "utility"
    on_device: ClassVar[bool] = True

    def __init__(
        self,
        *,
        gamma: int = 8,
        upper: int = 4,
        forget: float = 0.1,
        variant: Variant = "paper",
        boundaries: tuple[int, int] | None = None,
        recycle: bool = False,
    ) -> None:
        super().__init__()
        self._knobs: dict[str, Any] = {"gamma": gamma, "upper": upper, "forget": forget, "variant": variant}
        self._knobs["boundaries"] = boundaries
        self._recycle = recycle
        self._new(1)  # refuses wrong knobs now, not in the first forward
        self._estimator: UtilityEstimator | None = None
        self._scores: np.ndarray = np.zeros(0, dtype=np.int64)
        self._clock = 0
        self._recycled: set[int] = set()

    @classmethod
    def of(cls, context: PolicyContext, **knobs: Any) -> Self:
        if context.drafts is not None and UtilityEstimator.follows_drafts(knobs):
            knobs = {"gamma": context.drafts} | knobs
        return cls(**knobs)

    @property
    def scores(self) -> np.ndarray:
        return self._scores

    @property
    def recycled(self) -> Container[int]:
        return self._recycled

    def _new(self, experts: int) -> UtilityEstimator:
        return UtilityEstimator(experts, **self._knobs)

    def formula(self, layers: int, experts: int, device: torch.device) -> UtilityFormula:
        return UtilityFormula(self._new(layers * experts), self._recycle, layers, experts, device)

    def insert_ahead(self, key: int) -> None:
        self._clock += 1
        self._recycled.discard(key)
        self._place(key, (self._score(key), self._clock, key))

    def observe(self, counts: np.ndarray) -> None:
        if self._estimator is None:
            self._estimator = self._new(len(counts))
            self._scores = self._estimator.scores
        before = self._scores
        self._estimator.observe_step(counts)
        self._scores = self._estimator.scores
        changed = np.flatnonzero(before != self._scores).tolist()
        for key in self._recycled.union(changed) if self._recycled else changed:
            if key in self._rank:
                self._place(key, (self._score(key), self._rank[key][1], key))
        self._recycled.clear()

    def _rank_of_use(self, key: int) -> tuple:
        self._clock += 1
        if self._recycle:
            self._recycled.add(key)
        return (0 if self._recycle else self._score(key), self._clock, key)

    def _score(self, key: int) -> int:
        return int(self._scores[key]) if key < len(self._scores) else 0
