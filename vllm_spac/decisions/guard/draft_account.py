"""What the drafts of each step cost and brought, for the chooser of their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_spac.core import RowKind, Step
from vllm_spac.decisions.guard.chooser import Chooser


class DraftAccount:
    """Called by the forward thread: ``begin``, ``add_forwards`` once the drafter has run, ``end`` with the tokens.

    Args:
        chooser: None: drafts are not guarded, and nothing is timed.
        clock: monotonic time in seconds.
        missed: returns how many experts layers have missed so far.

    Attributes:
        step: the step that has begun and not ended; None between steps.
    """

    def __init__(self, chooser: Chooser | None, clock: Callable[[], float], missed: Callable[[], int]) -> None:
        self.chooser, self._clock, self.missed = chooser, clock, missed
        self.step: Step | None = None
        self._start, self._before, self._drafting = 0.0, 0, 0.0

    @property
    def in_prompt(self) -> bool:
        """Whether the step has rows of prompts."""
        return self.step is not None and self.step.prompts

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.step, self._start, self._drafting = step, self._clock(), 0.0
        self._before = 0 if self.chooser is None else self.missed()

    def length(self) -> int | None:
        """Most draft tokens per request that may be made for the next step; None leaves the number to vLLM."""
        if self.chooser is None:
            return None
        requests = () if self.step is None else self.step.requests
        return self.chooser.allows(sum(request.kind != RowKind.PREFILL for request in requests) or None)

    def add_forwards(self, forwards: int, seconds: float) -> None:
        """The drafter took ``seconds`` for ``forwards`` forwards, one after another."""
        self._drafting = seconds
        if self.chooser is not None and forwards and not self.in_prompt:  # whose rows the drafter reads, too
            self.chooser.observe_drafter(forwards, seconds)

    def end(self, tokens: Sequence[int] | None) -> str | None:
        """Ends the step, in which each request emitted some ``tokens``; returns what to log, if the guard changes."""
        step, self.step = self.step, None
        if self.chooser is None or tokens is None or step is None:
            return None
        answered = [
            (request.drafts, count)
            for count, request in zip(tokens, step.requests, strict=True)
            if request.kind != RowKind.PREFILL and count
        ]
        drafts, emitted = [drafts for drafts, _ in answered], [count for _, count in answered]
        seconds, new = self._clock() - self._start, self.missed() - self._before
        verdict = self.chooser.end_step(drafts, emitted, len(step.requests), seconds, self._drafting, new)
        return verdict.of_drafts if verdict is not None and verdict.changes else None
