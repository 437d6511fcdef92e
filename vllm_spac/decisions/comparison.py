"""Compares two speeds that were measured in turns, and the tokens of a candidate with those of the default. Pure."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

_RESAMPLES = 10_000
# In log-probability: two steps of bfloat16 at logits of 16 to 32. Kernels round a row differently for other numbers of
# rows, so where the two best tokens are this close, either is vLLM's.
NEAR = 0.25

Verdict = Literal["equal", "near-ties", "wrong"]


class Ratio(BaseModel):
    """Tokens per second of one engine over those of another.

    Attributes:
        low, high: bootstrapped 95 % interval of the median.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    median: float
    low: float
    high: float
    turns: int  # number of prompts that both answered

    @classmethod
    def of(cls, ratios: Sequence[float], seed: int = 0) -> Ratio:
        low, high = interval(ratios, seed)
        return cls(median=statistics.median(ratios), low=low, high=high, turns=len(ratios))

    @property
    def is_faster(self) -> bool:
        return self.low > 1

    def __str__(self) -> str:
        return f"{self.median:.2f} (95 % interval {self.low:.2f} - {self.high:.2f}, {self.turns} turns)"


def interval(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Returns the 95 % bootstrap percentile interval of the median."""
    draws = np.random.default_rng(seed).choice(values, (_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return float(low), float(high)


def orders(seed: int, arms: int = 2) -> Iterator[tuple[int, ...]]:
    """Yields the order of the arms in each turn; each order is followed by its reverse.

    A later arm may find experts that an earlier one has loaded.
    """
    draw = random.Random(seed)
    while True:
        order = tuple(draw.sample(range(arms), arms))
        yield order
        yield order[::-1]


class ReferenceAnswer(BaseModel):
    """What the default answers to a prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: tuple[int, ...]
    second: tuple[int, ...] = ()  # the second best token at each place; empty where it was not asked for
    gap: tuple[float, ...] = ()  # log-probability of the best less that of the second, at each place


@dataclass(frozen=True)
class Tokens:
    """How the tokens of a candidate compare with those of the default."""

    verdict: Verdict
    answers: int = 0
    differ: int = 0  # number of answers that differ, of ``answers``
    gap: float = 0.0  # the largest gap at which an answer first differed from the default's; 0 if none did

    def __str__(self) -> str:
        if self.verdict == "equal":
            return "equal"
        what = "near-ties" if self.verdict == "near-ties" else "WRONG"
        return f"{what}: {self.differ} of {self.answers} answers differ, at a gap of {self.gap:.2f} in log-probability"


def compare_tokens(expected: Sequence[ReferenceAnswer], answers: Sequence[Sequence[int]], near_ties: bool) -> Tokens:
    """Compares greedy answers to the same prompts.

    Args:
        expected: of the default.
        answers: of a candidate.
        near_ties: whether another number of rows per step, or other kernels, may decide near-ties differently.
    """
    gaps = [gap for reference, ids in zip(expected, answers, strict=True) if (gap := _gap(reference, ids)) is not None]
    if not gaps:
        return Tokens("equal", len(answers))
    verdict: Verdict = "near-ties" if near_ties and max(gaps) <= NEAR else "wrong"
    return Tokens(verdict, len(answers), len(gaps), max(gaps))


def _gap(reference: ReferenceAnswer, ids: Sequence[int]) -> float | None:
    """Returns the gap at the first difference; None if there is no difference, infinity if it is no near-tie."""
    if tuple(ids) == reference.ids:
        return None
    places = zip(reference.ids, ids, strict=False)
    place = next((n for n, (mine, its) in enumerate(places) if mine != its), None)
    if place is None or place >= len(reference.second) or ids[place] != reference.second[place]:
        return float("inf")
    return reference.gap[place]
