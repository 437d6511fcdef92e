"""Two engines turn by turn: what the sides say, engines that die or hang, and how sure a ratio is."""

from __future__ import annotations

import importlib
import os
import random
import sys
from contextlib import closing
from pathlib import Path

import pytest

from vllm_spac.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "serving")]
paired = importlib.import_module("paired")
plan = importlib.import_module("plan")
processes = importlib.import_module("processes")


def test_sides() -> None:
    assert paired.Side.parse("stock speculation=ngram", "25%") == paired.Side("stock speculation=ngram", None, "ngram")
    side = paired.Side.parse("spac policy=lru io_threads=2", "25%")
    assert side.knobs == {"slots": "25%", "policy": "lru", "io_threads": "2"} and side.speculation == "none"
    assert paired.Side.parse("spac slots=8", "25%").knobs["slots"] == "8", "what a side says of itself counts"


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("vllm", plan.PlanError, "use stock or spac"),
        ("spac lru", plan.PlanError, "use stock or spac, then knob=value"),
        ("stock policy=lru", plan.PlanError, "stock vLLM has no knob policy"),
        ("spac speculation=medusa", plan.PlanError, "no speculation is called medusa"),
        ("spac polcy=lru", ConfigError, "policy"),
        ("spac policy=best", ConfigError, "best"),
    ],
)
def test_a_side_that_is_not_understood(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        paired.Side.parse(text, "25%")


@pytest.mark.parametrize(
    ("base", "other", "parts"),
    [
        ("spac", "spac speculation=eagle3", ["speculation"]),
        ("spac policy=lru", "spac policy=lru trace=a", ["trace"]),
        ("spac", "spac speculation=ngram trace=a", ["speculation", "trace"]),
        ("spac speculation=ngram", "spac speculation=ngram trace=a", ["trace"]),
    ],
)
def test_what_one_engine_pauses(base: str, other: str, parts: list[str]) -> None:
    assert paired.Side.parse(other, "25%").beyond(paired.Side.parse(base, "25%")) == parts


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("spac", "spac"),
        ("stock", "stock speculation=ngram"),
        ("stock", "spac trace=a"),
        ("spac policy=lru", "spac speculation=ngram"),
        ("spac speculation=ngram", "spac speculation=eagle3 trace=a"),
        ("spac speculation=ngram", "spac trace=a"),
        ("spac", "spac speculation=ngram guard=off"),
    ],
)
def test_what_one_engine_cannot_be(base: str, other: str) -> None:
    with pytest.raises(plan.PlanError, match="--one-engine"):
        paired.Side.parse(other, "25%").beyond(paired.Side.parse(base, "25%"))


def test_each_is_as_often_first() -> None:
    first = [order[0] for order, _ in zip(paired.orders(1), range(100), strict=False)]
    assert sum(first) == 50 and len({tuple(first[i : i + 2]) for i in range(0, 100, 2)}) == 2


def test_the_interval_of_a_median() -> None:
    rng = random.Random(0)
    covered = 0
    for seed in range(100):
        low, high = paired.interval([rng.gauss(1, 0.1) for _ in range(25)], seed)
        covered += low <= 1 <= high
    assert covered >= 90, "an interval of 95 % misses the true median rarely"
    assert paired.interval([0.9] * 5, 0) == (0.9, 0.9)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Takes the place of ``engine.py``: what its text does when it is asked."""

    def become(answer: str):
        script = tmp_path / "engine.py"
        script.write_text(f"import json, os, sys, time\nprint('{{}}', flush=True)\nfor line in sys.stdin:\n {answer}\n")
        monkeypatch.setattr(processes, "ENGINE", script)
        return processes.LiveEngine({}, False, 20.0)

    return become


def test_a_live_engine_answers_in_turn_and_goes(engine) -> None:
    with closing(engine("print(line.replace('prompt', 'said'), end='', flush=True)")) as live:
        assert live.turn([1, 2], 3) == {"said": [1, 2], "tokens": 3, "without": []}
        assert live.turn([4], 5, ["trace"]) == {"said": [4], "tokens": 5, "without": ["trace"]}
    with pytest.raises(ProcessLookupError):
        os.kill(live._child.pid, 0)


def test_an_engine_that_dies_says_why(engine) -> None:
    with (
        closing(engine("print('out of luck', file=sys.stderr); sys.exit(7)")) as live,
        pytest.raises(processes.EngineError, match="(?s)exit code 7.*out of luck"),
    ):
        live.turn([1], 1)


def test_an_engine_that_died_since_says_why(engine) -> None:
    with closing(engine("print(line, end='', flush=True); sys.exit(7)")) as live:
        live.turn([1], 1)
        live._child.wait()
        with pytest.raises(processes.EngineError, match="exit code 7"):
            live.turn([1], 1)


def test_an_engine_that_hangs_is_given_up(engine) -> None:
    live = engine("time.sleep(600)")
    live._timeout = 0.1
    with pytest.raises(processes.EngineError, match="no answer after"):
        live.turn([1], 1)
    live._child.kill()
    live.close()
