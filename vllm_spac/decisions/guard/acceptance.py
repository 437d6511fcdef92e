"""Expected tokens per step for each draft length, estimated from the drafts accepted so far. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_KEEP, _IDLE = 0.95, 0.995  # weight of what is known after a verified step, after one without drafts
_PRIOR = 0.5  # drafts for which a place counts as much as the one before it


class Acceptance:
    """Probability by place that a draft is accepted given that those before it were; older steps weigh less.

    Args:
        places: drafts of a request at most (K).
    """

    def __init__(self, places: int) -> None:
        self._drafted, self._accepted = [0.0] * places, [0.0] * places

    def update(self, drafts: int, emitted: Sequence[int]) -> None:
        """Adds one step; arguments as for ``LengthChooser.observe``."""
        keep = _KEEP if drafts else _IDLE
        reached = len(emitted)
        for place in range(len(self._drafted)):
            accepted = sum(tokens > place + 1 for tokens in emitted) if place < drafts and reached else 0
            self._drafted[place] = keep * self._drafted[place] + (reached if place < drafts else 0)
            self._accepted[place] = keep * self._accepted[place] + accepted
            reached = accepted

    def tokens(self) -> list[float]:
        """Expected tokens per request and step with d drafts, [K + 1].

        A place of which little is known takes the probability of the one before it.
        """
        expected, reached, chance, weight = [1.0], 1.0, 0.0, 0.0
        for drafted, accepted in zip(self._drafted, self._accepted, strict=True):
            chance = (accepted + weight * chance) / max(1e-9, drafted + weight)
            reached *= chance
            expected.append(expected[-1] + reached)
            weight = _PRIOR
        return expected
