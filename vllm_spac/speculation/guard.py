"""How many draft tokens a step may use, so that speculating is never slower than not speculating.

One length d is the current one. Now and then another one runs for a few steps, a *trial*, and its seconds are compared
with those of the current steps right before and after it, and with nothing else: a machine whose disk or clock drifts
slows all lengths alike, and what was measured a minute ago says nothing of now. For each size of batch the last ratios
are kept; with the decayed probability that a draft is accepted at each position they say what every d would gain.

No speculation is the safe answer. It is left for a gain of more than ``margin`` that is also surer than chance, and
returned to as soon as it seems ahead; while there is speculation, it is tried again and again.

Two things are not left to that schedule. While there is speculation, a Page test adds up how much longer steps take
than their tokens are worth; where the sum runs away, no speculation is tried next, and judged by the steps since
the change. While there is none, a *probe* of one draft runs every ``_PROBE`` steps, as far as ``loss`` allows: nothing
else shows that drafts would be accepted or have become cheap. A length that looks cheaper than ever is tried again at
once.

Trials of drafts are at most ``share`` of a size of batch's steps beyond its first ``ALLOWANCE``; what they lost, by
their own seconds and tokens, is at most ``loss`` of its seconds before there is another one, the first trials apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from vllm_spac.speculation.acceptance import Acceptance
from vllm_spac.speculation.batch_guard import BatchGuard, GuardSettings


class Guard:
    """Decides the draft length of each step. Deterministic: the same calls give the same answers. Not thread-safe.

    Args:
        max_drafts: the greatest length (K), at least 1.
        share: of steps that may go into trying other lengths.
        loss: of seconds that may be lost by it.
        margin: a length replaces a shorter or longer one only if it gives so much more tokens a second.
        memory: verified steps after which an accepted draft counts 1/e; a position not reached as long is stale.
        clock: seconds that never go back; asked only where ``observe`` is not given any.
    """

    def __init__(
        self,
        max_drafts: int,
        *,
        share: float = 0.03,
        loss: float = 0.005,
        margin: float = 0.05,
        memory: int = 100,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.max_drafts = max_drafts
        self._settings = GuardSettings(max_drafts, share, loss, margin, memory)
        self.acceptance = Acceptance(max_drafts, memory)
        self.steps = [0] * (max_drafts + 1)
        self.ignored = 0
        self._clock = clock
        self._batches: dict[int, BatchGuard] = {}
        self._batch = self._batch_of(1)
        self._last: tuple[int, BatchGuard] | None = None
        self._began: float | None = None

    def choose(self, requests: int | None = None) -> int:
        """Draft tokens that each request may use in the next step; ``requests``: its size, the last one's if None."""
        if requests:
            self._batch = self._batch_of(requests)
        self._began = self._clock()
        return self._batch.length

    def observe(self, drafts: int, emitted: Sequence[int], requests: int, seconds: float | None = None) -> None:
        """A step is over.

        Args:
            drafts: the length that the step ran under, whatever was chosen meanwhile. A drafter that proposed less
                had the rest rejected.
            emitted: tokens of each request that decoded or verified: accepted drafts and one more.
            requests: all requests of the step. More than emitted tokens: prompts were in it, and it is ignored.
            seconds: of the forward and the drafting; None: since ``choose``.
        """
        assert 0 <= drafts <= self.max_drafts, f"{drafts} drafts of at most {self.max_drafts}"
        if seconds is None:
            seconds = self._clock() - self._began if self._began is not None else 0.0
        self._began = None
        if not emitted or requests != len(emitted) or not 0 < seconds < math.inf:
            self.ignored += 1
            return
        self.steps[drafts] += 1
        self.acceptance.update(drafts, emitted)
        self._batch = self._batch_of(requests)
        settled = self._last == (drafts, self._batch)
        self._last = (drafts, self._batch)
        self._batch.observe(drafts, seconds, sum(emitted) / len(emitted), settled)

    def facts(self) -> dict:
        """What to show: the length that runs now, steps by length, speed over no speculation."""
        batch = self._batch
        return {
            "draft_length": batch.length,
            "steps": {length: count for length, count in enumerate(self.steps) if count},
            "ignored_steps": self.ignored,
            "explored_steps": sum(item.explored for item in self._batches.values()),
            "switches": sum(item.switches for item in self._batches.values()),
            "speedup": math.exp(-batch.gains()[0]),
            "tokens_per_step": self.acceptance.tokens()[batch.current],
        }

    def _batch_of(self, requests: int) -> BatchGuard:
        """Sizes from one power of two to the next share their estimates."""
        size = (requests - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = BatchGuard(self._settings, self.acceptance)
        return self._batches[size]
