"""The points of a sweep and what follows from results; tables and pictures of made-up ones."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from vllm_spac.cli.main import app
from vllm_spac.errors import ConfigError
from vllm_spac.system.machine import provenance
from vllm_spac.tools.evaluation import figures, quality_report, reconstruction
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
    found, skipped = quality.points(["router", "oracle"], list(quality.COVERAGES), [2, 8], [0.9], FACTS)
    assert found == [
        Point("router", "substitution", budget=8),
        Point("router", "substitution", mass=0.9, mass_of="selected"),
        Point("router", "truncation", budget=2),
        Point("router", "truncation", budget=8),
        Point("router", "truncation", mass=0.9, mass_of="selected"),
    ]
    assert skipped == ["substitution with B=2: every token gets 4 experts"]


def test_points_are_repeated_with_weighted_votes() -> None:
    found, _ = quality.points(["router"], ["truncation"], [8], [0.9], FACTS, alphas=[0.25, 1.0])
    plain, _ = quality.points(["router"], ["truncation"], [8], [0.9], FACTS)
    assert found == [replace(point, votes_alpha=alpha) for alpha in (None, 0.25, 1.0) for point in plain]
    with pytest.raises(ConfigError, match="--alphas: 1.5: use numbers from 0"):
        quality.points(["router"], ["truncation"], [8], [], FACTS, alphas=[0.5, 1.5])


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
    assert settings.alpha is None
    point = Point("router", "truncation", budget=8, votes_alpha=0.25)
    assert BudgetSettings.parse(point.settings("all", 9)).alpha == 0.25
    assert point.label == "B=8, P^0.25" and quality_report.point_of({"mass": None} | asdict(point)) == point


def test_speculated_execution_is_a_point_without_a_bound() -> None:
    from vllm_spac.methods.moe_spec.settings import BudgetSettings

    found, _ = quality.points([], [], [], [], FACTS, speculate=["restricted", "predicted"])
    assert [point.coverage for point in found] == ["restricted", "predicted"] and all(p.speculated for p in found)
    settings = BudgetSettings.parse(found[1].settings("all", 9))
    assert (settings.speculate, settings.when, settings.window, settings.budget) == ("predicted", "all", 9, None)
    assert quality_report.point_of(asdict(found[0])) == found[0]
    both, _ = quality.points(["router"], ["truncation"], [8], [], FACTS, speculate=["restricted"])
    assert both == [Point("router", "truncation", 8), Point("speculated", "restricted")]


def test_results_say_which_mass_and_old_ones_meant_the_scores() -> None:
    old = {"ranking": "router", "coverage": "truncation", "budget": None, "mass": 0.9}
    assert quality_report.point_of(old).label == "0.9 of scores"
    assert quality_report.point_of(old | {"mass_of": "selected"}).label == "0.9 of selected"
    assert quality_report.point_of(old | {"budget": 8, "mass": None}) == Point("router", "truncation", 8)


def test_rankings_by_default_are_those_that_can_be_had() -> None:
    assert set(quality.rankings(None, True)) == {"oracle", "coactivation", "selected", "router", "static", "resident"}
    assert set(quality.rankings(None, False)) == {"oracle", "selected", "router", "resident"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "--budgets 8,16,32"),
        (("--budgets", "8,x"), "--budgets: invalid literal"),
        (("--mass", "most"), "--mass: could not convert"),
        (("--mass", "0.9", "--mass-of", "softmax"), "selected or scores"),
        (("--budgets", "8", "--alphas", "half"), "--alphas: could not convert"),
        (("--budgets", "8", "--rankings", "best"), "there is no 'best'"),
        (("--budgets", "8", "--rankings", "router,router"), "names something twice"),
        (("--budgets", "8", "--rankings", "static"), "static needs --calibration FILE"),
        (("--budgets", "8", "--coverages", "none"), "substitution or truncation"),
        (("--budgets", "8", "--speculative-config", "eagle"), "--speculative-config"),
        (("--speculate", "wild", "--predictor", "p"), "there is no 'wild'; use restricted or predicted"),
        (("--speculate", "predicted"), "--speculate needs --predictor FILE"),
        (("--budgets", "8"), "cannot be read"),
    ],
)
def test_refused_before_an_engine_starts(tmp_path: Path, options: tuple, says: str) -> None:
    assert says in run("quality", "model", "--prompts", tmp_path / "none", *options, code=1)


def test_a_text_with_what_is_generated_must_fit_before_an_engine_starts(tmp_path: Path) -> None:
    (texts := tmp_path / "texts").write_text("hello\n")
    options = ("--budgets", "8", "--new-tokens", "100", "--engine", '{"max_model_len": 512}')
    said = run("quality", "model", "--prompts", texts, *options, code=1)
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


def study(*errors: list[float]) -> dict:
    points = [[ranking, "truncation", 8] for ranking in ("oracle", "router", "static")]
    return {"points": points, "errors": list(errors)}


def test_errors_of_layers_are_averaged() -> None:
    found = reconstruction.summarised([study([1, 2, 3], [3, 4, 5]), study([5, 6, 7])])
    assert [point["error"] for point in found] == [3.5, 4.5, 5.5]
    assert found[0]["by_layer"] == [2, 5] and found[0]["ranking"] == "oracle"


def test_order_is_judged_by_the_same_windows() -> None:
    studies = [study([0.0, 0.1, 0.3], [0.5, 0.7, 0.6]), study([1.0, 1.1, 1.4])]
    [gap] = reconstruction.ordered(studies, "oracle", "router", "truncation")
    assert gap["difference"] == pytest.approx(0.4 / 3) and gap["holds"]
    assert gap["standard_error"] == pytest.approx(0.1 / 3)
    [gap] = reconstruction.ordered(studies, "router", "oracle", "truncation")
    assert not gap["holds"]
    assert reconstruction.ordered(studies, "oracle", "resident", "truncation") == []


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
    studies = [study([0.0, 0.1, 0.3], [0.5, 0.7, 0.9])]
    order = reconstruction.ordered(studies, "oracle", "router", "truncation")
    order += reconstruction.ordered(studies, "static", "router", "truncation")
    return {
        "title": "tiny",
        "window": 9,
        "facts": FACTS,
        "reference": {"perplexity": 9.0, "tokens": 1000},
        "natural": {"distinct": 12.5},
        "step_bytes_per_expert": 1 << 20,
        "points": points,
        "generation": [speeds, *made],
        "routing": {"budgets": [8], "sizes": [{"size": 9, "natural": 12.5, "distinct": [8.0], "curve": [0.5, 1.0]}]},
        "reconstruction": {"points": reconstruction.summarised(studies), "order": order},
        "verdict": quality.verdict(points),
    }


def printed(results: dict) -> str:
    console = Console(width=400, file=io.StringIO())
    console.print(quality_report.table(results), *quality_report.sentences(results))
    return " ".join(console.file.getvalue().split())


def test_report(results: dict) -> None:
    text = printed(results)
    for part in ("B=12", "99.50%", "+0.10%", "12.0%", "2.50", "no budget: perplexity 9.000 over 1,000 tokens"):
        assert part in text, part
    assert "router, truncation, B=12 keeps a top-1 agreement of 99% and perplexity within 1%" in text
    assert "agreement 99.50 +- 0.30%, perplexity +0.10 +- 0.20%" in text
    assert "saves 12.0% of the bytes (1.5 MiB of 12.5 MiB per step)" in text
    assert "oracle <= router at every budget" in text and "static <= router does not hold at B=8" in text


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


def test_report_of_speculated_execution(results: dict, tmp_path: Path) -> None:
    """It has no bound; its bytes stand beside those of the exact model, also where there are no drafts."""
    point = scored(None, 0.97, 0.001, 12.0, ranking="speculated", coverage="restricted")
    exact = results["generation"][0] | {"bytes_per_token": 3 << 20, "distinct": None, "dropped": 0.0}
    ours = point | exact | {"ranking": "speculated", "bytes_per_token": 1 << 20, "dropped": 0.024, "equal": 0.75}
    results |= {"points": [point], "generation": [exact, ours], "reconstruction": None, "verdict": None}
    text = printed(results)
    assert "the closest, speculated execution, restricted, has agreement 97.00" in text
    assert "restricted: 1.0 MiB per token at 50% hits (exact: 3.0 MiB per token at 50% hits)" in text
    assert "2.4% of the routing weight dropped, 75% of the tokens" in text and "verify step; " not in text
    assert "acceptance length 2.500 " in text, "without drafts there is no verify step to count experts of"
    figures.pareto(results, tmp_path / "pareto.png")
    figures.figures(results, tmp_path / "figures.png")


def test_report_without_a_budget_that_keeps_the_quality(results: dict) -> None:
    results["points"] = results["points"][:1]
    results |= {"verdict": None, "generation": [], "reconstruction": None}
    assert "no budget of this sweep keeps" in printed(results) and "router, truncation, B=8" in printed(results)


def test_resident_that_ranks_like_router_is_said(results: dict) -> None:
    results["points"] += [point | {"ranking": "resident"} for point in results["points"]]
    assert "resident ranked like router" in printed(results)
    results["points"][-1]["perplexity"] += 1
    assert "resident ranked like router" not in printed(results)


def test_pictures(results: dict, tmp_path: Path) -> None:
    results["points"] += [point | {"votes_alpha": 0.5} for point in results["points"]]
    figures.pareto(results, tmp_path / "pareto.png")
    figures.figures(results, tmp_path / "figures.png")
    results |= {"generation": [], "reconstruction": None}
    figures.pareto(results, tmp_path / "bare.png")
    figures.figures(results, tmp_path / "bare-figures.png")
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_provenance_is_plain_data() -> None:
    found = provenance()
    assert {"command", "git", "versions", "machine", "date"} == set(found) and json.dumps(found)
