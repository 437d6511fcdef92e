"""Which experts of each layer forwards with many rows use, as those of prompts. Pure."""

from __future__ import annotations

import numpy as np

_PAIRS = 4  # (row, expert) pairs per expert from which a forward may use most experts
_GAIN = 0.5  # weight of the last forward
_EXPECTED = 0.5  # share of forwards from which an expert is expected
_RIGHT = 0.95  # share of the named experts that must have been used
_LEAST = 16  # named experts by which that is judged
_WINDOW = 8  # forwards


class LayerUse:
    """Names experts that a layer will use, if such names were right before for about as many rows.

    An expert is expected if the last forward used it, or most of those before. Whether that is worth a read depends on
    the model: over the rows of a prompt some use nearly all experts of each layer, others a part that follows the text.

    Args:
        layers, experts: numbers of layers, and of experts per layer.
        top_k: experts per row.
    """

    def __init__(self, layers: int, experts: int, top_k: int) -> None:
        self.layers = layers
        self._least_rows = -(-_PAIRS * experts // top_k)
        self._shares = np.zeros((layers, experts), dtype=np.float32)
        self._named: dict[int, np.ndarray] = {}  # by layer, until it runs
        self._judged: dict[int, tuple[float, float]] = {}  # by the binary logarithm of rows: named experts, used ones

    def counts(self, rows: int) -> bool:
        """Whether a forward has so many ``rows`` that it may use most experts of a layer."""
        return rows >= self._least_rows

    def observe(self, layer: int, rows: int, used: np.ndarray) -> None:
        """A forward with many ``rows`` uses the experts ``used`` of a layer, int [n]."""
        if (named := self._named.pop(layer, None)) is not None:
            size, keep = rows.bit_length(), 1 - 1 / (_WINDOW * self.layers)
            before, right = self._judged.get(size, (0.0, 0.0))
            self._judged[size] = keep * before + len(named), keep * right + len(np.intersect1d(named, used))
        self._shares[layer] *= 1 - _GAIN
        self._shares[layer, used] += _GAIN

    def name(self, layer: int, rows: int, missing: np.ndarray) -> np.ndarray:
        """Returns the experts to read for a layer that runs next with ``rows`` rows, int [n], the likeliest first.

        Args:
            missing: bool [experts], those without a slot.
        """
        shares = np.where(missing, self._shares[layer], 0)
        order = np.argsort(-shares, kind="stable")
        self._named[layer] = named = order[: np.count_nonzero(shares >= _EXPECTED)]
        judged, right = self._judged.get(rows.bit_length(), (0.0, 0.0))
        return named if judged >= _LEAST and right >= _RIGHT * judged else named[:0]
