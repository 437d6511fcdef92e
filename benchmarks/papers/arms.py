"""Shared by figures of budgets: an engine answers the same prompts in several ways, and stock vLLM scores them."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scaled"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))
from ladder import total
from paired import Side, interval, orders
from processes import LiveEngine
from run import Settings

from vllm_spac.budget.settings import BudgetSettings

Advance = Callable[[str, int], None]


@dataclass(frozen=True)
class Arm:
    """How the engine answers: what is paused (see ``engine.paused``), and under which budget."""

    name: str
    without: tuple[str, ...] = ()
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Turn:
    """An arm's answer to the prompts ``batch``; ``seed`` is the number of the run at this temperature."""

    arm: str
    temperature: float
    seed: int
    batch: int
    answer: dict

    @property
    def place(self) -> tuple[float, int, int]:
        """What the turns of all arms are compared by."""
        return self.temperature, self.seed, self.batch


def budget_arms(
    budgets: Sequence[str], coverages: Sequence[str], without: tuple[str, ...] = (), **more: str
) -> list[Arm]:
    """Returns an arm for each budget with each coverage; ``more``: other settings of the budget.

    Raises:
        ConfigError: a setting is not the plugin's.
    """
    found = []
    for coverage in coverages:
        for budget in budgets:
            settings = BudgetSettings.parse({"budget": budget, "coverage": coverage, **more})
            weighted = "" if settings.votes == "uniform" else ", votes by path"
            found.append(Arm(f"B = {budget}, {coverage}{weighted}", without, settings.model_dump()))
    return found


def serve(
    side: Side,
    arms: Sequence[Arm],
    runs: Sequence[tuple[float, int]],
    batches: Sequence[Sequence[list[int]]],
    settings: Settings,
    advance: Advance,
) -> list[Turn]:
    """Returns all answers of an engine of ``side``: each run (temperature, seed) asks every arm for each batch.

    The first batch only warms up. Arms take their turns in random order.

    Raises:
        EngineError: the engine failed.
    """
    turns: list[Turn] = []
    with closing(LiveEngine(side.job(settings), False, settings.timeout)) as engine:
        for arm in arms:
            engine.batch(batches[0], settings.output_tokens, arm.without, budget=arm.budget)
        order = orders(settings.seed, len(arms))
        for temperature, seed in runs:
            for number, batch in enumerate(batches[1:], 1):
                for which in next(order):
                    arm = arms[which]
                    more = {"budget": arm.budget, "temperature": temperature, "seed": seed}
                    answer = engine.batch(batch, settings.output_tokens, arm.without, **more)
                    turns.append(Turn(arm.name, temperature, seed, number, answer))
                advance(f"temperature {temperature:g}, run {seed + 1}", len(arms))
    return turns


def score(
    turns: Sequence[Turn], batches: Sequence[Sequence[list[int]]], settings: Settings, advance: Advance
) -> list[float]:
    """Returns the mean log-probability of a token of each turn, by stock vLLM: its exact model, all in memory.

    Raises:
        EngineError: the engine failed.
    """
    found, known = [], {}
    with closing(LiveEngine(Side("stock", None).job(settings), True, settings.timeout)) as engine:
        for turn in turns:
            values = []
            for prompt, tokens in zip(batches[turn.batch], turn.answer["tokens"], strict=True):
                text = (*prompt, *tokens)
                if text not in known:
                    known[text] = engine.score(list(text), len(prompt))
                values += known[text]
            found.append(statistics.fmean(values))
            advance("quality", 1)
    return found


def rows(arms: Sequence[Arm], turns: Sequence[Turn], quality: Sequence[float], exact: int = 0) -> list[dict[str, Any]]:
    """Returns a row for each temperature and arm.

    ``speed``: tokens per second over those of the first arm in the same turn, median with its 95 % interval; the
    deviations are over runs. Answers at temperature 0 are compared with those of the arm number ``exact``.
    """
    answers = {(turn.arm, *turn.place): turn.answer for turn in turns}
    scores = {(turn.arm, *turn.place): value for turn, value in zip(turns, quality, strict=True)}
    found = []
    for temperature in sorted({turn.temperature for turn in turns}):
        for arm in arms:
            places = [turn.place for turn in turns if (turn.arm, turn.temperature) == (arm.name, temperature)]
            mine = [answers[arm.name, *place] for place in places]
            speeds = [rate(answers[arm.name, *place]) / rate(answers[arms[0].name, *place]) for place in places]
            runs = sorted({place[1] for place in places})
            nll = [-statistics.fmean(scores[arm.name, *place] for place in places if place[1] == run) for run in runs]
            of_runs = [
                statistics.median(speed for speed, place in zip(speeds, places, strict=True) if place[1] == run)
                for run in runs
            ]
            same = [same_prefix(answers[arm.name, *place], answers[arms[exact].name, *place]) for place in places]
            counters = total([answer["counters"] for answer in mine])
            drafted = counters.get("speculation", {"drafts": 0})
            tokens = sum(len(one) for answer in mine for one in answer["tokens"])
            found.append(
                {
                    "arm": arm.name,
                    "budget": arm.budget,
                    "temperature": temperature,
                    "tokens_per_second": statistics.median(map(rate, mine)),
                    "speed": statistics.median(speeds),
                    "speed_interval": list(interval(speeds, 0)),
                    "speed_deviation": statistics.stdev(of_runs) if len(runs) > 1 else None,
                    "acceptance_length": 1 + drafted["accepted_tokens"] / drafted["drafts"] if drafted["drafts"] else 1,
                    "perplexity": math.exp(statistics.fmean(nll)),
                    "perplexity_deviation": statistics.stdev(map(math.exp, nll)) if len(runs) > 1 else None,
                    "same_prefix": None if temperature else statistics.fmean(same),
                    "loads_per_token": counters["loads"] / tokens,
                    "dropped_share": counters["budget"]["dropped_weight"] / max(1, counters["budget"]["rows"]),
                    "turns": len(mine),
                }
            )
    return found


def rate(answer: dict) -> float:
    """Returns the tokens per second of all requests together, after the first token of each."""
    return sum(1 / seconds for seconds in answer["tpot"])


def same_prefix(answer: dict, exact: dict) -> float:
    """Returns the share of the tokens before the first that differs from the exact answer's, mean over requests."""
    shares = []
    for mine, other in zip(answer["tokens"], exact["tokens"], strict=True):
        equal = [a == b for a, b in zip(mine, other, strict=True)]
        shares.append((equal.index(False) if False in equal else len(equal)) / len(equal))
    return statistics.fmean(shares)
