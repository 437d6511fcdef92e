"""MoE-Spec's fixed ranking (Eq. 4): by how often each expert was selected in the calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from vllm_spac.methods.moe_spec.calibration import Calibration
from vllm_spac.methods.moe_spec.rankings import LayerContext, Ranking


@dataclass(kw_only=True, eq=False)
class Static(Ranking):
    """The same experts in every step."""

    counts: Tensor  # int64 [L, N], selections of each expert
    needs_calibration: ClassVar[bool] = True

    @classmethod
    def _calibrated(cls, calibration: Calibration) -> dict[str, Any]:
        return {"counts": calibration.counts}

    def scores(self, probs: Tensor, context: LayerContext) -> Tensor:
        return self.counts[context.layer]
