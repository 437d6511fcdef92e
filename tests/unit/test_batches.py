"""Comparison of the answers of two batches: tokens, logits before they diverge, and the gap where they do."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving")]
batches = importlib.import_module("batches")


def test_every_grouping_asks_each_request_once() -> None:
    made = batches.groups(7, 3, rounds=5, seed=1)
    assert len(made) == 6 and made["all at once"] == [list(range(7))]
    for parts in made.values():
        assert sorted(number for part in parts for number in part) == list(range(7))
    assert all(len(part) <= 3 for name, parts in made.items() if name != "all at once" for part in parts)


def answer(tokens: list[int], *logits: list[float]) -> dict:
    return {"tokens": tokens, "logits": list(logits)}


def test_logits_count_up_to_where_tokens_part() -> None:
    alone = [answer([1, 2, 3], [9.0, 5.0], [8.0, 7.75], [7.0, 1.0]), answer([4], [3.0, 1.0])]
    other = [answer([1, 5, 3], [9.0, 5.5], [8.0, 2.00], [0.0, 0.0]), answer([4], [3.0, 1.0])]
    found = batches.difference(alone, other)
    assert (found["requests"], found["with_other_tokens"]) == (2, 1)
    assert (found["logits_compared"], found["with_other_logits"], found["greatest_difference"]) == (2, 1, 0.5)
    assert found["gaps_where_tokens_part"] == [0.25], "stock's own, alone"
    same = batches.difference(alone, alone)
    assert (same["with_other_tokens"], same["with_other_logits"], same["logits_compared"]) == (0, 0, 4)
    with pytest.raises(ValueError):
        batches.difference(alone, alone[:1])
