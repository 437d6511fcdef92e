"""What a run needs of engines: to start one for a candidate, and to answer prompts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vllm_spac.tuning.candidate import Candidate
from vllm_spac.tuning.comparison import Said


class MeasuringError(RuntimeError):
    """An engine did not start, or did not answer; the message ends with the end of its log."""


@dataclass(frozen=True)
class Answer:
    """The greedy answer to one prompt, alone in the engine.

    Attributes:
        ids: its tokens.
        seconds: from the request to the last token; ``first_token``: to the first.
    """

    ids: Sequence[int]
    seconds: float
    first_token: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return len(self.ids) / self.seconds


class Engine(ABC):
    """A running engine.

    Attributes:
        near_ties: whether kernels may round a row differently for other numbers of rows: not so in float32.
        repeats: whether steps with the same rows give the same bits, as on a CPU.
        nbytes: host memory that it takes.
        exclusive: whether no other engine can run beside it, e.g. because each takes most of a GPU.
    """

    near_ties: bool
    repeats: bool
    nbytes: int
    exclusive: bool

    @abstractmethod
    def answer(self, prompt: str | Sequence[int], tokens: int) -> Answer:
        """Generates ``tokens`` tokens; ``MeasuringError`` if the engine has ended."""

    @abstractmethod
    def explain(self, prompt: str | Sequence[int], tokens: int) -> Said:
        """Generates as ``answer`` does, with the second best token at each place."""


class Measurer(ABC):
    """Starts engines."""

    @abstractmethod
    def start(self, candidate: Candidate) -> AbstractContextManager[Engine]:
        """Returns a context with an engine that is gone afterwards; ``MeasuringError`` if it does not start."""

    def clock(self) -> float:
        """Seconds since some moment."""
        return time.monotonic()

    def room(self) -> int:
        """Bytes of host memory that are free."""
        from vllm_spac.system.host_memory import available_host_bytes

        return available_host_bytes()
