"""Engines for ``vllm-spac tune`` that take no time: their clock moves by what they would take. Set by each test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from vllm_spac.config.tuned_profile import Candidate
from vllm_spac.decisions.comparison import Said
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError

START = 10.0  # seconds of a start
in_turns = False  # whether the search is over; set by the test


def ids_of(prompt: str | Sequence[int], tokens: int) -> list[int]:
    """The right answer to a prompt."""
    return [(sum(map(ord, prompt)) if isinstance(prompt, str) else sum(prompt)) % 97 + n for n in range(tokens)]


class Imagined(Measurer):
    """Class attributes, because the command makes the instance.

    Attributes:
        rate: tokens per second of a candidate.
        change: changes a candidate's right answer.
        fails: names of candidates that do not start.
        interrupt: number of starts before Ctrl-C.
        now: seconds that have passed; ``started``: names of the candidates, in order.
    """

    rate: ClassVar[Callable[[Candidate], float]]
    change: ClassVar[Callable[[Candidate, list[int]], list[int]]]
    fails: ClassVar[set[str]]
    interrupt: ClassVar[int | None]
    exclusive: ClassVar[bool]
    near_ties: ClassVar[bool]
    now: ClassVar[float]
    started: ClassVar[list[str]]

    @classmethod
    def begin(cls) -> None:
        cls.rate = staticmethod(lambda candidate: 10.0)  # type: ignore[assignment]
        cls.change = staticmethod(lambda candidate, ids: ids)  # type: ignore[assignment]
        cls.fails, cls.interrupt, cls.exclusive, cls.near_ties = set(), None, False, True
        cls.now, cls.started = 0.0, []

    @contextlib.contextmanager
    def start(self, candidate: Candidate) -> Iterator[Engine]:
        kind = type(self)
        if kind.interrupt is not None and len(kind.started) == kind.interrupt:
            raise KeyboardInterrupt
        kind.started.append(candidate.name)
        kind.now += START
        if candidate.name in kind.fails:
            raise MeasuringError("exit code 1: Traceback\nno room for the KV cache\n")
        yield _Imagined(candidate, kind)

    def clock(self) -> float:
        return type(self).now

    def room(self) -> int:
        return 1 << 40


class _Imagined(Engine):
    nbytes, repeats = 1 << 20, True

    def __init__(self, candidate: Candidate, world: type[Imagined]) -> None:
        self._candidate, self._world = candidate, world
        self.near_ties, self.exclusive = world.near_ties, world.exclusive

    def answer(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        seconds = tokens / self._world.rate(self._candidate)
        self._world.now += seconds
        return Answer(self._world.change(self._candidate, ids_of(prompt, tokens)), seconds, seconds / tokens)

    def explain(self, prompt: str | Sequence[int], tokens: int) -> Said:
        """The token after the right one is the second best, at a near-tie in the first place alone."""
        ids = ids_of(prompt, tokens)
        return Said(ids=tuple(ids), second=tuple(n + 1 for n in ids), gap=(0.1, *[5.0] * (tokens - 1)))
