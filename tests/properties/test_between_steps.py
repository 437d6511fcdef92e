"""Reads ahead between steps over pointers: what the device gives to drafts. The same bits always.

What the steps use is drawn from a few experts that change now and then, so that some guesses are right.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_execution import EXPERTS, LAYERS, ROWS_MAX, TOP_K, D, Pool, made, moved, shape

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
    return PrefetchSettings(prefetch="shadow", built=predictor, **{"extra": 1.0, "depth": 6, **settings})


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
        moved(stats, shape())
        unused = pool.admission.account._unused
        assert stats["prefetch_hits"] + stats["prefetch_wasted"] + len(unused) == stats["prefetches"]
        if slots == LAYERS * EXPERTS:
            assert stats["prefetches"] == 0 and not pool.signals
    finally:
        pool.close()


def test_some_reads_are_used(made) -> None:
    pool, plain = made(14, ahead=by_drafts()), made(14)
    found = []
    for each in (pool, plain):
        steps = Steps(each, 1.0, 0)
        for _ in range(60):
            steps.step(2)
        found.append(each.snapshot())
    ahead, without = found
    assert ahead["prefetch_hits"] > 0.3 * ahead["prefetches"] > 5 and without["prefetches"] == 0
    assert ahead["bytes"]["host ahead"] == ahead["prefetches"] * shape().expert_bytes
    assert ahead["misses"] < without["misses"]


def test_drafts_read_no_more_than_they_may(made) -> None:
    """``depth`` reads between two steps, of the first ``cutoff`` layers."""
    pool = made(12, ahead=by_drafts(depth=2, cutoff=1))
    steps, before = Steps(pool, 0.0, 0), 0
    for _ in range(40):
        steps.step(2)
        now = pool.snapshot()["prefetches"]
        assert now - before <= 2
        before = now
        assert all(key < EXPERTS for key in pool.admission.account._unused)
    assert before > 10


def test_a_step_of_long_prompts_knows_what_drafts_were_given(made) -> None:
    """No report of a step has it: the next one must be told before the host decides what is borrowed."""
    pool = made(10, ahead=by_drafts())
    steps = Steps(pool, 1.0, 0)
    for number in range(12):
        steps.step(2)
        if number > 3:
            steps.step(ROWS_MAX, RowKind.PREFILL)
    assert pool.snapshot()["prefetches"] > 5 and pool.snapshot()["bytes"]["host staged"] > 0
