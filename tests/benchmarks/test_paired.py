"""Two engines in turns: parsing of the sides, engines that die or hang, and the interval of a ratio."""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.common import PlanError
from benchmarks.serving import paired, processes, turns
from benchmarks.serving.cases import Case, Drafts, Settings
from vllm_spac.decisions import comparison
from vllm_spac.decisions.comparison import orders
from vllm_spac.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

EAGLE3 = BENCHMARKS / "toy" / "models" / "eagle3"


def test_sides() -> None:
    assert Case.parse("stock speculation=ngram", "25%") == Case("stock speculation=ngram", None, "ngram")
    side = Case.parse("spac policy=lru io_threads=2", "25%")
    assert side.knobs == {"slots": "25%", "policy": "lru", "io_threads": "2"} and side.speculation == "none"
    assert Case.parse("spac slots=8", "25%").knobs["slots"] == "8", "what a side says of itself counts"


def test_a_side_has_a_draft_length_of_its_own() -> None:
    """Else that of all sides; a tree's number of nodes is its draft length."""
    drafts = Drafts(4, EAGLE3, Path("draft"))
    settings = Settings(Path("m"), drafts, 8, 8)
    texts = ("", " draft_tokens=3", " tree=16", " tree=16 draft_tokens=16")
    jobs = [Case.parse(f"spac speculation=eagle3{text}", "25%").job(settings) for text in texts]
    assert [job["speculative"]["num_speculative_tokens"] for job in jobs] == [4, 3, 16, 16]
    assert all("draft_tokens" not in job["spac"] for job in jobs) and jobs[2]["spac"]["tree"] == "16"
    stock = Case.parse("stock speculation=ngram draft_tokens=2", "25%").job(settings)
    assert stock["speculative"]["num_speculative_tokens"] == 2


def test_both_sides_have_the_dtype_that_was_asked_for() -> None:
    drafts = Drafts(4, Path("eagle3"), Path("draft"))
    settings = Settings(Path("m"), drafts, 8, 8, dtype="float32")
    jobs = [Case.parse(text, "25%").job(settings) for text in ("stock", "spac policy=lru")]
    assert [job["options"]["dtype"] for job in jobs] == ["float32", "float32"]


@pytest.mark.parametrize(
    ("text", "error", "says"),
    [
        ("vllm", PlanError, "use stock or spac"),
        ("spac lru", PlanError, "use stock or spac, then knob=value"),
        ("stock policy=lru", PlanError, "stock vLLM has no knob policy"),
        ("spac speculation=medusa", PlanError, "no speculation is called medusa"),
        ("spac draft_tokens=4", PlanError, "of a side with speculation"),
        ("spac speculation=eagle3 draft_tokens=0", PlanError, "a positive number"),
        ("spac speculation=eagle3 draft_tokens=4 tree=16", PlanError, "two draft lengths"),
        ("spac polcy=lru", ConfigError, "policy"),
        ("spac policy=best", ConfigError, "best"),
    ],
)
def test_a_side_that_is_not_understood(text: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Case.parse(text, "25%")


def test_each_is_as_often_first() -> None:
    first = [order[0] for order, _ in zip(orders(1), range(100), strict=False)]
    assert sum(first) == 50 and len({tuple(first[i : i + 2]) for i in range(0, 100, 2)}) == 2


def test_three_take_turns_in_every_order() -> None:
    found = [order for order, _ in zip(orders(1, 3), range(120), strict=False)]
    assert all(order == other[::-1] for order, other in zip(found[::2], found[1::2], strict=True))
    assert len(set(found)) == 6 and all(sorted(order) == [0, 1, 2] for order in found)


def test_answers_stay_with_whom_they_are_from() -> None:
    asked: list[int] = []

    def asking(number: int):
        return lambda text: asked.append(number) or {"by": number, "to": text}

    found = list(turns.in_turns([asking(number) for number in range(3)], "ab", 1, pause=0))
    assert [[(each["by"], each["to"]) for each in turn] for turn in found] == [
        [(n, text) for n in range(3)] for text in "ab"
    ]
    drawn = orders(1, 3)
    assert asked == [*next(drawn), *next(drawn)] != sorted(asked)


def answer(tokens: int, seconds: float) -> dict:
    return {
        "tokens": [list(range(tokens))], "seconds": seconds, "tpot": [0.1], "ttft": [0.1], "counters": {}, "choices": {}
    }  # fmt: skip


def test_a_row_compares_by_turns_and_by_totals() -> None:
    """The first turn of a start is warm. Then 10 tokens in 1, 2 and 4 s against 2 s."""
    said = [[[answer(10, 2.0), answer(10, seconds)] for seconds in (9.0, 1.0, 2.0, 4.0)]]
    row = paired._row("25%", said, 1, 0)
    assert row["ratios"] == [2.0, 1.0, 0.5] and row["ratio"] == 1.0 and row["tokens_equal"]
    assert row["ratio_of_totals"] == pytest.approx(6 / 7), "30 tokens in 7 s against 30 in 6 s"
    assert row["base"]["tokens_per_second"] == [5.0] * 3 and row["ratio_of_starts"] == [1.0]
    said[0][2][1]["tokens"] = [[7]]
    assert not paired._row("25%", said, 1, 0)["tokens_equal"]


def test_the_seconds_of_a_step_leave_the_prompt_out() -> None:
    """Nine tokens after the first, of 0.1 s each: in nine steps, and in three of a side with drafts."""
    base, other = answer(10, 2.0), answer(10, 2.0)
    base["counters"], other["counters"] = ({"steps": {"prefill": 1, "verify": steps}} for steps in (9, 3))
    base["counters"]["own"], other["counters"]["own"] = (
        {"draft_tokens": tokens, "draft_seconds": 0.6} for tokens in (0, 12)
    )
    row = paired._row("25%", [[[base, other]] * 2], 0, 0)
    assert row["base"]["draft_seconds"] is None and row["other"]["draft_seconds"] == pytest.approx(0.2)
    assert (row["base"]["step_seconds"], row["other"]["step_seconds"]) == pytest.approx((0.1, 0.3))
    assert row["step_ratio"] == pytest.approx(3) and row["step_interval"] == pytest.approx([3, 3])
    stock = paired._row("25%", [[[answer(10, 2.0), other]]], 0, 0)
    assert stock["step_ratio"] is stock["step_interval"] is stock["base"]["step_seconds"] is None


def test_the_interval_of_a_median() -> None:
    rng = random.Random(0)
    covered = 0
    for seed in range(100):
        low, high = comparison.interval([rng.gauss(1, 0.1) for _ in range(25)], seed)
        covered += low <= 1 <= high
    assert covered >= 90, "an interval of 95 % misses the true median rarely"
    assert comparison.interval([0.9] * 5, 0) == (0.9, 0.9)


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
        assert live.turn([1, 2], 3) == {"saids": [[1, 2]], "tokens": 3}
        assert live.batch([[4], [5]], 6) == {"saids": [[4], [5]], "tokens": 6}
        assert live.score([7, 8, 9], 1) == {"score": [7, 8, 9], "first": 1}
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


def test_an_engine_that_hangs_says_where(engine) -> None:
    """Also one that waits in C, as for a device."""
    hangs = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); time.sleep(600)"
    with closing(engine(hangs)) as live:
        live.timeout = 1.0
        with pytest.raises(processes.EngineError, match=r"(?s)no answer after.*engine\.py\", line \d+ in <module>"):
            live.turn([1], 1)


def test_an_engine_that_hangs_is_given_up(engine) -> None:
    live = engine("time.sleep(600)")
    live.timeout = 0.1
    with pytest.raises(processes.EngineError, match="no answer after"):  # it has no stacks, and ends of being asked
        live.turn([1], 1)
    assert live._child.poll() is not None, "it is ended at once"
    live.close()
