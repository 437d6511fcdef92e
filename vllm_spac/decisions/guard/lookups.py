"""Drafts that a request's own text has where its last tokens were before (n-grams), beside those of a drafter. Pure.

Text that repeats is drafted better, and for nothing, by what followed before; other text by a model. Where both say the
same next token, the one goes on whose drafts were right more often behind a right one. Where they contradict one
another, the one that was right more often in such places.
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
        # how often n-grams, and the drafter, were right: where they contradicted one another, and behind a right draft
        self._right, self._behind = [0.5, 0.5], [0.5, 0.5]

    def chooses(self, request: str, ngrams: Sequence[int], first: int) -> bool:
        """Returns whether a request's n-grams are its drafts, and waits for the answer.

        Args:
            ngrams: tokens that followed where the request's text had its last tokens before; may be empty.
            first: the drafter's first draft.
        """
        if not ngrams:
            return False
        self._asked[request] = _Asked(ngrams, first)
        if ngrams[0] == first:
            chosen = self._behind[0] >= self._behind[1]
        else:
            chosen = self._right[0] > self._right[1]
        self.taken += chosen
        return chosen

    def observe_tokens(self, request: str, emitted: Sequence[int], drafts: Sequence[int] = ()) -> Sequence[int]:
        """The target has said these tokens there; returns the n-grams that were asked about, if any.

        ``drafts``: of the drafter, a chain, as many as it made.
        """
        asked = self._asked.pop(request, None)
        self._follow(1, drafts, emitted)
        if asked is None or not emitted:
            return ()
        self._follow(0, asked.ngrams, emitted)
        if asked.ngrams[0] != asked.first:
            for number, token in enumerate((asked.ngrams[0], asked.first)):
                _add(self._right, number, token == emitted[0])
        return asked.ngrams

    def _follow(self, number: int, drafts: Sequence[int], emitted: Sequence[int]) -> None:
        """Learns how often a draft behind a right one is right, too; ``number``: whose."""
        for depth, (draft, token) in enumerate(zip(drafts, emitted, strict=False)):
            if depth:
                _add(self._behind, number, draft == token)
            if draft != token:
                return

    def remove(self, request: str) -> None:
        """The request has finished."""
        self._asked.pop(request, None)
        self.odds.remove(request)


def _add(rates: list[float], number: int, right: bool) -> None:
    rates[number] = _MEMORY * rates[number] + (1 - _MEMORY) * right
