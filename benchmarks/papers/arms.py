"""Shared by figures of budgets: an engine answers the same prompts in several ways, and stock vLLM scores them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.scaled.ladder import total
from benchmarks.serving.cases import STOCK, Case, Settings
from benchmarks.serving.processes import LiveEngine
from benchmarks.serving.turns import PAUSE, in_turns, started
from vllm_spac.decisions.comparison import interval
from vllm_spac.methods.moe_spec.settings import BudgetSettings

Advance = Callable[[str, int], None]
SHOWN = (  # of a row, on the terminal
    *("arm", "speed", "speed_interval", "acceptance_length", "perplexity", "top1_agreement", "kl", "same_prefix"),
    *("experts_per_step", "loads_per_token", "dropped_share"),
)
CANDIDATES = 20  # whose log-probabilities an answer has at each position, for its divergence: vLLM's own limit


@dataclass(frozen=True)
class Arm:
    """How an engine answers: what is paused (see ``engine.paused``), under which budget, and the engine's number."""

    name: str
    without: tuple[str, ...] = ()
    budget: Mapping[str, Any] | None = None
    engine: int = 0


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


@dataclass(frozen=True)
class Quality:
    """What stock vLLM thinks of a turn's answer, means over its tokens.

    Attributes:
        logprob: log-probability of a token.
        best: share of the tokens that no other is likelier than, given the answer so far: top-1 agreement.
        kl: nats by which the distributions that the tokens are from differ from stock's; None if it was not asked for.
    """

    logprob: float
    best: float
    kl: float | None = None


def budget_arms(
    budgets: Sequence[str], coverages: Sequence[str], without: tuple[str, ...] = (), engine: int = 0, **more: str
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
            found.append(Arm(f"B = {budget}, {coverage}{weighted}", without, settings.model_dump(), engine))
    return found


def serve(
    cases: Sequence[Case],
    arms: Sequence[Arm],
    runs: Sequence[tuple[float, int]],
    batches: Sequence[Sequence[list[int]]],
    settings: Settings,
    advance: Advance,
    candidates: int = 0,
) -> list[Turn]:
    """Returns all answers of the engines of ``cases``: each run (temperature, seed) asks every arm for each batch.

    The first batch only warms up. Arms take their turns in random order, with all engines alive.

    Args:
        candidates: number of batches whose answers at temperature 0 have the log-probabilities of candidates. These
            take time, and are asked for in a turn of their own.

    Raises:
        EngineError: an engine failed.
    """
    turns: list[Turn] = []
    asked = [(*run, number) for run in runs for number in range(1, len(batches))]
    with ExitStack() as stack:
        engines = started(stack, cases, settings)
        for arm in arms:
            engines[arm.engine].batch(batches[0], settings.output_tokens, arm.without, budget=arm.budget)

        def prefilled() -> Iterator[tuple[float, int, int]]:
            for each in asked:
                prefills[:] = [engine.batch(batches[each[2]], 1)["counters"] for engine in engines]
                yield each

        def ask(arm: Arm, each: tuple[float, int, int]) -> dict:
            temperature, seed, number = each
            more: dict[str, Any] = {"budget": arm.budget, "temperature": temperature, "seed": seed}
            again = partial(engines[arm.engine].batch, batches[number], settings.output_tokens, arm.without, **more)
            answer = again()
            answer["counters"]["generating"] = generating(answer, prefills[arm.engine])
            if number <= candidates and not temperature:
                answer["with_candidates"] = again(logprobs=CANDIDATES)
            return answer

        prefills: list[dict] = []
        pause = PAUSE if len(engines) > 1 else 0
        found = in_turns([partial(ask, arm) for arm in arms], prefilled(), settings.seed, pause)
        for (temperature, seed, number), answers in zip(asked, found, strict=True):
            turns += [Turn(arm.name, temperature, seed, number, said) for arm, said in zip(arms, answers, strict=True)]
            advance(f"temperature {temperature:g}, run {seed + 1}", len(arms))
    return turns


def generating(answer: dict, prefill: Mapping[str, Any]) -> dict[str, float]:
    """Returns the steps after the prompts and the distinct experts per layer that they used, summed over steps."""

    def experts(counters: Mapping[str, Any]) -> int:
        return sum(counters[name] for name in ("hits", "misses", "cpu_experts"))

    layers, counters = answer["choices"]["layers"], answer["counters"]
    return {
        "steps": sum(counters["steps"].values()) - sum(prefill["steps"].values()),
        "experts": (experts(counters) - experts(prefill)) / layers,
    }


def score(
    turns: Sequence[Turn], batches: Sequence[Sequence[list[int]]], settings: Settings, advance: Advance
) -> list[Quality]:
    """Returns what stock vLLM, the exact model with all experts in memory, thinks of each turn's answer.

    Raises:
        EngineError: the engine failed.
    """
    found, known = [], {}
    job = Case(STOCK, None).job(settings)
    job["options"]["max_logprobs"] = -1  # of all tokens, for divergences
    with closing(LiveEngine(job, True, settings.timeout)) as engine:
        for turn in turns:
            logprobs, best, kl = [], [], []
            for number, prompt in enumerate(batches[turn.batch]):
                text = [*prompt, *turn.answer["tokens"][number]]
                if tuple(text) not in known:
                    known[tuple(text)] = engine.score(text, len(prompt))
                logprobs += known[tuple(text)]["logprobs"]
                best += known[tuple(text)]["best"]
                if again := turn.answer.get("with_candidates"):
                    text = [*prompt, *again["tokens"][number]]
                    kl += engine.score(text, len(prompt), again["candidates"][number])["kl"]
            means = statistics.fmean(logprobs), statistics.fmean(best)
            found.append(Quality(*means, statistics.fmean(kl) if kl else None))
            advance("quality", 1)
    return found


def rows(
    arms: Sequence[Arm], turns: Sequence[Turn], quality: Sequence[Quality], exact: int = 0
) -> list[dict[str, Any]]:
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
            said = [scores[arm.name, *place] for place in places]
            nll = [
                -statistics.fmean(one.logprob for one, place in zip(said, places, strict=True) if place[1] == run)
                for run in runs
            ]
            kl = [one.kl for one in said if one.kl is not None]
            of_runs = [
                statistics.median(speed for speed, place in zip(speeds, places, strict=True) if place[1] == run)
                for run in runs
            ]
            same = [same_prefix(answers[arm.name, *place], answers[arms[exact].name, *place]) for place in places]
            counters = total([answer["counters"] for answer in mine])
            drafted = counters.get("speculation", {"drafts": 0})
            tokens = sum(len(one) for answer in mine for one in answer["tokens"])
            steps = counters["generating"]
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
                    "top1_agreement": statistics.fmean(one.best for one in said),
                    "kl": statistics.fmean(kl) if kl else None,
                    "same_prefix": None if temperature else statistics.fmean(same),
                    "experts_per_step": steps["experts"] / steps["steps"],
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
