"""The contract of a predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Signal(StrEnum):
    """Input that a predictor may need."""

    COUNTS = "counts"  # rows that selected each expert, after a step
    ROUTER = "router"  # input and choice of a layer's router, before the layer's experts are loaded


class Predictor(ABC):
    """Scores experts by how much they will be needed. Moves nothing, and is deterministic.

    Built with ``num_experts``, the number of keys: the experts of all layers together.

    Attributes:
        looks_at: the signals that it must be passed; a prefetcher refuses a predictor that needs a signal it lacks.
        offline: why no engine can serve with it; empty if one can.
        scores: int64 [keys]; 0 for an expert that is not worth fetching. Updates replace the array, none writes to it.
    """

    looks_at: ClassVar[frozenset[Signal]] = frozenset({Signal.COUNTS})
    offline: ClassVar[str] = ""
    scores: np.ndarray

    @abstractmethod
    def observe_step(self, counts: np.ndarray) -> None:
        """Updates the scores after a step (``Signal.COUNTS``).

        Args:
            counts: int [keys], rows that selected each expert, or float, the sum of their votes if these are weighted;
                ``NOT_RUN`` (-1) for the experts of a layer that did not run.
        """

    def observe_layer(self, layer: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
        """Updates the scores after a layer's router has chosen (``Signal.ROUTER``).

        Args:
            layer: number of the layer.
            hidden: [rows, d], input of the router, without padding.
            weights: float [rows, k], router weights of the experts ``ids``.
            ids: int [rows, k], the chosen experts.
        """
