"""Takes turns: what is compared stays alive, and each prompt goes to all, one right after the other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any, TypeVar

from benchmarks.serving.cases import Case, Settings
from benchmarks.serving.processes import LiveEngine
from vllm_spac.decisions.comparison import interval, orders

PAUSE = 0.3  # seconds; OpenMP threads of the engine that has just run still spin for 0.2
Asked = TypeVar("Asked")


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


def take_turns(cases: Sequence[Case], batches: Sequence[list[list[int]]], settings: Settings) -> Iterator[list[dict]]:
    """Yields the answers of engines of ``cases`` in each turn; the prompts of a batch are served together."""
    with ExitStack() as stack:

        def asking(engine: LiveEngine) -> Callable[[list[list[int]]], dict]:
            return lambda batch: engine.batch(batch, settings.output_tokens)

        yield from in_turns([asking(each) for each in started(stack, cases, settings)], batches, settings.seed)


def ratio_of(ratios: Sequence[float], seed: int, name: str = "ratio") -> dict[str, Any]:
    """Returns the median of the turns' ratios as ``name``, and its 95 % interval."""
    interval_of = "interval" if name == "ratio" else f"{name.removesuffix('_ratio')}_interval"
    return {name: statistics.median(ratios), interval_of: list(interval(ratios, seed))}
