"""The guard of speculation: chooses the draft length, so that speculating is never slower than not speculating.

One length d is the current one. From time to time another one runs for a few steps, a *trial*, and its seconds are
compared with those of the current steps right before and after it, and with nothing else: a machine whose disk or clock
drifts slows all lengths alike, and a measurement that is a minute old no longer holds. The last ratios are kept per
batch size; together with the decayed acceptance probability per position they give the gain of every d.

No speculation is the safe choice. It is left only for a gain that exceeds ``margin`` and is statistically significant,
and returned to as soon as it seems better; while drafts are used, it is tried regularly.

Three cases do not wait for that schedule. While drafts are used, a Page test adds up how much longer steps take than
their tokens justify, and ``AdoptedDrafts`` how much longer than the same tokens took without speculation: the first
notices a change, the second drafts that were adopted by mistake. When one passes its limit, no speculation is tried
next and compared with the steps that were added up. While none are used, a *probe* of one draft runs every ``_PROBE``
steps, as far as ``loss`` allows: nothing else shows that drafts would be accepted or have become cheap. A length that
looks cheaper than ever is tried again at once.

Per batch size, trials of drafts take at most ``share`` of the steps after the first ``ALLOWANCE``. Another trial starts
only while what earlier ones lost, computed from their seconds and tokens, is at most ``loss`` of all seconds; the first
trials are exempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from vllm_spac.decisions.guard.acceptance import Acceptance
from vllm_spac.decisions.guard.batch_guard import BatchGuard, GuardSettings


class Guard:
    """Chooses the draft length of each step. Deterministic: the same calls return the same lengths. Not thread-safe.

    Args:
        max_drafts: the greatest length (K), at least 1.
        limits: on trials, as in ``GuardSettings``.
    """

    def __init__(self, max_drafts: int, **limits: Any) -> None:
        self.max_drafts = max_drafts
        self._settings = GuardSettings(max_drafts, **limits)
        self.acceptance = Acceptance(max_drafts, self._settings.memory)
        self.steps = [0] * (max_drafts + 1)
        self.ignored = 0
        self._batches: dict[int, BatchGuard] = {}
        self._batch = self._batch_of(1)
        self._last: tuple[int, BatchGuard] | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that it may choose; empty: all."""
        return self._settings.lengths

    @property
    def rests(self) -> bool:
        """Whether steps like the last one have no drafts, because these have not paid for long."""
        return self._batch.rests

    def restrict(self, lengths: Iterable[int]) -> None:
        """Chooses 0 or one of ``lengths`` only; called before any step."""
        assert not any(self.steps), "steps have run"
        self._settings = replace(self._settings, lengths=tuple(sorted({0, *lengths})))
        self._batches.clear()
        self._batch = self._batch_of(1)

    def choose(self, requests: int | None = None) -> int:
        """Draft tokens per request for the next step; ``requests``: its batch size, None for that of the last step."""
        if requests:
            self._batch = self._batch_of(requests)
        return self._batch.length

    def observe(self, drafts: int, emitted: Sequence[int], requests: int, seconds: float) -> None:
        """Records a finished step.

        Args:
            drafts: the length that the step ran with, whatever was chosen since. Drafts that the drafter did not
                propose count as rejected.
            emitted: tokens of each request that decoded or verified: its accepted drafts plus one.
            requests: all requests of the step. A step with prompts (more requests than entries in ``emitted``) is
                ignored.
            seconds: of the forward and the drafting.
        """
        assert 0 <= drafts <= self.max_drafts, f"{drafts} drafts of at most {self.max_drafts}"
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
        """Statistics to report: the current length, steps by length, speed relative to no speculation."""
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
        """The guard for batches of ``requests``; sizes from one power of two to the next share one."""
        size = (requests - 1).bit_length()
        if size not in self._batches:
            self._batches[size] = BatchGuard(self._settings, self.acceptance)
        return self._batches[size]
