"""The contract of a predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


class Signal(StrEnum):
    """What a predictor may look at."""

    COUNTS = "counts"  # rows that selected each expert, when a step is over
    ROUTER = "router"  # what a layer's router saw and chose, before the layer's experts are loaded


class Predictor(ABC):
    """Scores experts by how much they will be needed. Moves nothing, and the same calls give the same scores.

    Built with ``num_experts``, the number of keys: the experts of all layers together.

    Attributes:
        looks_at: the signals that it must be given; a prefetcher refuses a predictor that asks for others than it has.
        offline: why no engine can serve with it; empty if one can.
        scores: int64 [keys]; 0 for an expert that is not worth fetching. Replaced and never written to.
    """

    looks_at: ClassVar[frozenset[Signal]] = frozenset({Signal.COUNTS})
    offline: ClassVar[str] = ""
    scores: np.ndarray

    @abstractmethod
    def observe_step(self, counts: np.ndarray) -> None:
        """A step is over (``Signal.COUNTS``).

        Args:
            counts: int [keys], rows that selected each expert; ``NOT_RUN`` (-1) for the experts of a layer that did not
                run.
        """

    def observe_layer(self, layer: int, hidden: Tensor, weights: Tensor, ids: Tensor) -> None:
        """A layer's router has chosen (``Signal.ROUTER``).

        Args:
            layer: its number.
            hidden: [rows, d], what the router saw, without padding.
            weights: float [rows, k], what it gave the experts ``ids``, int [rows, k].
        """
