"""The points of a sweep and what follows from results; tables of made-up ones."""

from __future__ import annotations

import io
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.cli.quality import quality_table, sentences
from vllm_spac.errors import ConfigError
from vllm_spac.tools.evaluation import points as quality
from vllm_spac.tools.evaluation.points import Point

FACTS = {"experts": 16, "top_k": 4, "custom": False}


def run(*arguments, code: int = 0) -> str:
    """Output of the command on a wide terminal, with lines of text joined."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


# --- points ----------------------------------------------------------------------------------------------------------


def test_points_are_all_combinations_that_the_model_can_run() -> None:
    found, skipped = quality.points(["router"], list(quality.COVERAGES), [2, 8], [0.9], FACTS)
    assert found == [
        Point("router", "substitution", budget=8),
        Point("router", "substitution", mass=0.9, mass_of="selected"),
        Point("router", "truncation", budget=2),
        Point("router", "truncation", budget=8),
        Point("router", "truncation", mass=0.9, mass_of="selected"),
    ]
    assert skipped == ["substitution with B=2: every token gets 4 experts"]


def test_a_model_that_routes_by_itself_is_only_truncated() -> None:
    found, skipped = quality.points(["router"], list(quality.COVERAGES), [8], [], FACTS | {"custom": True})
    assert [point.coverage for point in found] == ["truncation"] and "function of its own" in skipped[0]


@pytest.mark.parametrize(
    ("budgets", "masses", "says"),
    [([17], [], "16 experts"), ([0], [], "16 experts"), ([], [1.5], "at most 1"), ([2], [], "no budget is left")],
)
def test_points_that_are_refused(budgets: list, masses: list, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        quality.points(["router"], ["substitution"], budgets, masses, FACTS)


def test_settings_are_those_of_the_control() -> None:
    from vllm_spac.methods.moe_spec.settings import BudgetSettings

    settings = BudgetSettings.parse(Point("router", "truncation", budget=8).settings("all", 9))
    assert (settings.budget, settings.when, settings.window, settings.coverage) == (8, "all", 9, "truncation")
    [point], _ = quality.points(["router"], ["truncation"], [], [0.9], FACTS, "scores")
    settings = BudgetSettings.parse(point.settings("all", 9))
    assert (settings.budget, settings.mass, settings.mass_of) == (None, 0.9, "scores")
    assert point.bound == "0.9 of scores" and Point.of(asdict(point) | {"kl": 0.1}) == point


def test_speculated_execution_is_a_point_without_a_bound() -> None:
    from vllm_spac.methods.moe_spec.settings import BudgetSettings

    found, _ = quality.points([], [], [], [], FACTS, speculate=["restricted", "predicted"])
    assert [point.coverage for point in found] == ["restricted", "predicted"] and all(p.speculated for p in found)
    settings = BudgetSettings.parse(found[1].settings("all", 9))
    assert (settings.speculate, settings.when, settings.window, settings.budget) == ("predicted", "all", 9, None)
    assert Point.of(asdict(found[0])) == found[0]
    both, _ = quality.points(["router"], ["truncation"], [8], [], FACTS, speculate=["restricted"])
    assert both == [Point("router", "truncation", 8), Point("speculated", "restricted")]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--budgets 8,16,32"),
        (("--budgets", "8,x"), "--budgets: invalid literal"),
        (("--mass", "most"), "--mass: could not convert"),
        (("--mass", "0.9", "--mass-of", "softmax"), "selected or scores"),
        (("--budgets", "8", "--rankings", "best"), "there is no 'best'"),
        (("--budgets", "8", "--rankings", "oracle"), "there is no 'oracle'; use some of router"),
        (("--budgets", "8", "--rankings", "router,router"), "names something twice"),
        (("--budgets", "8", "--coverages", "none"), "use some of substitution, truncation"),
        (("--budgets", "8", "--speculative-config", "eagle"), "--speculative-config"),
        (("--speculate", "wild", "--predictor", "p"), "there is no 'wild'; use some of restricted, predicted"),
        (("--speculate", "predicted"), "--speculate needs --predictor FILE"),
        (("--budgets", "8"), "cannot be read"),
    ],
)
def test_refused_before_an_engine_starts(tmp_path: Path, options: tuple, says: str) -> None:
    assert says in run("quality", "sweep", "model", "--prompts", tmp_path / "none", *options, code=1)


def test_a_text_with_what_is_generated_must_fit_before_an_engine_starts(tmp_path: Path) -> None:
    (texts := tmp_path / "texts").write_text("hello\n")
    options = ("--budgets", "8", "--new-tokens", "100", "--engine", '{"max_model_len": 512}')
    said = run("quality", "sweep", "model", "--prompts", texts, *options, code=1)
    assert "requests have 628 tokens" in said and "use --text-tokens 396, or max_model_len 628" in said


# --- what follows ----------------------------------------------------------------------------------------------------


def scored(budget: int, agreement: float, change: float, distinct: float, **others) -> dict:
    names = {"ranking": "router", "coverage": "truncation", "budget": budget, "mass": None}
    values = {"agreement": agreement, "perplexity_change": change, "distinct": distinct, "perplexity": 9.0}
    errors = {"agreement_error": 0.003, "perplexity_change_error": 0.002}
    return names | values | errors | {"kl": 0.01, "dropped": 0.02} | others


def test_the_verdict_is_the_cheapest_that_keeps_the_quality() -> None:
    points = [scored(4, 0.98, 0.0, 4), scored(8, 0.99, 0.02, 8), scored(12, 0.99, -0.01, 11), scored(14, 1, 0, 12)]
    assert quality.verdict(points)["budget"] == 12
    assert quality.verdict(points[:2]) is None


# --- reports ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def results() -> dict:
    points = [scored(8, 0.9, 0.1, 8.0), scored(12, 0.995, 0.001, 11.0)]
    points += [scored(b, 0.99, 0.2, b - 1.0, coverage="substitution") for b in (8, 12)]
    speeds = {
        "bytes_per_token": 100.0,
        "tokens_per_second": 10.0,
        "acceptance_length": 2.5,
        "hit_rate": 0.5,
        "distinct": 13.0,
        "equal": 1.0,
    }
    made = [{name: point[name] for name in ("ranking", "coverage", "budget", "mass")} | speeds for point in points]
    return {
        "title": "tiny",
        "window": 9,
        "facts": FACTS,
        "reference": {"perplexity": 9.0, "tokens": 1000},
        "natural": {"distinct": 12.5},
        "step_bytes_per_expert": 1 << 20,
        "points": points,
        "generation": [speeds, *made],
        "verdict": quality.verdict(points),
    }


def printed(results: dict) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(quality_table(results), *sentences(results))
    return " ".join(console.file.getvalue().split())


def test_report(results: dict) -> None:
    text = printed(results)
    for part in ("B=12", "99.50%", "+0.10%", "12.0%", "2.50", "no budget: perplexity 9.000 over 1,000 tokens"):
        assert part in text, part
    assert "router, truncation, B=12 keeps a top-1 agreement of 99% and perplexity within 1%" in text
    assert "agreement 99.50 +- 0.30%, perplexity +0.10 +- 0.20%" in text
    assert "saves 12.0% of the bytes (1.5 MiB of 12.5 MiB per step)" in text


def test_a_budget_that_costs_more_loads_than_it_saves_is_named(results: dict) -> None:
    assert "cost more loads" not in printed(results) and "1.00 x" in printed(results)
    assert quality.verdict(results["points"], results["generation"]) == results["points"][1]
    results["generation"][2] |= {"bytes_per_token": 107.0, "acceptance_length": 1.7}
    text = printed(results)
    assert "in bytes per token over no budget: router, truncation, B=12 (1.07 x)" in text
    assert quality.verdict(results["points"], results["generation"]) is None, "it is no advice either"
    del results["generation"][0]["bytes_per_token"], results["generation"][1:]
    results["generation"].clear()
    assert quality.loads(results["points"][1], []) is None and "cost more loads" not in printed(results)


def test_report_of_speculated_execution(results: dict) -> None:
    """It has no bound; its bytes stand beside those of the exact model, also where there are no drafts."""
    point = scored(None, 0.97, 0.001, 12.0, ranking="speculated", coverage="restricted")
    exact = results["generation"][0] | {"bytes_per_token": 3 << 20, "distinct": None, "dropped": 0.0}
    ours = point | exact | {"ranking": "speculated", "bytes_per_token": 1 << 20, "dropped": 0.024, "equal": 0.75}
    results |= {"points": [point], "generation": [exact, ours], "verdict": None}
    text = printed(results)
    assert "the closest, speculated execution, restricted, has agreement 97.00" in text
    assert "restricted: 1.0 MiB per token at 50% hits (exact: 3.0 MiB per token at 50% hits)" in text
    assert "2.4% of the routing weight dropped, 75% of the tokens" in text and "verify step; " not in text
    assert "acceptance length 2.500 " in text, "without drafts there is no verify step to count experts of"
