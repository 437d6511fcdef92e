"""Engines for ``vllm-spac tune`` that take no time: their clock moves by what they would take. Set by each test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from vllm_spac.decisions.comparison import ReferenceAnswer
from vllm_spac.tools.tuning.measurer import Answer, Engine, Measurer, MeasuringError
from vllm_spac.tools.tuning.variants import Variant

START = 10.0  # seconds of a start


def ids_of(prompt: str | Sequence[int], tokens: int) -> list[int]:
    """The right answer to a prompt."""
    return [(sum(map(ord, prompt)) if isinstance(prompt, str) else sum(prompt)) % 97 + n for n in range(tokens)]


class Imagined(Measurer):
    """Class attributes, because the command makes the instance.

    Attributes:
        rate: tokens per second of a variant.
        change: changes a variant's right answer.
        fails: names of variants that do not start.
        interrupt: called before each start, e.g. to raise Ctrl-C.
        free: bytes of host memory.
        now: seconds that have passed; ``started``: names of the variants, in order; ``running``: those that have not
            ended.
    """

    rate: ClassVar[Callable[[Variant], float]]
    change: ClassVar[Callable[[Variant, list[int]], list[int]]]
    fails: ClassVar[set[str]]
    interrupt: ClassVar[Callable[[], None]]
    on_cpu: ClassVar[bool]
    near_ties: ClassVar[bool]
    resident: ClassVar[bool]
    free: ClassVar[int]
    now: ClassVar[float]
    started: ClassVar[list[str]]
    running: ClassVar[list[str]]

    @classmethod
    def begin(cls) -> None:
        cls.rate = staticmethod(lambda variant: 10.0)  # type: ignore[assignment]
        cls.change = staticmethod(lambda variant, ids: ids)  # type: ignore[assignment]
        cls.interrupt = staticmethod(lambda: None)  # type: ignore[assignment]
        cls.fails, cls.on_cpu, cls.near_ties, cls.resident, cls.free = set(), True, True, False, 1 << 40
        cls.now, cls.started, cls.running = 0.0, [], []

    def __init__(self, *given: Any) -> None:
        pass

    @contextlib.contextmanager
    def start(self, variant: Variant) -> Iterator[Engine]:
        kind = type(self)
        kind.interrupt()
        kind.started.append(variant.name)
        kind.now += START
        if variant.name in kind.fails:
            raise MeasuringError("exit code 1: Traceback\nno room for the KV cache\n")
        kind.running.append(variant.name)
        try:
            yield _Imagined(variant, kind)
        finally:
            kind.running.remove(variant.name)

    def clock(self) -> float:
        return type(self).now

    def room(self) -> int:
        return type(self).free


class _Imagined(Engine):
    def __init__(self, variant: Variant, world: type[Imagined]) -> None:
        self._variant, self._world = variant, world
        self.near_ties, self.on_cpu, self.resident = world.near_ties, world.on_cpu, world.resident
        self.nbytes = 1 << 20

    def answer(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        seconds = tokens / self._world.rate(self._variant)
        self._world.now += seconds
        return Answer(self._world.change(self._variant, ids_of(prompt, tokens)), seconds, seconds / tokens)

    def explain(self, prompt: str | Sequence[int], tokens: int) -> ReferenceAnswer:
        """The token after the right one is the second best, at a near-tie in the first place alone."""
        ids = ids_of(prompt, tokens)
        return ReferenceAnswer(ids=tuple(ids), second=tuple(n + 1 for n in ids), gap=(0.1, *[5.0] * (tokens - 1)))
