"""How likely a draft is accepted where the token before it was, learned from what the target went on to say. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_DEPTHS = 8  # places in a path that are told apart; further ones are like the last
_KEEP = 0.998  # of what was learned, with each further draft
_PRIOR = np.array([2.0, 0.5, 1.0, *[0.7] * _DEPTHS])  # standard deviations of the weights that nothing is known of
_FIRST = np.diag(_PRIOR**2)
CERTAIN = 0.01  # a drafter's probability counts as at least this far from 0 and from 1
_RECENT, _USUAL = 0.8, 0.98  # weight of the earlier drafts in how the last ones fared: of a request, of all
FARTHEST = 12.0  # log-odds of a draft's acceptance, at most
UNKNOWN = math.nan  # in place of a drafter's probability


class Odds:
    """Logistic regression on the drafter's probability, the place in the path, and how the request's last drafts fared.

    A Newton step for each draft whose fate is known; older drafts count less. It begins with the drafter's word.
    """

    def __init__(self) -> None:
        self._weights = [0.0, 1.0, *[0.0] * (1 + _DEPTHS)]
        self._spread = _FIRST
        self._recent: dict[str, float] = {}  # by request: how many of its last first drafts were right, from 0 to 1
        self._usual = 0.5  # the same of all requests

    def chance(self, request: str, depth: int, probability: float) -> float:
        """Returns the probability that a draft is accepted given that its parent is.

        Args:
            depth: tokens of its path before it; 0 for one that follows the last token.
            probability: the drafter's, given the path; ``UNKNOWN`` if it has none.
        """
        weights = self._weights
        surely, fared = self._evidence(request, probability)
        return _logistic(weights[0] + weights[1] * surely + weights[2] * fared + weights[3 + min(depth, _DEPTHS - 1)])

    def terms(self, requests: Sequence[str], depths: int) -> tuple[float, np.ndarray, np.ndarray]:
        """Returns what ``chance`` adds up, for a device that knows the drafter's probabilities.

        The probability is logistic(slope * log-odds of the drafter's probability + of the depth + of the request).

        Args:
            requests: whose terms are asked for.
            depths: how many places in a path there are.

        Returns:
            The slope, float64 [depths] and float64 [requests].
        """
        place = np.array(self._weights[3:])[np.minimum(np.arange(depths), _DEPTHS - 1)]
        fared = np.array([2 * self._recent.get(request, self._usual) - 1 for request in requests])
        return self._weights[1], self._weights[0] + place, self._weights[2] * fared

    def add(self, request: str, depth: int, probability: float, accepted: bool) -> None:
        """Adds a draft whose parent was accepted; arguments as of ``chance``."""
        weights, features = np.array(self._weights), np.zeros(len(_PRIOR))
        features[:3] = 1.0, *self._evidence(request, probability)
        features[3 + min(depth, _DEPTHS - 1)] = 1.0
        chance = _logistic(float(weights @ features))
        weight = max(chance * (1 - chance), 0.05)
        towards = self._spread @ features
        gain = towards / (1 / weight + features @ towards)
        self._weights = (weights + gain * (accepted - chance) / weight).tolist()
        self._spread = _KEEP * (self._spread - np.outer(gain, towards)) + (1 - _KEEP) * _FIRST

    def add_first(self, request: str, right: bool) -> None:
        """A request's first draft, or one beside it, was ``right``, or none was."""
        self._recent[request] = _RECENT * self._recent.get(request, self._usual) + (1 - _RECENT) * right
        self._usual = _USUAL * self._usual + (1 - _USUAL) * right

    @property
    def requests(self) -> int:
        """How many requests are remembered."""
        return len(self._recent)

    def remove(self, request: str) -> None:
        """The request has finished."""
        self._recent.pop(request, None)

    def _evidence(self, request: str, probability: float) -> tuple[float, float]:
        """Returns the log-odds of the drafter's probability, and how the request's last drafts fared, from -1 to 1."""
        known = 0.5 if math.isnan(probability) else min(max(probability, CERTAIN), 1 - CERTAIN)
        return math.log(known / (1 - known)), 2 * self._recent.get(request, self._usual) - 1


def _logistic(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -FARTHEST), FARTHEST)))
