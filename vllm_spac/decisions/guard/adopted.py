"""What adopted drafts have cost, compared with no speculation: seconds and tokens as they came, no estimates."""

from __future__ import annotations

import math
import statistics
from collections import deque

_LIMIT = 10.0  # steps without speculation that drafts may lose
_KEPT = 32  # steps since they began to lose that are kept
_SLOWEST = 2.0  # a step counts for at most this many times the typical seconds
_PLAIN = 5  # measurements of no speculation, of which the median counts: one may have been disturbed


class AdoptedDrafts:
    """How far the current draft length is behind no speculation, in steps of the latter; a gain is not saved up.

    Drafts that were adopted by mistake lose from their first step on. Tests for changes do not notice them, and the
    estimates by which they were adopted are the ones that were wrong.

    Attributes:
        behind: steps without speculation that were lost since drafts last were level with it.
    """

    def __init__(self) -> None:
        self.behind = 0.0
        self._plain = deque[float](maxlen=_PLAIN)
        self._since = deque[tuple[float, float]](maxlen=_KEPT)

    @property
    def lose(self) -> bool:
        """Whether no speculation must be tried now."""
        return self.behind > _LIMIT

    @property
    def plain(self) -> float:
        """Seconds of a step without speculation."""
        return statistics.median_low(self._plain)

    @property
    def seconds(self) -> float:
        """Mean seconds of the steps that lost."""
        return statistics.fmean(seconds for seconds, _ in self._since)

    @property
    def tokens(self) -> list[float]:
        """Tokens per request of each step that lost."""
        return [tokens for _, tokens in self._since]

    def begin(self, plain: float) -> None:
        """Drafts are adopted; ``plain``: seconds of the steps before."""
        self._plain.clear()
        self._plain.append(plain)
        self.level()

    def measured(self, plain: float) -> None:
        """Adds the seconds of a step without speculation, from a trial of it."""
        self._plain.append(plain)

    def add(self, seconds: float, tokens: float, typical: float) -> None:
        """Adds a step with drafts; ``typical``: seconds of most of them, infinite until that is known."""
        if typical == math.inf:
            return
        counted = min(seconds, _SLOWEST * typical)
        self.behind += counted / self.plain - tokens
        self._since.append((counted, tokens))
        if self.behind <= 0:
            self.level()

    def level(self) -> None:
        """Starts again from no loss."""
        self.behind = 0.0
        self._since.clear()
