"""What a step costs with drafts: seconds of one without, and what an accepted and a rejected draft add. Pure."""

from __future__ import annotations

import math

import numpy as np

_START = np.array([1.0, 0.1, 0.1])  # in steps without drafts, before anything is known; and how uncertain that is
_UNCERTAIN = np.array([0.3, 0.3, 0.3])
_DRIFT = 0.03  # by which a machine's speed changes from step to step, all costs alike
_CHANGE = 0.004  # the same of each cost alone, in steps without drafts
_NOISE, _LEAST = 0.1, 0.02  # spread of a step's seconds, relative: at first, at least
_FAR = 3.0  # standard deviations from which a step is an outlier, unless the next one is as well
_UNSURE = 0.5  # relative error
_MEMORY = 0.95  # weight of what a token cost before a step


class StepTime:
    """Costs of the steps of one batch size; a Kalman filter, because a machine drifts.

    A step takes ``plain`` seconds, and for each draft that its requests have in the mean ``accepted`` or ``rejected``
    seconds more: rows, and loads of the experts that other rows do not bring along. An accepted draft's loads would
    have been a later step's.

    Attributes:
        token: seconds per token and request, of the steps as they were.
    """

    def __init__(self) -> None:
        self._costs: np.ndarray | None = None  # plain, accepted, rejected
        self._spread = np.zeros((3, 3))
        self._noise = _NOISE
        self._odd = 0.0  # sign of the last step's deviation, if it was an outlier
        self.token = math.nan

    @property
    def known(self) -> bool:
        """Whether there was a step."""
        return self._costs is not None

    @property
    def accepted(self) -> float:
        """Seconds that an accepted draft adds."""
        assert self._costs is not None
        return float(self._costs[1])

    @property
    def rejected(self) -> float:
        """Seconds that a rejected draft adds, as few as they may be: what seems too dear by mistake is tried again."""
        assert self._costs is not None
        return max(0.0, float(self._costs[2]) - math.sqrt(max(0.0, float(self._spread[2, 2]))))

    @property
    def unsure(self) -> bool:
        """Whether ``rejected`` is hardly known, as where all steps had as many drafts."""
        assert self._costs is not None
        return self._spread[2, 2] > (_UNSURE * max(self._costs[2], _UNSURE * _START[2] * self._costs[0])) ** 2

    def add(self, accepted: float, rejected: float, seconds: float) -> None:
        """Adds a step with so many drafts per request, in the mean."""
        counts = np.array([1.0, accepted, rejected])
        if self._costs is None:
            self._costs = _START * seconds / (_START @ counts)
            self._spread = np.diag(_UNCERTAIN * self._costs[0]) ** 2
            self.token = seconds / (1 + accepted)
        costs, plain = self._costs, float(self._costs[0])
        self._spread = self._spread + _DRIFT**2 * np.outer(costs, costs) + np.diag([0, 1, 1]) * (_CHANGE * plain) ** 2
        expected = max(float(counts @ costs), 0.1 * plain)
        error = seconds - expected
        variance = float(counts @ self._spread @ counts) + (self._noise * expected) ** 2
        far = math.copysign(1.0, error) if abs(error) > _FAR * math.sqrt(variance) else 0.0
        relative = min(abs(error) / expected, _FAR * self._noise)
        self._noise = max(_LEAST, math.sqrt(0.97 * self._noise**2 + 0.03 * relative**2))
        odd, self._odd = self._odd, far
        if far and odd != far:
            return
        if far:  # twice: the machine is another one
            self._odd = 0.0
            self._spread = self._spread + np.eye(3) * (error / counts.sum()) ** 2
            variance = float(counts @ self._spread @ counts) + (self._noise * expected) ** 2
        towards = self._spread @ counts
        self._costs = costs + towards * (error / variance)
        self._costs[0] = max(self._costs[0], 0.01 * seconds)
        self._spread = self._spread - np.outer(towards, towards) / variance
        self.token = _MEMORY * self.token + (1 - _MEMORY) * seconds / (1 + accepted)
