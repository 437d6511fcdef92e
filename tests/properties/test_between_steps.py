"""Reads ahead between steps over pointers, of what drafts name: the same bits always, and the same hits.

What the steps use is drawn from a few experts that change now and then, so that some guesses are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_execution import EXPERTS, LAYERS, ROWS_MAX, TOP_K, D, Pool, made
from test_pointer_lookahead import counted

from vllm_spac.cache.prefetch_settings import PrefetchSettings
from vllm_spac.core import RequestRows, RowKind, Step
from vllm_spac.decisions.predictors.base import START, Guess, Predictor, PredictorInputs, Signal
from vllm_spac.methods.od_moe.shadow_predictor import Shadow

__all__ = ["made"]  # a fixture

PERIOD = 3  # steps after which experts are used again


class Named(Shadow):
    """Names what it is passed as the drafter's choice; scores are scaled, so that nothing else than order counts."""

    def guesses(self, seen: PredictorInputs) -> Iterable[Guess]:
        assert seen.layer == START and Signal.DRAFT_ROUTING in self.needs
        for guess in super().guesses(seen):
            yield Guess(guess.first, guess.scores * 3)


def by_drafts(**settings) -> PrefetchSettings:
    predictor: Predictor = Named(LAYERS * EXPERTS)
    return PrefetchSettings(prefetch="shadow", built=predictor, **{"depth": 6, **settings})


class Steps:
    """Steps over a pool, with drafts between them that foresee some of what the next one uses."""

    def __init__(self, pool: Pool, right: float, seed: int, settles: float = 1.0) -> None:
        self.pool, self.right, self.settles = pool, right, settles
        self.rng, self.choice = torch.Generator().manual_seed(seed), random.Random(seed)
        self.hot = [[self._few() for _ in range(PERIOD)] for _ in range(LAYERS)]
        self.used = self.number = 0

    def _few(self) -> list[int]:
        return self.choice.sample(range(EXPERTS), TOP_K + 1)

    def _ids(self, layer: int, rows: int) -> torch.Tensor:
        return torch.tensor([self.choice.sample(self.hot[layer][self.number % PERIOD], TOP_K) for _ in range(rows)])

    def step(self, rows: int, kind: RowKind = RowKind.DECODE) -> None:
        pool = self.pool
        if self.choice.random() < 0.1:
            layer = self.choice.randrange(LAYERS)
            self.hot[layer][self.number % PERIOD] = self._few()
        ids = [self._ids(layer, rows) for layer in range(LAYERS)]
        if pool.signals:
            for count in range(1, min(rows, 4) + 1):
                named = [
                    each if self.choice.random() < self.right else torch.randint(EXPERTS, each.shape) for each in ids
                ]
                pool.draft(torch.stack(named, 1)[:count])
        if self.choice.random() < self.settles:
            pool.settle()
        pool.begin_step(Step((RequestRows(0, rows, kind),)))
        pool.admission.check_integrity()
        for layer in range(LAYERS):
            x, weights = torch.randn(rows, D, generator=self.rng), torch.rand(rows, TOP_K, generator=self.rng)
            out = pool.run(layer, x, weights, ids[layer], "silu", torch.full_like(x, float("nan")))
            assert torch.equal(out, pool.expected(layer, x, weights, ids[layer], "silu"))
            self.used += len(ids[layer].unique())
        pool.end_forward()
        self.number += 1


@settings(max_examples=examples(20))
@given(
    slots=st.integers(TOP_K, LAYERS * EXPERTS),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    rows=st.lists(st.integers(1, 5), min_size=10, max_size=25),
    policy=st.sampled_from(["lru", "utility", "reuse"]),
    seed=st.integers(0, 99),
)
def test_the_same_bits_whatever_is_read(slots, right, rows, policy, seed) -> None:
    pool = Pool(slots, policy=policy, ahead=by_drafts())
    try:
        steps = Steps(pool, right, seed, settles=0.5)
        for count in rows:
            steps.step(count, RowKind.PREFILL if count == 5 else RowKind.DECODE)
        pool.admission.check_integrity()
        stats = pool.snapshot()
        assert stats["hits"] + stats["misses"] == steps.used
        counted(stats)
        if slots == LAYERS * EXPERTS:
            assert stats["prefetches"] == 0 and not pool.signals
    finally:
        pool.close()


def test_some_reads_are_used_and_change_no_hit(made) -> None:
    pool, plain = made(14, ahead=by_drafts()), made(14, ahead=by_drafts())
    plain.ahead.drafts._read_new = lambda: None
    found = []
    for each in (pool, plain):
        steps = Steps(each, 1.0, 0)
        for _ in range(60):
            steps.step(2)
        found.append(each.snapshot())
    ahead, without = found
    assert counted(ahead) and ahead["prefetch_hits"] > 0.9 * ahead["prefetches"] > 50 and without["prefetches"] == 0
    for name in ("hits", "misses", "loads"):
        assert ahead[name] == without[name]


def test_drafts_read_no_more_than_they_may(made) -> None:
    """``depth`` experts between two steps, of the first ``cutoff`` layers, and of none that has a slot."""
    pool = made(12, ahead=by_drafts(depth=2, cutoff=1))
    steps, before = Steps(pool, 0.0, 0), 0
    for _ in range(40):
        steps.step(2)
        keys = pool.ahead.drafts.parts.keys.flatten().tolist()
        assert all(key < EXPERTS for key in keys) and len(keys) == 2
        now = pool.snapshot()["prefetches"]
        assert now - before == sum(key >= 0 for key in keys)
        before = now
    assert before > 10


def test_each_forward_of_the_drafter_adds_to_what_is_read(made) -> None:
    """Earlier layers first, no expert twice, and none that has a slot; a step forgets all of it."""
    pool = made(10, ahead=by_drafts(depth=5))
    steps = Steps(pool, 1.0, 0)
    for _ in range(5):
        steps.step(1)
    parts, far = pool.ahead.drafts.parts, pool.admission.far(0).nonzero().flatten().tolist()
    one, two, three = far[0], far[1], far[-1]
    expected: list[int] = []
    for named in ([one, three], [one, two], [], far):
        ids = torch.full((1, LAYERS, TOP_K), -1)
        for layer in range(LAYERS):
            of_layer = [key % EXPERTS for key in named if key // EXPERTS == layer][:TOP_K]
            ids[0, layer, : len(of_layer)] = torch.tensor(of_layer, dtype=ids.dtype)
            expected += [key for key in map(lambda e: layer * EXPERTS + e, sorted(of_layer)) if key not in expected]
        pool.draft(ids)
        pool.settle()
        assert parts.keys.flatten().tolist() == (expected + [-1] * 8)[:5] + [-1] * 3
    before = pool.snapshot()["prefetches"]
    steps.step(1)
    assert pool.snapshot()["prefetches"] == before + 5


def test_reads_stop_when_a_step_begins(made) -> None:
    """What is not read by then is not there, and is read in place."""
    pool = made(10, ahead=by_drafts())
    steps = Steps(pool, 1.0, 0)
    for _ in range(5):
        steps.step(2)
    drafts, before = pool.ahead.drafts, pool.snapshot()["prefetches"]
    drafts._read_new, read = lambda: None, drafts._read_new
    for _ in range(5):
        steps.step(2)
    assert (drafts.parts.keys >= 0).any() and pool.snapshot()["prefetches"] == before
    drafts._read_new = lambda: (drafts.parts.turn.fill_(-1), read())
    for _ in range(5):
        steps.step(2)
    assert pool.snapshot()["prefetches"] == before


def test_a_step_of_long_prompts_reads_what_was_read_for_it(made) -> None:
    pool = made(10, ahead=by_drafts())
    steps = Steps(pool, 1.0, 0)
    for number in range(12):
        steps.step(2)
        if number > 3:
            steps.step(ROWS_MAX, RowKind.PREFILL)
    assert pool.snapshot()["prefetches"] > 5 and pool.snapshot()["bytes"]["host staged"] > 0
