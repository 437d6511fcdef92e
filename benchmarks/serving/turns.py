"""Takes turns: what is compared stays alive, and each prompt goes to all, one right after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, TypeVar

from benchmarks.serving.cases import Case, Settings
from benchmarks.serving.processes import LiveEngine
from vllm_spac.decisions.comparison import Ratio, orders

PAUSE = 0.3  # seconds; OpenMP threads of the engine that has just run still spin for 0.2
Asked = TypeVar("Asked")


@dataclass(frozen=True)
class Arm:
    """One participant of a turn: an engine of ``case`` with ``pauses`` paused."""

    case: Case
    pauses: tuple[str, ...] = ()


def in_turns(
    ask: Sequence[Callable[[Asked], dict]], rounds: Iterable[Asked], seed: int, pause: float = PAUSE
) -> Iterator[list[dict]]:
    """Yields the answers of all of ``ask`` in each round, in an order drawn by ``seed``; ``pause``: before each."""
    for asked, order in zip(rounds, orders(seed, len(ask)), strict=False):
        answers: list[dict] = [{} for _ in ask]
        for which in order:
            time.sleep(pause)
            answers[which] = ask[which](asked)
        yield answers


def started(stack: ExitStack, cases: Sequence[Case], settings: Settings) -> list[LiveEngine]:
    """Returns an engine of each case; ``stack`` ends them."""
    return [
        stack.enter_context(closing(LiveEngine(case.job(settings), case.is_stock, settings.timeout))) for case in cases
    ]


def take_turns(arms: Sequence[Arm], batches: Sequence[list[list[int]]], settings: Settings) -> Iterator[list[dict]]:
    """Yields the arms' answers in each turn; the prompts of a batch are served together.

    A first arm that pauses something uses the engine of the second.
    """
    with ExitStack() as stack:
        shared = bool(arms[0].pauses)
        engines = started(stack, [arm.case for arm in arms[shared:]], settings)
        engines = engines[:shared] + engines

        def asking(engine: LiveEngine, arm: Arm) -> Callable[[list[list[int]]], dict]:
            return lambda batch: engine.batch(batch, settings.output_tokens, arm.pauses)

        yield from in_turns([asking(*each) for each in zip(engines, arms, strict=True)], batches, settings.seed)


def beside_first(turns: Sequence[list[dict]], which: int, took: Callable[[dict], float], seed: int) -> dict[str, Any]:
    """Compares arm ``which`` with the first, from ``turns`` [turns][arms].

    Args:
        took: the seconds of an answer that count.

    Returns:
        ``ratio``, by which it was faster, with the ``low`` and ``high`` ends of its 95 % interval; ``ratios`` of the
        ``turns``; and ``tokens_equal``.
    """
    ratios = [took(turn[0]) / took(turn[which]) for turn in turns]
    ratio = Ratio.of(ratios, seed)
    return {
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "turns": ratio.turns,
        "ratios": ratios,
        "tokens_equal": all(turn[which]["tokens"] == turn[0]["tokens"] for turn in turns),
    }
