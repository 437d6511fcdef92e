"""CPU experts that become slower than was measured at the start; loaded by name, as those of another package."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor

from vllm_spac.cpu_kernels.native import Native

LATE = {"seconds": 0.0}  # of each computation, beside its own; set while the engine serves


class LateExperts(Native):
    def run(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Mapping[str, Tensor]) -> Tensor:
        time.sleep(LATE["seconds"])
        return super().run(x, weights, ids, experts)
