"""``make demo``: its speeds are those of turns, and few of them have no interval."""

from __future__ import annotations

from benchmarks import demo


def run(*seconds: float):
    return demo.Run([demo.Reply(list(range(5)), each) for each in seconds])


def test_a_speed_is_that_of_a_turn_and_not_of_all_answers_together() -> None:
    """The machine is four times slower in the last turn."""
    assert demo.speeds(run(2.0, 2.0, 8.0), run(1.0, 1.0, 4.0)) == [0.5, 0.5, 0.5]


def test_an_answer_of_one_token_has_no_speed() -> None:
    short = demo.Run([demo.Reply([1], 0.0), demo.Reply([1, 2, 3], 1.0)])
    assert demo.speeds(short, run(1.0, 1.0)) == [0.5]


def test_few_turns_have_no_interval() -> None:
    assert "interval" not in str(demo.speed_rows([0.5] * 3))
    assert "95 % interval 0.50 - 0.50" in str(demo.speed_rows([0.5] * 6))
    assert len(demo.QUESTIONS) >= demo.FEWEST <= len(demo.TOY_PROMPTS)
