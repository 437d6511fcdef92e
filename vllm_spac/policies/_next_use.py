"""Online logistic regression of the probability that the next step selects each expert.

How well past routing predicts the next step differs between models and texts: with local routing an expert that was
just used is used again, with flat routing only long-run popularity matters. A fixed mean of short and long averages is
wrong for one of the two, so the weights of the averages are fitted online (recursive logistic regression: one Newton
step per step of the model, with an exponentially decayed Hessian).
"""

from __future__ import annotations

import math

import numpy as np

_MEMORY = 0.5 ** (1 / 200)  # the fit forgets half in 200 steps
_LEAST_VARIANCE = 1e-3  # of a prediction in the Hessian, which bounds the correction of a confident wrong one
_LONGEST_STEP = 1.0  # norm of one update of the weights
_LARGEST = 20.0  # log-odds
_SAMPLE = 1024  # experts fitted per step, others in the next one: enough, and bounds the time


class NextUse:
    """P(selected in the next step) per key, from decayed shares of steps.

    Features of a key are a constant and the log-odds of each decayed share of the steps that selected it.

    Args:
        half_lives: steps after which a share has halved, one per average.
        keys: number of experts, over all layers.
    """

    def __init__(self, half_lives: tuple[float, ...], keys: int) -> None:
        self._gains = (1 - 0.5 ** (1 / np.array(half_lives, dtype=np.float32)))[:, None].astype(np.float32)
        self._floors = self._gains / 4  # a share of 0 or 1 has finite odds
        self._shares = np.zeros((len(half_lives), keys), dtype=np.float32)
        self._weights = np.full(len(half_lives) + 1, 1 / len(half_lives))
        self._weights[0] = 0.0
        self._hessian = np.eye(len(self._weights))
        self._features = self._features_of(self._shares)
        self.probabilities = self._predict(self._features)
        self._ridge = (1 - _MEMORY) * np.eye(len(self._weights))
        self._strides = max(1, keys // _SAMPLE)
        self._steps = 0

    def observe(self, counts: np.ndarray) -> None:
        """Updates from a step.

        Args:
            counts: int or float [keys], above 0 for the experts that were selected; -1 where the layer did not run.
        """
        if self._steps:  # before the first step all experts have the same features
            some = slice(self._steps % self._strides, None, self._strides)
            self._fit(self._features[:, some], counts[some], self.probabilities[some])
        self._steps += 1
        change = (counts > 0) - self._shares
        change *= self._gains
        change *= counts >= 0
        self._shares += change
        self._features = self._features_of(self._shares)
        self.probabilities = self._predict(self._features)

    def if_used(self) -> np.ndarray:
        """Returns float64 [keys], the probabilities after a hypothetical step that selects every expert."""
        return self._predict(self._features_of(self._shares + self._gains * (1 - self._shares)))

    def _fit(self, features: np.ndarray, counts: np.ndarray, predicted: np.ndarray) -> None:
        """Takes one Newton step towards what was selected."""
        ran = counts >= 0
        error = ((counts > 0) - predicted) * ran
        variance = np.maximum(predicted * (1 - predicted), _LEAST_VARIANCE) * ran
        self._hessian = _MEMORY * self._hessian + self._ridge + (features * variance) @ features.T
        change = np.linalg.solve(self._hessian, features @ error)
        self._weights += change * min(1.0, _LONGEST_STEP / max(math.sqrt(change @ change), 1e-30))

    def _features_of(self, shares: np.ndarray) -> np.ndarray:
        """Returns the features, float32 [1 + half-lives, keys]."""
        odds = np.ones((1 + len(shares), shares.shape[1]), dtype=np.float32)
        odds[1:] = np.log((shares + self._floors) / (1 + self._floors - shares))
        return odds

    def _predict(self, features: np.ndarray) -> np.ndarray:
        """Returns the probabilities, float64 [keys]."""
        odds = self._weights.astype(np.float32) @ features
        return 1 / (1 + np.exp(-odds.clip(-_LARGEST, _LARGEST), dtype=np.float64))
