"""One run of ``vllm-spac tune``: each variant takes turns with the default, and the fastest does so once more.

Both answer the same prompt one after the other, so that a drift of the machine affects both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

from vllm_spac.decisions.comparison import Ratio, ReferenceAnswer, Tokens, compare_tokens, orders
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError
from vllm_spac.tools.tuning.variants import Variant

FEWEST, MOST = 6, 40  # turns of a comparison: of fewer, no interval is given
_SEARCH = 2 / 3  # of the time. The rest is the fastest's once more: the best of several is in part the luckiest
_OF_START = 5  # turns of a start, where engines take turns in memory too
_RESERVE = 1 << 30  # bytes of host memory left free beside two engines

Prompt = str | Sequence[int]


@dataclass
class Comparison:
    """A variant and the default in turns."""

    variant: Variant
    # tokens per second of the default and of the variant
    rates: list[tuple[float, float]] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)  # seconds of the variant
    references: list[ReferenceAnswer] = field(default_factory=list)  # the default's answers
    ids: list[Sequence[int]] = field(default_factory=list)  # the variant's
    near_ties: bool = False  # whether they may differ where two tokens are close
    problem: str = ""  # why it ended early, with the end of the engine's log

    @property
    def tokens(self) -> Tokens:
        return compare_tokens(self.references, self.ids, self.near_ties)

    @property
    def wrong(self) -> bool:
        return self.tokens.verdict == "wrong"

    @property
    def speed(self) -> float | None:
        """Tokens per second over the default's; None: there is nothing to compare, or its tokens are wrong."""
        done = self.rates and not self.wrong and not self.problem
        return statistics.median(other / default for default, other in self.rates) if done else None

    @property
    def ratio(self) -> Ratio | None:
        """The same with its interval; None also for too few turns."""
        if self.speed is None or len(self.rates) < FEWEST:
            return None
        return Ratio.of([other / default for default, other in self.rates])

    def add(self, explained: ReferenceAnswer, default: Answer, other: Answer) -> None:
        self.rates.append((default.rate, other.rate))
        self.first_token.append(other.first_token)
        self.references.append(explained)
        self.ids.append(other.ids)

    def __str__(self) -> str:
        name, turns = self.variant.name, len(self.rates)
        if self.problem:
            return f"{name}: failed: {last_line(self.problem)}"
        if self.speed is None:
            return f"{name}: {self.tokens if self.wrong else 'no turns'}"
        return f"{name}: {self.ratio or f'{self.speed:.2f} ({turns} turns)'} times the default's tokens/s"


class Session:
    """One run.

    Args:
        ways: the variants, the default first, given whether it has a slot for every expert.
        prompts: are used in order, and repeated.
        seconds: of the whole run, without the first start, which may have to pack the experts.
        beside: bytes that a second engine may need more than the first.
        announce: called with what is being measured, and the seconds spent.
        report: called with what will be measured, and what each comparison found, in a sentence.
    """

    def __init__(
        self,
        ways: Callable[[bool], Sequence[Variant]],
        prompts: Sequence[Prompt],
        tokens: int,
        seconds: float,
        measurer: Measurer,
        beside: int = 0,
        announce: Callable[[str, float], object] = lambda text, spent: None,
        report: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.compared: list[Comparison] = []  # so far
        self.last: Comparison | None = None  # the fastest, once more
        self.untried: list[Variant] = []  # for want of time
        self._ways, self._prompts, self._tokens, self._seconds = ways, prompts, tokens, seconds
        self._measurer, self._beside, self._announce, self._report = measurer, beside, announce, report
        self._default = ways(False)[0]
        self._kept: Engine | None = None  # the default's engine, where two fit beside each other
        self._references: dict[int, ReferenceAnswer] = {}  # the default's answers, by prompt
        self._least = 0.0  # seconds that FEWEST turns took, with their starts
        self._begin: float | None = None

    def run(self) -> None:
        """Measures until the time is spent; ``MeasuringError`` if the default cannot be measured."""
        with ExitStack() as stack:
            self._announce("the first start, which may pack the experts", 0.0)
            engine = stack.enter_context(self._running(self._default))
            self.untried = list(self._ways(engine.resident)[1:])
            self._begin = self._measurer.clock()
            if engine.on_cpu and self._measurer.room() >= engine.nbytes + self._beside + _RESERVE:
                self._kept = engine
            else:
                stack.close()
            names, time = ", ".join(variant.name for variant in self.untried), minutes(self._seconds)
            why = " (every expert has a slot, so that drafts alone can be faster)" if engine.resident else ""
            self._report(f"in turns with the default, in at most {time}: {names}{why}")
            while self.untried:
                search = _SEARCH if self._certain else 1  # while nothing is faster, nothing has to be asked again
                end = search * self._seconds
                if self.spent + self._least > end:
                    break
                share = self.spent + max(0.0, _SEARCH * self._seconds - self.spent) / len(self.untried)
                self.compared.append(Comparison(self.untried.pop(0)))
                self._compare(self.compared[-1], share, end)
            if (best := self._certain) is not None:
                self.last = Comparison(best.variant)
                self._compare(self.last, self._seconds, self._seconds)

    @property
    def spent(self) -> float:
        """Seconds since the first start."""
        return 0.0 if self._begin is None else self._measurer.clock() - self._begin

    @property
    def default_rates(self) -> list[float]:
        """Tokens per second of the default, in all turns."""
        return [default for each in self.compared for default, _ in each.rates]

    @property
    def best(self) -> Comparison | None:
        """What was the fastest so far; None: nothing was faster than the default."""
        return self._certain or _fastest([each for each in self.compared if (each.speed or 0) > 1])

    @property
    def _certain(self) -> Comparison | None:
        """The fastest of what is faster by its whole interval."""
        return _fastest([each for each in self.compared if each.ratio is not None and each.ratio.is_faster])

    @property
    def choice(self) -> Variant:
        """The default, unless a variant was faster than it twice."""
        ratio = None if self.last is None else self.last.ratio
        return self.last.variant if self.last and ratio and ratio.is_faster else self._default

    @property
    def undecided(self) -> bool:
        """Whether the time was too short to keep anything, the default included."""
        if self.choice is not self._default:
            return False
        short = [each for each in self.compared if each.ratio is None and not each.wrong and not each.problem]
        again = self.last is not None and self.last.ratio is None and not self.last.wrong
        return bool(self.untried or short) or again

    def sentences(self) -> Iterator[str]:
        """Yields what was decided, and why."""
        last = self.last
        if last is None:
            yield "nothing was faster than the default, " + ("as far as it came" if self.undecided else "which is kept")
        elif last.ratio is None and not last.wrong:
            yield f"{last.variant.name} was the fastest; it could not be compared with the default once more"
        elif last.ratio is not None:
            yield f"once more in turns, {last.variant.name} over the default, tokens per second: {last.ratio}"
            if not last.ratio.is_faster:
                yield "the interval includes 1, so the default is kept"
        if last is not None and last.tokens.verdict == "near-ties":
            exact = """--engine '{"dtype": "float32"}'"""
            yield f"its tokens are the default's but for {last.tokens}; {exact} allows no difference"

    def errors(self) -> Iterator[str]:
        """Yields a sentence on each variant whose tokens were wrong."""
        for each in (*self.compared, self.last):
            if each is not None and each.wrong:
                yield (
                    f"{each.variant.name}: tokens are {each.tokens}; it is never kept; please report this with the "
                    "command and the model"
                )

    def _compare(self, comparison: Comparison, until: float, end: float) -> None:
        """Adds turns until ``until``, or for the fewest until ``end``; the default's failure is an error."""
        variant, begin = comparison.variant, self.spent
        asked, size = variant, 1 if self._kept else _OF_START
        self._show(variant)
        try:
            with self._running(variant) if self._kept else nullcontext() as mine:
                for order in orders(0):
                    if not self._goes_on(comparison, until, end):
                        break
                    places = [(len(comparison.rates) + n) % len(self._prompts) for n in range(size)]
                    answers: dict[int, list[Answer]] = {}
                    for which in order:
                        asked, kept = ((self._default, self._kept), (variant, mine))[which]
                        with self._running(asked, kept) as engine:
                            answers[which] = [engine.answer(self._prompts[place], self._tokens) for place in places]
                            self._learn(comparison, engine, which, places, answers[which])
                    for place, default, other in zip(places, answers[0], answers[1], strict=True):
                        comparison.add(self._references[place], default, other)
                    self._show(variant)
        except MeasuringError as error:
            if asked is self._default:
                raise
            comparison.problem = str(error)
        if len(comparison.rates) >= FEWEST:
            self._least = max(self._least, (self.spent - begin) * FEWEST / len(comparison.rates))
        self._report(f"{comparison}; {self._left}")

    @property
    def _left(self) -> str:
        return f"at most {minutes(self._seconds - self.spent)} left"

    def _show(self, variant: Variant) -> None:
        self._announce(f"{variant.name}, in turns with the default; {self._left}", self.spent)

    def _goes_on(self, comparison: Comparison, until: float, end: float) -> bool:
        ratio = comparison.ratio
        if comparison.wrong or len(comparison.rates) >= MOST or (ratio is not None and ratio.high < 1):
            return False
        return self.spent < (until if len(comparison.rates) >= FEWEST else end)

    def _learn(
        self, comparison: Comparison, engine: Engine, which: int, places: Sequence[int], answers: Sequence[Answer]
    ) -> None:
        """Learns what the default answers, with the second best tokens, or whether near-ties are the variant's."""
        if which:
            same = comparison.variant.drafts is None and not comparison.variant.rounds and engine.on_cpu
            comparison.near_ties = not same and (engine.near_ties or comparison.variant.rounds)
            return
        for place, answer in zip(places, answers, strict=True):
            if place not in self._references:
                explained = engine.near_ties or any(variant.rounds for variant in self._ways(False))
                plain = ReferenceAnswer(ids=tuple(answer.ids))
                self._references[place] = engine.explain(self._prompts[place], self._tokens) if explained else plain

    @contextmanager
    def _running(self, variant: Variant, kept: Engine | None = None) -> Iterator[Engine]:
        """An engine that has answered once: ``kept``, or one that starts now and ends afterwards."""
        if kept is not None:
            yield kept
            return
        with self._measurer.start(variant) as engine:
            engine.answer(self._prompts[0], 2)  # warm
            yield engine


def _fastest(comparisons: Sequence[Comparison]) -> Comparison | None:
    return max(comparisons, key=lambda each: each.speed or 0, default=None)


def minutes(seconds: float) -> str:
    """Formats a time that is left."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{max(0.0, seconds):.0f} s"


def last_line(log: str) -> str:
    """Returns the last line of a log that says anything."""
    return next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "it says nothing")
