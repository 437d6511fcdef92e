"""What experts did lately, for somebody who looks at a running engine; nothing is kept otherwise."""

from __future__ import annotations

import numpy as np

_FADING = 0.95  # per step: a step of 14 steps ago counts half


class ExpertActivity:
    """Heat of each expert, and which the CPU computed. Called by the forward thread only.

    Args:
        keys: number of experts.

    Attributes:
        heat: float32 [keys], steps that selected each expert, the latest counting most: below 20.
        computed: bool [keys], experts that the CPU has computed since the last ``take_computed``.
    """

    def __init__(self, keys: int) -> None:
        self.heat = np.zeros(keys, dtype=np.float32)
        self.computed = np.zeros(keys, dtype=bool)

    def observe(self, counts: np.ndarray) -> None:
        """A step has finished; ``counts`` as in ``Policy.observe``."""
        self.heat *= _FADING
        self.heat += counts > 0

    def take_computed(self) -> np.ndarray:
        """Returns ``computed`` and begins anew."""
        taken, self.computed = self.computed, np.zeros_like(self.computed)
        return taken
