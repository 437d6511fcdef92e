"""Which steps leave prompts out: running requests keep their share, and prompts wait no longer than that takes."""

from __future__ import annotations

import math
from collections import deque

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_spac.decisions.prompt_chunks import SHARE, ChunkPacing

DECODE = 1.0  # seconds of a step that only decodes
ROUNDING = 1e-6
# Of each prompt: the step before which it comes, and what its chunks take beside running requests.
PROMPTS = st.lists(st.tuples(st.integers(0, 30), st.lists(st.floats(1.0, 60.0), min_size=1, max_size=6)), max_size=6)


class Served:
    """A server with requests that run throughout ``busy`` steps, and ``ahead`` steps that have not ended."""

    def __init__(self, prompts: list, ahead: int, busy: float = math.inf) -> None:
        self.pacing, self.steps = ChunkPacing(), []  # of each step: (chunk's seconds or None, whether it was left out)
        self._ahead, self._busy, self._running = ahead, busy, deque()
        self._coming = sorted(prompts, key=lambda prompt: prompt[0])
        self._chunks: deque[float] = deque()

    def run(self) -> list[tuple[float | None, bool]]:
        while self._coming or self._chunks:
            assert len(self.steps) < 100_000, "a prompt starves"
            self.step()
        while self._running:
            self._end()
        return self.steps

    def step(self) -> None:
        while self._coming and self._coming[0][0] <= len(self.steps):
            self._chunks += self._coming.pop(0)[1]
        decoding = len(self.steps) < self._busy
        out = bool(self._chunks) and decoding and self.pacing.waits
        chunk = self._chunks.popleft() if self._chunks and not out else None
        self.pacing.begin_step(chunk is not None and decoding)
        self.steps.append((chunk, out))
        self._running.append((chunk, decoding))
        while len(self._running) > self._ahead - 1:
            self._end()

    def _end(self) -> None:
        chunk, decoding = self._running.popleft()
        self.pacing.end_step(chunk is not None, decoding, DECODE if chunk is None else chunk)


def seconds(steps: list[tuple[float | None, bool]]) -> float:
    return sum(DECODE if chunk is None else chunk for chunk, _ in steps)


@settings(max_examples=examples(500))
@given(PROMPTS, st.integers(1, 2), st.one_of(st.just(math.inf), st.integers(0, 80)))
def test_prompts_wait_a_third_of_their_chunks_and_a_step_each_at_most(prompts, ahead: int, busy: float) -> None:
    steps = Served(prompts, ahead, busy).run()
    chunks = [chunk for chunk, _ in steps if chunk is not None]
    assert sorted(chunks) == sorted(chunk for _, parts in prompts for chunk in parts)
    waited = DECODE * sum(out for _, out in steps)
    assert waited <= SHARE / (1 - SHARE) * sum(chunks) + ahead * DECODE * len(chunks) + ROUNDING


@settings(max_examples=examples(500))
@given(PROMPTS)
def test_running_requests_keep_their_share_whenever_a_chunk_is_computed(prompts) -> None:
    """Of any time that ends with a step before which a chunk may be computed, and begins with one that owed nothing."""
    served = Served([(first + 1, chunks) for first, chunks in prompts], 1)
    since = 0
    while served._coming or served._chunks:
        if not served.pacing.waits and len(served.steps) > since:
            part = served.steps[since:]
            assert SHARE * seconds(part) <= DECODE * len(part) + ROUNDING
            since = len(served.steps)
        served.step()


def test_a_long_chunk_is_followed_by_steps_that_only_decode() -> None:
    served = Served([(1, [40.0] * 3)], 1)
    assert [chunk is not None for chunk, _ in served.run()] == ([False] + ([True] + [False] * 12) * 3)[: 1 + 13 * 2 + 1]


def test_chunks_that_take_little_more_than_a_token_follow_one_another() -> None:
    assert not any(out for _, out in Served([(1, [3.9] * 50)], 1).run())


def test_of_steps_ahead_the_first_chunk_is_waited_for() -> None:
    """What it takes is not known, and later ones are taken to take as long."""
    steps = [chunk is not None for chunk, _ in Served([(2, [40.0] * 3)], 2).run()]
    assert max(map(len, "".join("c" if chunk else " " for chunk in steps).split())) == 1
    assert 12 <= steps.index(True, 3) - 2 <= 14


def test_prompts_wait_for_nobody() -> None:
    assert not any(out for _, out in Served([(0, [40.0] * 5)], 2, busy=0).run())
