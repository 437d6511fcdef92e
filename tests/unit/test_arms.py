"""Rows of the figures of budgets, from answers whose figures are known."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "papers"), str(BENCHMARKS / "serving"), str(BENCHMARKS / "scaled")]
arms, arms_report, votes = (importlib.import_module(name) for name in ("arms", "arms_report", "moe_spec_votes"))

from vllm_spac.errors import ConfigError  # noqa: E402

ARMS = [arms.Arm("exact"), arms.Arm("cut")]


def answer(tokens: list[list[int]], seconds: float, accepted: int = 0, drafts: int = 0, dropped: float = 0.0) -> dict:
    counters = {"loads": 12, "budget": {"dropped_weight": dropped, "rows": 4 if dropped else 0}}
    counters |= {"speculation": {"drafts": drafts, "accepted_tokens": accepted}} if drafts else {}
    return {"tokens": tokens, "tpot": [seconds] * len(tokens), "counters": counters}


def turn(arm: str, temperature: float, seed: int, batch: int, of: dict) -> Any:
    return arms.Turn(arm, temperature, seed, batch, of)


def test_rows_by_hand() -> None:
    """Two batches: the budget halves the time of one and leaves that of the other; its answers differ from token 2."""
    turns = [
        turn("exact", 0.0, 0, 1, answer([[1, 2, 3, 4]], 0.2)),
        turn("cut", 0.0, 0, 1, answer([[1, 2, 7, 4]], 0.1, accepted=3, drafts=2, dropped=1.0)),
        turn("cut", 0.0, 0, 2, answer([[1, 2, 3, 4]], 0.2, accepted=0, drafts=1, dropped=1.0)),
        turn("exact", 0.0, 0, 2, answer([[1, 2, 3, 4]], 0.2)),
    ]
    exact, cut = arms.rows(ARMS, turns, [-1.0, -2.0, -3.0, -1.0])
    assert exact["speed"] == 1 and exact["same_prefix"] == 1 and exact["perplexity"] == pytest.approx(2.718281828)
    assert cut["speed"] == pytest.approx(1.5) and cut["speed_interval"] == pytest.approx([1, 2])
    assert cut["same_prefix"] == 0.75 and cut["perplexity"] == pytest.approx(2.718281828**2.5)
    assert cut["acceptance_length"] == 2 and exact["acceptance_length"] == 1
    assert cut["loads_per_token"] == 3 and cut["dropped_share"] == 0.25 and exact["dropped_share"] == 0
    assert exact["speed_deviation"] is None and exact["perplexity_deviation"] is None


def test_runs_at_a_temperature_have_deviations_and_no_exact_answer() -> None:
    turns = [
        turn(arm, 1.0, seed, 1, answer([[seed, 2]], seconds))
        for seed, both in enumerate(((0.2, 0.1), (0.4, 0.1)))
        for arm, seconds in zip(("exact", "cut"), both, strict=True)
    ]
    exact, cut = arms.rows(ARMS, turns, [-1.0, -1.0, -2.0, -2.0])
    assert cut["speed"] == pytest.approx(3) and cut["speed_deviation"] == pytest.approx(2**0.5)
    assert exact["perplexity_deviation"] == cut["perplexity_deviation"] > 0 and cut["same_prefix"] is None


def test_all_requests_of_a_batch_count() -> None:
    both = {"tokens": [[1, 2], [3, 4]], "tpot": [0.1, 0.2]}
    assert arms.rate(both) == pytest.approx(15)
    assert arms.same_prefix(both, {"tokens": [[1, 2], [9, 4]]}) == 0.5


def test_budgets_are_checked_before_anything_runs() -> None:
    found = arms.budget_arms(["16", "24"], ["truncation", "substitution"], ("guard",), when="decode")
    assert [arm.name for arm in found] == [
        "B = 16, truncation", "B = 24, truncation", "B = 16, substitution", "B = 24, substitution"
    ]  # fmt: skip
    assert all(arm.without == ("guard",) and arm.budget["when"] == "decode" for arm in found)
    assert arms.budget_arms(["16"], ["truncation"], votes="path")[0].name == "B = 16, truncation, votes by path"
    with pytest.raises(ConfigError, match="coverage"):
        arms.budget_arms(["16"], ["nothing"])


def test_votes_are_chosen_on_other_prompts_than_are_reported() -> None:
    turns = [turn(arm, 0.0, 0, batch, answer([[batch]], 0.1)) for batch in (1, 2, 3, 4, 5) for arm in ("exact", "1")]
    quality = [float(one.batch) for one in turns]
    first, second = (votes.half_of(turns, quality, 5, half) for half in (False, True))
    assert [one.batch for one in first[0]] == first[1] == [1, 1, 2, 2]
    assert [one.batch for one in second[0]] == second[1] == [3, 3, 4, 4, 5, 5]
    found = votes.arms_of(24, ["0", "0.5"])
    assert [arm.name for arm in found] == ["exact", "0", "0.5"] and found[0].budget == {}
    assert [arm.budget["votes_alpha"] for arm in found[1:]] == [0, 0.5]
    with pytest.raises(ConfigError, match="votes_alpha"):
        votes.arms_of(24, ["2"])


def test_rows_are_shown_and_drawn(tmp_path: Path) -> None:
    turns = [turn(arm, t, 0, 1, answer([[1, 2]], 0.1)) for arm in ("exact", "cut") for t in (0.0, 1.0)]
    found = arms.rows(ARMS, turns, [-1.0] * 4)
    from rich.console import Console

    console = Console(record=True, width=140)
    arms_report.show(console, found, "a title", "temperature")
    assert "1.00 [1.00 - 1.00]" in console.export_text()
    arms_report.draw(found, "a title", "temperature", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
