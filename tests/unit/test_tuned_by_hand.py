"""The comparison of vllm-spac tune's choice with configurations that were chosen by hand."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from vllm_spac.config.config import SpacConfig
from vllm_spac.config.tuned_profile import Candidate

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving")]
imagined_engines = importlib.import_module("imagined_engines")
tuned = importlib.import_module("tuned")

PROMPTS = ["a", "b", "c", "d"]
DEFAULT = Candidate("default", "hand", {"slots": "25%"})


def test_there_are_twenty_different_configurations_with_valid_knobs() -> None:
    found = [tuned.limited(candidate, "25%") for candidate in tuned.by_hand(Path("/head"))]
    assert len(found) == len({(str(c.knobs), str(c.drafts)) for c in found}) == len({c.name for c in found}) == 20
    for candidate in found:
        assert SpacConfig.parse(dict(candidate.knobs or {})).slots == "25%" and not candidate.departures
        assert candidate.knobs != DEFAULT.knobs or candidate.drafts
    assert not any("EAGLE" in candidate.name for candidate in tuned.by_hand(None))


def test_each_is_compared_with_the_default_in_turns() -> None:
    world = imagined_engines.Imagined
    world.begin()
    rates = {"default": 10.0, "fast": 20.0, "wrong": 40.0}
    world.rate = staticmethod(lambda candidate: rates[candidate.name])
    world.change = staticmethod(lambda candidate, ids: [n + (candidate.name == "wrong") for n in ids])
    world.fails = {"broken"}
    names = [Candidate(name, "hand", {}) for name in ("broken", "fast", "wrong")]
    broken, fast, wrong = tuned.measured_by_hand(names, DEFAULT, world(), PROMPTS, 4)
    assert broken == {"name": "broken", "problem": "no room for the KV cache"}
    assert fast["median"] == pytest.approx(2.0) and fast["turns"] == len(PROMPTS) and fast["tokens_equal"]
    assert wrong["median"] == pytest.approx(4.0) and not wrong["tokens_equal"]
    assert tuned.best_of([broken, fast, wrong]) == "fast"


def test_cores_are_limited_and_given_back() -> None:
    before = os.sched_getaffinity(0)
    with tuned.cores(1):
        assert os.sched_getaffinity(0) == {min(before)}
    with tuned.cores(0):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before
