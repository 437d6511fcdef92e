"""What balancers share whose plans leave experts to the CPU that may get slots afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_spac.decisions.balancers.base import Balancer, LayerState


class Admitting(Balancer):
    """A balancer by whose plans experts that ran on the CPU may get slots in the background.

    Args:
        admit: whether they do, see ``admits``. Without it, slots go stale where the CPU computes most misses.
    """

    def __init__(self, *, admit: bool = True, **shape: Any) -> None:
        super().__init__(**shape)
        self.admits = admit


def least_likely_first(state: LayerState, missing: np.ndarray) -> np.ndarray:
    """Returns the experts ``missing`` with those that are least likely to be selected again first, ties as given."""
    return missing[np.argsort(state.likely[missing], kind="stable")] if len(state.likely) else missing
