"""Drafts that a request's own text has where its last tokens were before (n-grams), beside those of a drafter. Pure.

Text that repeats is drafted better, and for nothing, by what followed before; other text by a model. Where both say the
same next token, n-grams go on. Where they do not, the one goes on that was right more often in such places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_spac.decisions.guard.odds import Odds

_MEMORY = 0.95  # weight of the earlier places in how often each was right


class _Asked(NamedTuple):
    ngrams: Sequence[int]
    first: int  # of the drafter


class Lookups:
    """Decides between n-grams and the drafter, by request and step.

    Attributes:
        odds: of n-grams, as the drafter has its own.
        taken: steps of requests whose drafts were n-grams.
    """

    def __init__(self) -> None:
        self.odds = Odds()
        self.taken = 0
        self._asked: dict[str, _Asked] = {}  # not answered yet
        self._right = [0.5, 0.5]  # n-grams, and the drafter, where they contradicted one another

    def chooses(self, request: str, ngrams: Sequence[int], first: int) -> bool:
        """Returns whether a request's n-grams are its drafts, and waits for the answer.

        Args:
            ngrams: tokens that followed where the request's text had its last tokens before; may be empty.
            first: the drafter's first draft.
        """
        if not ngrams:
            return False
        self._asked[request] = _Asked(ngrams, first)
        chosen = ngrams[0] == first or self._right[0] > self._right[1]
        self.taken += chosen
        return chosen

    def observe_tokens(self, request: str, emitted: Sequence[int]) -> Sequence[int]:
        """The target has said these tokens there; returns the n-grams that were asked about, if any."""
        asked = self._asked.pop(request, None)
        if asked is None or not emitted:
            return ()
        if asked.ngrams[0] != asked.first:
            for number, token in enumerate((asked.ngrams[0], asked.first)):
                self._right[number] = _MEMORY * self._right[number] + (1 - _MEMORY) * (token == emitted[0])
        return asked.ngrams

    def remove(self, request: str) -> None:
        """The request has finished."""
        self._asked.pop(request, None)
        self.odds.remove(request)
