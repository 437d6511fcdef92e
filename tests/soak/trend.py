"""Tests whether a quantity sampled over steps keeps growing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

BLOCKS = 20
WARM_UP = 0.5  # of the steps: what is made once when first needed, and the allocator's fragments, which saturate slowly


@dataclass(frozen=True)
class Trend:
    """Growth over all steps behind the warm-up.

    Attributes:
        growth: by the median slope.
        low, high: by the ends of the slope's 95 % confidence interval.
        limit: what ``low`` may be.
    """

    growth: float
    low: float
    high: float
    limit: float

    @property
    def grows(self) -> bool:
        return self.low > self.limit


def trend(steps: Sequence[float], values: Sequence[float], limit: float) -> Trend:
    """The line through the later half of ``values``.

    A leak grows in the later half as in the first. What saturates does not: stock vLLM's worker, asked by the clients
    of the soak, still grew by 12 MiB from step 4,340 to step 17,958, ever more slowly.

    Samples that are neighbours are alike, and a confidence interval needs independent ones: the line goes through the
    means of twenty blocks. Its slope is the median of those of all pairs of them (Theil and Sen), whose interval
    comes from the distribution of Kendall's tau: a single step up, as when a buffer is made, is no trend.

    Args:
        steps, values: as many of each, in order, at least twenty in the later half of the steps.
        limit: growth over the later half that is not worth an alarm.
    """
    x, y = np.asarray(steps, float), np.asarray(values, float)
    kept = x >= x[0] + WARM_UP * (x[-1] - x[0])
    assert kept.sum() >= BLOCKS, f"{kept.sum()} samples behind the warm-up are too few for {BLOCKS} blocks"
    span = x[-1] - x[kept][0]
    x, y = (np.array([block.mean() for block in np.array_split(each[kept], BLOCKS)]) for each in (x, y))
    first, second = np.triu_indices(BLOCKS, 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    spread = 1.96 * sqrt(BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18)
    low, high = (round((len(slopes) + sign * spread) / 2) for sign in (-1, 1))
    growth = (float(each * span) for each in (np.median(slopes), slopes[low], slopes[high]))
    return Trend(*growth, limit)
