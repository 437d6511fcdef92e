"""What answers of several agents took: from when each was asked and when each of its tokens came."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypedDict


class Served(TypedDict):
    """An answer: whose it is, when it was asked and when each token came, in seconds, and its tokens.

    Tokens that came together have the same time.
    """

    agent: int
    turn: int
    asked: float
    times: list[float]
    tokens: list[int]


def percentile(values: Iterable[float], share: float) -> float:
    """Returns the least of ``values`` that ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def measures(served: Sequence[Served]) -> dict[str, float]:
    """Returns tokens per second of all, and seconds: to the first token, per token after it, and the longest gap.

    Times per token are of answers with more than one. A gap is between two tokens of one answer.
    """
    first = [answer["times"][0] - answer["asked"] for answer in served]
    longer = [answer["times"] for answer in served if len(answer["times"]) > 1]
    each = [(times[-1] - times[0]) / (len(times) - 1) for times in longer]
    gaps = [later - earlier for times in longer for earlier, later in pairwise(times)]
    tokens = sum(len(answer["times"]) for answer in served)
    seconds = max(answer["times"][-1] for answer in served) - min(answer["asked"] for answer in served)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ttft_p50": percentile(first, 0.5),
        "ttft_p95": percentile(first, 0.95),
        "tpot_p50": percentile(each, 0.5),
        "tpot_p95": percentile(each, 0.95),
        "longest_gap": max(gaps),
        "gap_p50": percentile((gap for gap in gaps if gap > 0), 0.5),
    }


def equal(ours: Sequence[Served], theirs: Sequence[Served]) -> float:
    """Returns the share of answers that have the same tokens."""
    known = {(answer["agent"], answer["turn"]): answer["tokens"] for answer in theirs}
    return statistics.mean(answer["tokens"] == known[answer["agent"], answer["turn"]] for answer in ours)
