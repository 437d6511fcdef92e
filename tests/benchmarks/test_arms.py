"""Rows of the figures of budgets, from answers whose figures are known."""

from __future__ import annotations

import math
from typing import Any

import pytest

from benchmarks.common import PlanError
from benchmarks.papers import arms
from benchmarks.papers import moe_spec_table as table
from benchmarks.serving import engine
from vllm_spac.errors import ConfigError

ARMS = [arms.Arm("exact"), arms.Arm("cut")]


def quality(logprob: float, best: float = 1.0, kl: float | None = None) -> Any:
    return arms.Quality(logprob, best, kl)


def answer(tokens: list[list[int]], seconds: float, accepted: int = 0, drafts: int = 0, dropped: float = 0.0) -> dict:
    counters: dict[str, Any] = {"loads": 12, "budget": {"dropped_weight": dropped, "rows": 4 if dropped else 0}}
    counters["generating"] = {"steps": 2, "experts": 20 if dropped else 40}
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
    said = [quality(-1.0), quality(-2.0, 0.5, 0.1), quality(-3.0, 1.0, 0.3), quality(-1.0)]
    exact, cut = arms.rows(ARMS, turns, said)
    assert exact["speed"] == 1 and exact["same_prefix"] == 1 and exact["perplexity"] == pytest.approx(2.718281828)
    assert cut["speed"] == pytest.approx(1.5) and cut["speed_interval"] == pytest.approx([1, 2])
    assert cut["same_prefix"] == 0.75 and cut["perplexity"] == pytest.approx(2.718281828**2.5)
    assert cut["acceptance_length"] == 2 and exact["acceptance_length"] == 1
    assert cut["loads_per_token"] == 3 and cut["dropped_share"] == 0.25 and exact["dropped_share"] == 0
    assert cut["top1_agreement"] == 0.75 and cut["kl"] == pytest.approx(0.2) and exact["kl"] is None
    assert cut["experts_per_step"] == 10 and exact["experts_per_step"] == 20
    assert exact["speed_deviation"] is None and exact["perplexity_deviation"] is None


def test_what_a_prompt_takes_is_left_out() -> None:
    """The prompt's step uses 40 experts in 2 layers, the two steps after it 8 and 6 in each."""
    prefill = {"steps": {"prefill": 1}, "hits": 30, "misses": 10, "cpu_experts": 0}
    whole = {"steps": {"prefill": 1, "verify": 2}, "hits": 40, "misses": 25, "cpu_experts": 3}
    found = arms.generating({"counters": whole, "choices": {"layers": 2}}, prefill)
    assert found == {"steps": 2, "experts": 14}


def test_divergence_by_hand() -> None:
    """Tokens without a name count as one; the whole distributions differ by at least as much."""
    here = [0.5, 0.3, 0.15, 0.05]
    other = [0.25, 0.25, 0.4, 0.1]
    logs = {token: math.log(p) for token, p in enumerate(here)}
    every = [(token, math.log(q)) for token, q in enumerate(other)]
    whole = sum(p * math.log(p / q) for p, q in zip(here, other, strict=True))
    assert engine.divergence(logs, every) == pytest.approx(whole, abs=1e-6)
    some = 0.3 * math.log(0.3 / 0.25) + 0.15 * math.log(0.15 / 0.4) + 0.55 * math.log(0.55 / 0.35)
    assert engine.divergence(logs, [every[2], every[1]]) == pytest.approx(some) and 0 < some < whole
    same = [(token, math.log(p)) for token, p in enumerate(here)]
    assert engine.divergence(logs, same) == pytest.approx(0, abs=1e-12)


def test_runs_at_a_temperature_have_deviations_and_no_exact_answer() -> None:
    turns = [
        turn(arm, 1.0, seed, 1, answer([[seed, 2]], seconds))
        for seed, both in enumerate(((0.2, 0.1), (0.4, 0.1)))
        for arm, seconds in zip(("exact", "cut"), both, strict=True)
    ]
    exact, cut = arms.rows(ARMS, turns, [quality(-1.0), quality(-1.0), quality(-2.0), quality(-2.0)])
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


def test_each_way_to_draft_is_an_engine_and_has_its_budgets() -> None:
    ways = table.ways_of("5", "16,63")
    assert [way.name for way in ways] == ["no drafts", "chain of 5", "tree of 16", "tree of 63"]
    sides = [way.case({"slots": "25%"}) for way in ways]
    assert [side.draft_tokens for side in sides] == [None, 5, 16, 63]
    assert [side.speculation for side in sides] == ["none", "eagle3", "eagle3", "eagle3"]
    assert sides[0].knobs == {"slots": "25%"} and sides[1].knobs == {"slots": "25%", "guard": "off"}
    assert sides[3].knobs["tree"] == "63"
    arms_ = table.arms_of(ways, ["16", "24"], ["substitution"], ["uniform", "path"], "router")
    assert len(arms_) == 1 + 3 * (1 + 2 * 2) and [arm.engine for arm in arms_] == [0, *[1] * 5, *[2] * 5, *[3] * 5]
    assert [arm.name for arm in arms_[6:]][:3] == [
        "tree of 16, exact", "tree of 16, B = 16, substitution", "tree of 16, B = 24, substitution"
    ]  # fmt: skip
    assert arms_[6].budget == {} and arms_[9].budget["votes"] == "path" and len({arm.name for arm in arms_}) == 16
    assert [way.name for way in table.ways_of("", "8")] == ["no drafts", "tree of 8"]
    both = table.ways_of("4", "8", ["eagle3", "ngram"])[1:]
    assert [way.name for way in both] == ["chain of 4", "chain of 4 by n-grams", "tree of 8"]
    assert [way.case({}).speculation for way in both] == ["eagle3", "ngram", "eagle3"]
    assert [way.votes(["path"]) for way in both] == [["path"], ["uniform"], ["path"]]
    for chains, trees in (("", ""), ("0", ""), ("5", "many")):
        with pytest.raises(PlanError):
            table.ways_of(chains, trees)
    with pytest.raises(PlanError, match="medusa"):
        table.ways_of("5", "", ["medusa"])


def test_runs_by_temperature() -> None:
    assert table.runs_of("0", 5) == [(0.0, 0)]
    assert table.runs_of("0,0.7", 2) == [(0.0, 0), (0.7, 0), (0.7, 1)]
    for text in ("-1", "hot"):
        with pytest.raises(PlanError, match="--temperatures"):
            table.runs_of(text, 2)
