"""The draft's probabilities of the tokens that it drafted, by request, until these are verified. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

PADDING = -1  # token id of a row that fills up a request's drafts; it is never accepted


class DraftProbabilities:
    """Keeps drafts with the probabilities that they are reached.

    Between drafting and verifying, drafts may be cut, padded or left for a later step, and requests change places: so
    requests go by their ids, and drafts are compared token by token.
    """

    def __init__(self) -> None:
        self._drafted: dict[str, tuple[list[int], list[float]]] = {}

    def keep(
        self, requests: Sequence[str], tokens: Sequence[list[int]], probabilities: Sequence[Sequence[float]]
    ) -> None:
        """Keeps the drafts of ``requests``, until they are drafted for again.

        Args:
            tokens: token ids of each request's drafts, one after another.
            probabilities: the draft's probability of each token, given those before it.
        """
        for request, drafted, each in zip(requests, tokens, probabilities, strict=True):
            self._drafted[request] = drafted, list(accumulate(each, mul))

    def forget(self, requests: Iterable[str]) -> None:
        """Drops the drafts of requests that have finished."""
        for request in requests:
            self._drafted.pop(request, None)

    def weights(self, request: str, tokens: Sequence[int], rows: int) -> tuple[float, ...] | None:
        """Returns ``RequestRows.weights`` of a request: the probability that each row is reached.

        Args:
            tokens: the drafts that are verified, from some draft on ``PADDING``.
            rows: of the request; the drafts are the last.

        Returns:
            None without drafts, and if the probabilities of these drafts are not known.
        """
        if not tokens:
            return None
        drafts = list(tokens)
        real = drafts.index(PADDING) if PADDING in drafts else len(drafts)
        drafted, reached = self._drafted.get(request, ([], []))
        if drafts[:real] != drafted[:real] or not all(map(math.isfinite, reached[:real])):
            return None
        return (1.0,) * (rows - len(drafts)) + tuple(reached[:real]) + (0.0,) * (len(drafts) - real)
