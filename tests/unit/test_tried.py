"""The minimum per layer that was tried: what it protects, and that it protects nothing at 0."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "replay"))
tried = importlib.import_module("tried")

EXPERTS = 4


def filled(least: int):
    """One expert of layer 0, which was used first, and three of layer 1; layer 1 asks."""
    policy = tried.Minima(least=least, experts=EXPERTS)
    for key in (0, 4, 5, 6):
        policy.insert(key)
    policy.enter(range(EXPERTS, 2 * EXPERTS))
    return policy


def test_a_layer_keeps_its_minimum() -> None:
    assert filled(0).evict(2, ()) == [0, 4]
    assert filled(1).evict(2, ()) == [4, 5]


def test_pinned_experts_stay_and_a_minimum_does_not_stop_a_load() -> None:
    assert filled(1).evict(2, {4, 5}) == [6, 0]
