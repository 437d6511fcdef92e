"""The contract of a predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np


class Predictor(ABC):
    """Says how likely each expert is needed. Moves nothing.

    Attributes:
        offline: why no engine can serve with it; empty if one can.
    """

    offline: ClassVar[str] = ""

    @abstractmethod
    def update(self, counts: np.ndarray) -> np.ndarray:
        """Take in one step.

        Args:
            counts: int [keys], rows that selected each expert; -1 for an expert whose layer did not run.

        Returns:
            int64 [keys], the new scores.
        """
